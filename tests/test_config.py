import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from config import Config, load_config
from log import to_yaml

ROOT = Path(__file__).parent.parent
COMPLETE = "actor: {path: some/model}\ndata: {train_files: train.jsonl}\n"  # what has no default
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "500")  # tyro breaks its lines there
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def load(tmp_path):
    """load(yaml, *flags): the Config of a file that holds `yaml`, after what has no default."""

    def load(text="", *flags, complete=True):
        path = tmp_path / "x.yaml"
        path.write_text(COMPLETE * complete + text)
        return load_config(["--config", str(path), *flags])

    return load


# What is set arrives


def test_flags_override_yaml_and_yaml_the_defaults(load):
    cfg = load("rollout: {n: 4, temperature: 0.5}\n", "--rollout.n", "6", "--trainer.seed=3")
    assert (cfg.rollout.n, cfg.rollout.temperature, cfg.trainer.seed) == (6, 0.5, 3)
    assert cfg.rollout.top_p == Config().rollout.top_p


def test_flags_alone_are_enough():
    cfg = load_config(["--actor.path", "m", "--data.train-files", "a.jsonl", "b.jsonl"])
    assert (cfg.actor.path, cfg.data.train_files) == ("m", ("a.jsonl", "b.jsonl"))


def test_the_config_flag_may_stand_anywhere(tmp_path):
    (tmp_path / "x.yaml").write_text(COMPLETE + "rollout: {n: 4}\n")
    for argv in (
        ["--rollout.n", "6", "--config", str(tmp_path / "x.yaml")],
        [f"--config={tmp_path / 'x.yaml'}", "--rollout.n", "6"],
    ):
        assert load_config(argv).rollout.n == 6, "a flag overrides the file, wherever it stands"


@pytest.mark.parametrize("name", ["--actor.ppo-mini-batch-size", "--actor.ppo_mini_batch_size"])
def test_a_flag_may_be_written_as_the_knob_is(load, name):
    assert load("", name, "32").actor.ppo_mini_batch_size == 32


@pytest.mark.parametrize("text, value", [("1e-6", 1e-6), ("1.0e-6", 1e-6), ("0.00001", 1e-5), ("1", 1.0), ("0", 0.0)])
def test_a_float_however_it_is_written(load, text, value):
    """PyYAML reads 1e-6 as text."""
    for cfg in (
        load(f"actor:\n  path: m\n  lr: {text}\ndata: {{train_files: a}}\n", complete=False),
        load("", "--actor.lr", text),
    ):
        assert cfg.actor.lr == value and type(cfg.actor.lr) is float


def test_negative_numbers(load):
    cfg = load("loss: {entropy_coeff: -1e-3}\ntrainer: {test_freq: -1}\n")
    assert (cfg.loss.entropy_coeff, cfg.trainer.test_freq) == (-1e-3, -1)
    assert load("", "--loss.entropy-coeff", "-0.5").loss.entropy_coeff == -0.5


@pytest.mark.parametrize(
    "before, flags, after",
    [
        ("true", [], True),
        ("false", [], False),
        ("true", ["--rollout.no-enforce-eager"], False),
        ("false", ["--rollout.enforce-eager"], True),
    ],
)
def test_bools(load, before, flags, after):
    assert load(f"rollout: {{enforce_eager: {before}}}\n", *flags).rollout.enforce_eager is after


def test_none_and_back(load):
    assert (
        load("actor: {path: m, log_prob_max_token_len_per_gpu: 20000}\n").actor.log_prob_max_token_len_per_gpu == 20000
    )
    assert load("actor: {path: m, log_prob_max_token_len_per_gpu: null}\n").actor.log_prob_max_token_len_per_gpu is None
    assert load("loss: {clip_ratio_high: 0.28}\n", "--loss.clip-ratio-high", "None").loss.clip_ratio_high is None
    assert load("ref: {path: null}\n").ref.path is None
    assert load("ref: {path: other/model}\n").ref.path == "other/model"


@pytest.mark.parametrize(
    "text, value",
    [
        ("a.jsonl", ("a.jsonl",)),
        ("[a.jsonl]", ("a.jsonl",)),
        ("[a, b.parquet]", ("a", "b.parquet")),
        ("[]", ()),
        ("[with blank.jsonl]", ("with blank.jsonl",)),
    ],
)
def test_tuples_take_a_list_or_one_value(load, text, value):
    assert load(f"data: {{train_files: x, val_files: {text}}}\n").data.val_files == value


