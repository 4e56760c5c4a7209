"""The quickstart learns, and what it stands on is made once and the same for everyone."""

import hashlib

import pytest
from conftest import ROOT, launch, read_metrics

from tasks import quickstart


@pytest.mark.slow
def test_calculator_is_learned(tmp_path):
    folder = tmp_path / "data"
    quickstart.make(str(folder), products=True)
    files = [
        "--actor.path",
        str(folder / "model"),
        "--data.train-files",
        str(folder / "train.jsonl"),
        "--data.val-files",
        str(folder / "val.jsonl"),
        "--log.default-local-dir",
        str(tmp_path),
    ]
    accuracies = {}
    for agent in ("tool_agent", "single_turn_agent"):
        steps = "30" if agent == "tool_agent" else "6"
        done = launch(
            [
                "--config",
                str(ROOT / "configs" / "tool_agent.yaml"),
                *files,
                "--agent.default-agent-loop",
                agent,
                "--log.experiment-name",
                agent,
                "--trainer.total-training-steps",
                steps,
            ],
            accelerate=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        accuracies[agent] = [
            line["val/exact/mean@1"] for line in read_metrics(tmp_path / agent) if "val/exact/mean@1" in line
        ]
    assert accuracies["tool_agent"][0] < 0.3 and accuracies["tool_agent"][-1] > 0.8
    assert max(accuracies["single_turn_agent"]) < 0.1  # what can be had without the calculator


def test_products_are_of_unseen_pairs_and_a_call_is_one_the_tool_agent_runs():
    from tasks.tools import Call, calculator, parse_hermes

    train, val = quickstart.split_products(0)
    assert len(val) == 256 and not set(train) & set(val) and all(100 <= n <= 999 for pair in train + val for n in pair)
    call, heard, answer = quickstart.ask(347, 862)
    assert parse_hermes(call) == [Call("calculator", {"expression": "347*862"})] and calculator("347*862") == "299114"
    assert quickstart.make_row(347, 862, "val", 0, "*")["reward_model"]["ground_truth"] == "299114"
    tokenizer = quickstart.make_tokenizer(("calculator", quickstart.CALL, quickstart.CALLED))
    ids, labels = quickstart.encode(tokenizer, [quickstart.make_row(347, 862, "val", 0, "*")], [(call, heard, answer)])
    assert (
        tokenizer.decode(labels[0][labels[0] != -100]) == call + answer
    )  # what is read between the turns is not learned
    assert tokenizer.decode(ids[0]) == "<|im_start|>user347*862=<|im_end|><|im_start|>assistant" + call + heard + answer


def test_observation_that_was_trained_on_is_the_one_that_the_tool_agent_renders():
    from tasks.chat import encode_reply

    tokenizer = quickstart.make_tokenizer(("calculator", quickstart.CALL, quickstart.CALLED))
    heard = tokenizer(quickstart.ask(347, 862)[1]).input_ids
    assert encode_reply([{"role": "tool", "content": "299114"}], tokenizer, ["<|im_end|>"]) == heard


def test_made_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "warm_start", lambda *args: None)
    folder = str(tmp_path / "q")
    quickstart.make(folder)
    capsys.readouterr()
    quickstart.make(folder)
    assert capsys.readouterr().out == f"{folder} is ready\n"
    quickstart.make(folder, seed=1)
    assert "made" in capsys.readouterr().out  # another seed is another recipe


def test_folder_of_somebody_elses_is_not_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="thesis.tex"):
        quickstart.make(str(tmp_path))
    assert (tmp_path / "thesis.tex").exists()


def test_model_has_the_size_that_is_said_and_more_rows_than_tokens():
    tokenizer = quickstart.make_tokenizer()
    model = quickstart.make_model(tokenizer)
    assert 2e6 < sum(p.numel() for p in model.parameters()) < 3e6
    assert model.config.vocab_size > len(tokenizer)
    assert tokenizer.decode(tokenizer("47+85=132<|im_end|>").input_ids, skip_special_tokens=True) == "47+85=132"


def test_few_shot_rows_are_the_ones_that_other_systems_were_measured_on(tmp_path):
    quickstart.write_few_shot(str(tmp_path))
    digest = hashlib.md5(
        (tmp_path / "few_shot_train.jsonl").read_bytes() + (tmp_path / "few_shot_val.jsonl").read_bytes()
    ).hexdigest()
    assert digest == "149a93c513f05c94c004ffa3f09597d4"