def test_tuples_of_numbers_and_of_choices(load):
    cfg = load("actor: {path: m, betas: [0.9, 0.95]}\nlog: {logger: [console, wandb]}\n")
    assert (cfg.actor.betas, cfg.log.logger) == ((0.9, 0.95), ("console", "wandb"))


def test_a_flag_replaces_a_tuple(load):
    assert load("data: {train_files: [a, b, c]}\n", "--data.train-files", "d").data.train_files == ("d",)


def test_an_empty_group_sets_nothing(load):
    assert load("rollout:\n  # n: 4\n").rollout == Config().rollout


def test_loss_scale_factor_is_the_response_length_unless_given(load):
    assert load("data: {train_files: a, max_response_length: 100}\n").loss.loss_scale_factor == 100.0
    assert load("loss: {loss_scale_factor: 8}\n").loss.loss_scale_factor == 8.0


def test_to_yaml_reads_back_as_the_same(load, tmp_path):
    cfg = load(
        "actor: {path: m, lr: 3e-7, betas: [0.9, 0.95]}\ndata: {train_files: [a, b], val_files: []}\nlog: {logger: []}\nref: {path: r}\n"
        "loss: {clip_ratio_high: 0.28, use_kl_loss: true, kl_loss_type: k3+}\nrollout: {free_cache_engine: false}\ncheckpoint: {resume: never}\n"
    )
    (tmp_path / "again.yaml").write_text(to_yaml(cfg))
    assert load_config(["--config", str(tmp_path / "again.yaml")]) == cfg


# The configurations of the repository


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_complete(path, tmp_path):
    cfg = load_config(["--config", str(path)])
    (tmp_path / "again.yaml").write_text(to_yaml(cfg))
    assert load_config(["--config", str(tmp_path / "again.yaml")]) == cfg
    lines = path.read_text().splitlines()
    assert len(lines) <= 30 and lines[0].startswith("# "), "at most 30 lines, the first of them says what it is"


def test_no_config_names_a_run_like_another():
    names = [load_config(["--config", str(path)]).log.experiment_name for path in CONFIGS]
    assert len(set(names)) == len(names), f"two would write into one folder: {names}"


def test_the_qwen3_example_is_verls_script():
    cfg = load_config(["--config", "configs/qwen3_4b_fsdp.yaml"])
    data, actor, loss, rollout, algorithm = cfg.data, cfg.actor, cfg.loss, cfg.rollout, cfg.algorithm
    assert (data.train_files, data.val_files) == (("data/gsm8k/train.parquet",), ("data/gsm8k/test.parquet",))
    assert (data.train_batch_size, data.max_prompt_length, data.max_response_length) == (512, 1024, 1024)
    assert (data.filter_overlong_prompts, data.truncation) == (True, "error")
    assert (actor.path, actor.lr, actor.ppo_mini_batch_size, actor.ppo_epochs) == ("Qwen/Qwen3-4B", 1e-6, 256, 1)
    assert (actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, actor.log_prob_max_token_len_per_gpu) == (
        True,
        3000,
        4096,
    )
    assert actor.enable_gradient_checkpointing
    assert (loss.loss_mode, loss.use_kl_loss, loss.kl_loss_coef, loss.kl_loss_type, loss.entropy_coeff) == (
        "vanilla",
        True,
        0.001,
        "low_var_kl",
        0.0,
    )
    assert (rollout.n, rollout.gpu_memory_utilization, rollout.free_cache_engine, rollout.enforce_eager) == (
        5,
        0.6,
        True,
        False,
    )
    assert cfg.ref.param_offload and cfg.needs_reference
    assert (algorithm.adv_estimator, algorithm.use_kl_in_reward, algorithm.norm_adv_by_std_in_grpo) == (
        "grpo",
        False,
        True,
    )
    assert (cfg.trainer.total_epochs, cfg.trainer.test_freq, cfg.checkpoint.save_freq) == (15, 5, 20)
    assert cfg.old_logprobs_from == "actor", "two updates a step"


# What is derived


@pytest.mark.parametrize(
    "text, source",
    [
        ("", "update"),  # one update a step
        ("actor: {path: m, ppo_mini_batch_size: 32}\n", "actor"),
        ("actor: {path: m, ppo_epochs: 2}\n", "actor"),
        ("algorithm: {use_kl_in_reward: true}\n", "actor"),  # needed before the update
        ("loss: {bypass_mode: true}\n", "rollout"),
        ("loss: {bypass_mode: true}\nactor: {path: m, ppo_epochs: 2}\n", "rollout"),
    ],
)
def test_where_old_logprobs_come_from(load, text, source):
    assert load(text).old_logprobs_from == source


def test_the_reference_is_loaded_for_a_kl_only(load):
    assert not load().needs_reference
    assert (
        load("loss: {use_kl_loss: true}\n").needs_reference
        and load("algorithm: {use_kl_in_reward: true}\n").needs_reference
    )


@pytest.mark.parametrize(
    "text, note",
    [
        ("loss: {use_kl_loss: true}\nalgorithm: {use_kl_in_reward: true}\n", "loss.use_kl_loss"),
        ("loss: {use_kl_loss: true, kl_loss_type: k1}\n", "loss.kl_loss_type=k1"),
        ("rollout: {top_p: 0.9}\n", "rollout.top_p=0.9"),
        ("rollout: {top_k: 20}\n", "rollout.top_k=20"),
    ],
)
def test_what_is_rarely_meant_is_noted_once(load, monkeypatch, capsys, text, note):
    load(text)
    printed = capsys.readouterr().out
    assert printed.startswith("note: ") and note in printed and printed.count("\n") == 1
    monkeypatch.setenv("RANK", "1")
    load(text)
    assert capsys.readouterr().out == ""


def test_nothing_is_noted_of_the_defaults(load, capsys):
    load()
    assert capsys.readouterr().out == ""


# What is wrong is named

MISTAKES = {  # yaml, flags, and what the message must contain: the knob, the value, and where it helps what is allowed
    "unknown group": ("rolout: {n: 4}\n", [], ["'rolout'", "did you mean rollout?", "groups: data, actor"]),
    "unknown knob": ("rollout: {temprature: 1.0}\n", [], ["rollout.temprature", "did you mean temperature?"]),
    "knob of another group": ("rollout: {lr: 1.0}\n", [], ["rollout.lr"]),
    "a knob that is a number": ("rollout: {1: 2}\n", [], ["rollout.1"]),
    "a group that is a value": ("rollout: 4\n", [], ["rollout", "4"]),
    "a knob that is a mapping": ("rollout: {n: {x: 1}}\n", [], ["rollout.n={'x': 1}", "int"]),
    "a knob that is a list": ("rollout: {n: [1, 2]}\n", [], ["rollout.n=[1, 2]"]),
    "null for a number": ("rollout: {n: null}\n", [], ["rollout.n", "int"]),
    "null for a text": ("log: {experiment_name: null}\n", [], ["log.experiment_name", "str"]),
    "a number for a bool": ("rollout: {enforce_eager: 1}\n", [], ["rollout.enforce_eager=1", "true or false"]),
    "a text for a bool": ("rollout: {enforce_eager: maybe}\n", [], ["rollout.enforce_eager='maybe'", "true or false"]),
    "B % M": (
        "data: {train_files: a, train_batch_size: 100}\n",
        [],
        ["data.train_batch_size=100", "actor.ppo_mini_batch_size=64"],
    ),
    "M above B": (
        "actor: {path: m, ppo_mini_batch_size: 128}\n",
        [],
        ["data.train_batch_size=64", "actor.ppo_mini_batch_size=128"],
    ),
    "adv_estimator": (
        "",
        ["--algorithm.adv-estimator", "grppo"],
        ["algorithm.adv_estimator='grppo'", "did you mean grpo?", "rloo"],
    ),
    "loss_mode": ("", ["--loss.loss-mode", "vanila"], ["loss.loss_mode='vanila'", "did you mean vanilla?"]),
    "agent": (
        "",
        ["--agent.default-agent-loop", "single_turn"],
        ["agent.default_agent_loop='single_turn'", "did you mean single_turn_agent?"],
    ),
    "reward": ("", ["--reward.name", "gsm8"], ["reward.name='gsm8'", "did you mean gsm8k?"]),
    "no reward file": ("", ["--reward.custom-path", "nowhere.py"], ["reward.custom_path='nowhere.py'"]),
    "n of 1": ("rollout: {n: 1}\n", [], ["rollout.n=1", "algorithm.adv_estimator=grpo"]),
    "budget": (
        "",
        ["--actor.ppo-max-token-len-per-gpu", "1000"],
        ["actor.ppo_max_token_len_per_gpu=1000", "data.max_prompt_length=512", "= 1024 tokens"],
    ),
    "budget without gradient": (
        "",
        ["--actor.log-prob-max-token-len-per-gpu", "1023"],
        ["actor.log_prob_max_token_len_per_gpu=1023", "= 1024 tokens"],
    ),
    "bypass and correction": (
        "loss: {bypass_mode: true, rollout_is: token}\n",
        [],
        ["loss.bypass_mode", "loss.rollout_is=token"],
    ),
    "val_only without rows": ("trainer: {val_only: true}\n", [], ["trainer.val_only", "data.val_files"]),
}


@pytest.mark.parametrize("text, flags, parts", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_a_value_error_that_names_it(load, text, flags, parts):
    with pytest.raises(ValueError) as error:
        load(text, *flags)
    message = str(error.value)
    assert all(part in message for part in parts) and "\n" not in message, message


WHOLE_FILES = {
    "no model": ("data: {train_files: a}\n", ["actor.path"]),
    "no rows": ("actor: {path: m}\n", ["data.train_files"]),
    "not YAML": ("actor: [1\n", ["x.yaml is not YAML", "line 2"]),
    "a list": ("- actor\n", ["x.yaml", "['actor']"]),
    "a text": ("actor\n", ["x.yaml", "'actor'"]),
}


@pytest.mark.parametrize("text, parts", WHOLE_FILES.values(), ids=WHOLE_FILES)
def test_a_file_that_cannot_be_a_run(load, text, parts):
    with pytest.raises(ValueError) as error:
        load(text, complete=False)
    assert all(part in str(error.value) for part in parts), error.value


def test_an_empty_file_lacks_what_has_no_default(load):
    with pytest.raises(ValueError, match=r"actor\.path is empty"):
        load("", complete=False)


def test_a_missing_file_is_named(capsys):
    with pytest.raises(ValueError, match=r"--config nowhere\.yaml: there is no such file"):
        load_config(["--config", "nowhere.yaml"])
    with pytest.raises(SystemExit, match="2"):
        load_config(["--rollout.n", "4", "--config"])
    assert "--config: expected one argument" in capsys.readouterr().err


@pytest.mark.parametrize("processes", [65, 1000])
def test_too_many_processes(load, monkeypatch, processes):
    monkeypatch.setenv("WORLD_SIZE", "64")
    load()
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(
        ValueError,
        match=rf"{processes} processes are too many .*data\.train_batch_size=64 .*actor\.ppo_mini_batch_size=64 x rollout\.n=8",
    ):
        load()


def test_too_many_processes_for_a_mini_batch(load, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "9")
    load("actor: {path: m, ppo_mini_batch_size: 2}\nrollout: {n: 5}\n")  # 10 trajectories an update
    with pytest.raises(ValueError, match=r"actor\.ppo_mini_batch_size=2 x rollout\.n=4"):
        load("actor: {path: m, ppo_mini_batch_size: 2}\nrollout: {n: 4}\n")


def test_rows_need_no_token_budget(load):
    load("actor: {path: m, use_dynamic_bsz: false, ppo_max_token_len_per_gpu: 10}\n")


TYRO = {  # what tyro refuses: message on stderr, exit code 2
    "unknown flag": ("", ["--data.nope", "17"], ["--data.nope", "17"]),
    "misspelt flag": (
        "",
        ["--data.train-batch-siz", "17"],
        ["--data.train-batch-siz", "17", "Perhaps you meant", "--data.train-batch-size INT"],
    ),
    "a text for an int": ("", ["--data.train-batch-size", "many"], ["--data.train-batch-size", "'many'"]),
    "a text for an int in YAML": (
        "data: {train_files: a, train_batch_size: many}\n",
        [],
        ["--data.train-batch-size", "'many'"],
    ),
    "a float for an int in YAML": ("rollout: {n: 4.5}\n", [], ["--rollout.n", "'4.5'"]),
    "a bool for an int in YAML": ("rollout: {n: true}\n", [], ["--rollout.n", "'True'"]),
    "a text for a float": ("", ["--actor.lr", "fast"], ["--actor.lr", "'fast'"]),
    "a text for a float or None": ("loss: {clip_ratio_high: wide}\n", [], ["--loss.clip-ratio-high", "'wide'"]),
    "one number for two": ("actor: {path: m, betas: [0.9]}\n", [], ["--actor.betas"]),
    "not a choice": ("actor: {path: m, dtype: fp8}\n", [], ["--actor.dtype", "'fp8'", "bfloat16"]),
    "not a choice in a tuple": ("log: {logger: [console, mlflow]}\n", [], ["--log.logger", "'mlflow'", "wandb"]),
    "truncation": ("", ["--data.truncation", "middel"], ["--data.truncation", "'middel'", "middle"]),
    "kl_loss_type": ("", ["--loss.kl-loss-type", "k9"], ["loss.kl_loss_type='k9'", "low_var_kl"]),
    "kl_penalty": ("", ["--algorithm.kl-penalty", "k9"], ["algorithm.kl_penalty='k9'", "low_var_kl"]),
    "loss_agg_mode": ("", ["--loss.loss-agg-mode", "mean"], ["loss.loss_agg_mode='mean'", "token-mean"]),
    "rollout_is": ("", ["--loss.rollout-is", "tokens"], ["--loss.rollout-is", "'tokens'"]),
    "negative lr": ("", ["--actor.lr", "-1"], ["actor.lr=-1.0"]),
    "lr that is no number": ("", ["--actor.lr", "nan"], ["actor.lr=nan"]),
    "shared prompts, cut by trajectories": (
        "",
        ["--actor.share-prompts", "--actor.no-use-dynamic-bsz"],
        ["actor.share_prompts", "actor.use_dynamic_bsz"],
    ),
    "beta of 1": ("", ["--actor.betas", "0.9", "1.0"], ["actor.betas=(0.9, 1.0)"]),
    "no skipped step": ("", ["--log.max-skipped-steps", "0"], ["log.max_skipped_steps=0"]),
    "n of 0": ("", ["--rollout.n", "0"], ["rollout.n=0"]),
    "temperature": ("", ["--rollout.temperature", "0"], ["rollout.temperature=0.0", "val.temperature"]),
    "two rewards": (
        "",
        ["--reward.name", "gsm8k", "--reward.custom-path", "x.py"],
        ["reward.name='gsm8k'", "reward.custom_path='x.py'"],
    ),
    "no epoch": ("", ["--trainer.total-epochs", "0"], ["trainer.total_epochs=0"]),
}


@pytest.mark.parametrize("text, flags, parts", TYRO.values(), ids=TYRO)
def test_a_mistake_of_type_names_flag_and_value(load, capsys, text, flags, parts):
    with pytest.raises(SystemExit) as exit:
        load(text, *flags)
    message = capsys.readouterr().err
    assert exit.value.code == 2
    assert all(part in message for part in parts), message


# As a user sees it


def python(*args, cwd=ROOT):
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "flags, part, most_lines",
    [(["--rollout.n", "1"], "error: rollout.n=1", 1), (["--rollout.n", "many"], "parsing --rollout.n: ", 9)],
)
def test_train_says_what_is_wrong_without_a_traceback(tmp_path, flags, part, most_lines):
    (tmp_path / "x.yaml").write_text(COMPLETE)
    run = python(ROOT / "train.py", "--config", tmp_path / "x.yaml", *flags, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert part in run.stderr and "Traceback" not in run.stderr and len(run.stderr.splitlines()) <= most_lines, (
        run.stderr
    )
    assert [p.name for p in tmp_path.iterdir()] == ["x.yaml"], "a run that never was left something behind"


def test_a_configuration_needs_neither_vllm_nor_accelerate_nor_transformers():
    script = (
        "import sys, train; from config import load_config\n"
        "load_config(['--config', 'configs/qwen3_4b_fsdp.yaml'])\n"
        "print([m for m in ('vllm', 'accelerate', 'transformers', 'datasets', 'pandas', 'wandb') if m in sys.modules])"
    )
    run = python("-c", script)
    assert (run.stdout, run.returncode) == ("[]\n", 0), run.stderr


def test_the_configuration_is_frozen():
    with pytest.raises(AttributeError):
        Config().rollout.n = 3
    assert replace(Config().rollout, n=3).n == 3
