import datetime
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import reasoning_gym
from conftest import ROOT
from reasoning_gym.algorithmic.word_sorting import TextTransformation
from reasoning_gym.factory import DATASETS
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from batch import Task
from data import DataConfig, TaskStream, filter_overlong, fit, load_tasks, render
from tasks import procedural

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{% if m.name is defined %}named {% endif %}{% if m.role == 'bad' %}{{ raise_exception('bad role') }}{% endif %}"
    "{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
CHAT = [{"role": "user", "content": "1 + 2"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"split": "train", "index": 7},
    "agent_name": "tool_agent",
}


@pytest.fixture(scope="module")
def tokenizer():
    """One token a word; a <bos> before texts, but not before what the template wrote."""
    words = ["<unk>", "<bos>", "user", "assistant", "system", "named", "calculator", "+", *map(str, range(10))]
    model = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", bos_token="<bos>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


WRITERS = [(write_jsonl, "rows.jsonl"), (write_parquet, "rows.parquet")]


def load(*files, max_samples=-1, **knobs):
    return load_tasks(files, DataConfig(**knobs), max_samples)


def tasks_of(n):
    return [Task(f"{i}", "exact", i, index=i) for i in range(n)]


# Rows


@pytest.mark.parametrize("write, name", WRITERS)
def test_verl_rows(tmp_path, write, name):
    [task] = load(write(tmp_path / name, [VERL]))
    assert (
        task.messages == CHAT
        and task.data_source == "openai/gsm8k"
        and task.ground_truth == "3"
        and task.agent_name == "tool_agent"
    )
    assert task.extra_info == {"ability": "math", "split": "train", "index": 7}


@pytest.mark.parametrize("write, name", WRITERS)
@pytest.mark.parametrize("column", ["answer", "solution", "ground_truth"])
@pytest.mark.parametrize("prompt", ["1 + 2 =", CHAT])
def test_trl_rows(tmp_path, write, name, column, prompt):
    [task] = load(write(tmp_path / name, [{"prompt": prompt, column: "3", "level": 1}]), default_data_source="exact")
    assert task == Task(prompt, "exact", "3", {"level": 1}, None, 0)


def test_parquet_messages_lose_the_keys_that_only_others_have(tmp_path):
    chat = [{"role": "system", "content": "1", "name": "x"}, {"role": "user", "content": "2"}]
    [task] = load(write_parquet(tmp_path / "a.parquet", [{"prompt": chat, "answer": "3"}]))
    assert task.messages == chat


def test_structured_ground_truth_survives_parquet(tmp_path):
    truth = {"target": 24, "numbers": [3, 5, 3]}
    [task] = load(write_parquet(tmp_path / "a.parquet", [VERL | {"reward_model": {"ground_truth": truth}}]))
    assert task.ground_truth == truth and type(task.ground_truth["numbers"]) is list


def test_most_specific_ground_truth_column_wins_and_the_others_are_kept(tmp_path):
    [task] = load(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "solution": "long", "answer": "3"}]))
    assert task.ground_truth == "3" and task.extra_info == {"solution": "long"}


def test_a_row_of_other_shapes_beside_verls_still_loads(tmp_path):
    """Parquet and mixed JSONL give a None reward_model to the TRL rows of a joined file."""
    rows = [VERL, {"prompt": "1", "answer": 0, "reward_model": None, "data_source": None, "extra_info": None}]
    task = load(write_jsonl(tmp_path / "a.jsonl", rows), default_data_source="exact")[1]
    assert (task.ground_truth, task.data_source, task.extra_info) == (0, "exact", {})


def test_rows_are_numbered_over_all_files_in_the_order_named(tmp_path):
    b = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "b", "answer": 1}])
    write_parquet(tmp_path / "a1.parquet", [{"prompt": "a1", "answer": 1}])
    write_parquet(tmp_path / "a2.parquet", [{"prompt": "a2", "answer": 1}])
    tasks = load(b, str(tmp_path / "a*.parquet"))
    assert [(t.index, t.messages) for t in tasks] == [(0, "b"), (1, "a1"), (2, "a2")]
    assert [t.messages for t in load(b, str(tmp_path / "a*.parquet"), max_samples=2)] == ["b", "a1"]


def test_prompt_key(tmp_path):
    assert (
        load(write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": 1}]), prompt_key="question")[0].messages
        == "q"
    )


def test_blank_lines_are_no_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "answer": 1}\n\n{"prompt": "2", "answer": 2}')
    assert [t.messages for t in load(str(tmp_path / "a.jsonl"))] == ["1", "2"]


@pytest.mark.parametrize(
    "source, asked, data_source",
    [
        ("openai/gsm8k:main:test", ("openai/gsm8k", "main", "test"), "openai/gsm8k"),
        ("openai/gsm8k:main", ("openai/gsm8k", "main", "train"), "openai/gsm8k"),
        ("org/set::test", ("org/set", None, "test"), "org/set"),
        ("squad", ("squad", None, "train"), "squad"),
    ],
)
def test_hugging_face_id(monkeypatch, source, asked, data_source):
    calls = []

    def load_dataset(name, config, split):
        calls.append((name, config, split))
        return [{"question": "q", "answer": "#### 3"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    [task] = load(source, prompt_key="question")
    assert calls == [asked] and task.data_source == data_source and task.ground_truth == "#### 3"
    assert load(source, prompt_key="question", default_data_source="gsm8k")[0].data_source == "gsm8k"


def test_hugging_face_datasets_on_a_local_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", [{"prompt": CHAT, "answer": "3"}] * 2)
    assert [t.messages for t in load(str(tmp_path / "set"))] == [CHAT, CHAT]


# Bad input


@pytest.mark.parametrize(
    "text, says",
    [
        ('{"prompt": "1", "answer": 1}\n{"prompt": ', ["line 2", "JSON"]),
        ('{"prompt": "1", "answer": 1}\n[1]', ["line 2", "JSON", "[1]"]),
        ("", ["no rows"]),
        ('{"query": "1", "label": 1}', ["'prompt'", "data.prompt_key", "query, label"]),
        ('{"prompt": "1", "label": 1}', ["line 1", "reward_model.ground_truth", "answer", "solution", "prompt, label"]),
        ('{"prompt": "1", "answer": null}', ["line 1", "no ground truth"]),
        ('{"prompt": [{"role": "user"}], "reward_model": {"style": "rule"}}', ["no ground truth"]),
        ('{"prompt": 5, "answer": 1}', ["line 1", "'prompt'", "text or a list of messages", "5"]),
        ('{"prompt": ["hi"], "answer": 1}', ["line 1", "role and content", "['hi']"]),
        ('{"prompt": [], "answer": 1}', ["line 1", "role and content"]),
        ('{"prompt": "", "answer": 1}', ["line 1", "text"]),
    ],
)
def test_bad_rows(tmp_path, text, says):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError) as e:
        load(str(path))
    for part in ["data.train_files", str(path), *says]:
        assert part in str(e.value)
    assert "\n" not in str(e.value)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff\xfe", "answer": 1}')
    with pytest.raises(ValueError, match="a.jsonl line 1"):
        load(str(tmp_path / "a.jsonl"))


def test_unreadable_parquet(tmp_path):
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="data.train_files.*a.parquet.*Parquet"):
        load(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("name", ["gone.jsonl", "gone*.parquet"])
def test_missing_file(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=r"data\.train_files.*gone"):
        load(str(tmp_path / name))
    with pytest.raises(FileNotFoundError, match=r"data\.val_files.*gone"):
        load_tasks((str(tmp_path / name),), DataConfig(), -1, "data.val_files")


def test_no_files():
    with pytest.raises(ValueError, match=r"data\.train_files=\[\] has no rows"):
        load()


def test_neither_a_file_nor_a_dataset(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,answer\n1,2\n")
    with pytest.raises(ValueError, match=r"data\.train_files.*rows\.csv.*\.jsonl.*Hugging Face") as e:
        load(str(tmp_path / "rows.csv"))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "knobs, says",
    [
        ({"train_batch_size": 0}, "data.train_batch_size=0"),
        ({"max_prompt_length": -1}, "data.max_prompt_length=-1"),
        ({"max_response_length": 0}, "data.max_response_length=0"),
        ({"train_max_samples": 0}, "data.train_max_samples=0"),
        ({"val_max_samples": -2}, "data.val_max_samples=-2"),
        ({"truncation": "both"}, "data.truncation='both' must be error, left, right or middle"),
    ],
)
def test_bad_knobs(knobs, says):
    with pytest.raises(ValueError) as e:
        DataConfig(**knobs)
    assert says in str(e.value)


# Prompts to tokens


def test_render(tokenizer):
    def ids(text):
        return [tokenizer.convert_tokens_to_ids(w) for w in text.split()]

    assert render("1 + 2", tokenizer) == ids("<bos> 1 + 2")
    assert render(CHAT, tokenizer) == ids("user 1 + 2 assistant"), "a template writes its own special tokens"
    assert render(CHAT, tokenizer) == tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    assert render(CHAT, tokenizer, tools) == ids("calculator user 1 + 2 assistant")


def test_chat_without_a_template(tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, name_or_path="some/model")
    assert render("1", bare)
    with pytest.raises(ValueError, match="some/model.*no chat template.*text prompts"):
        render(CHAT, bare)
    with pytest.raises(ValueError, match="row 0.*no chat template"):
        filter_overlong([Task(CHAT, "exact", 0)], bare, DataConfig())


@pytest.mark.parametrize(
    "truncation, limit, expected",
    [
        ("error", 5, [0, 1, 2, 3, 4]),
        ("left", 5, [0, 1, 2, 3, 4]),
        ("left", 2, [3, 4]),
        ("right", 2, [0, 1]),
        ("middle", 2, [0, 4]),
        ("middle", 3, [0, 3, 4]),
        ("middle", 1, [4]),
    ],
)
def test_fit(truncation, limit, expected):
    assert (
        fit([0, 1, 2, 3, 4], DataConfig(max_prompt_length=limit, truncation=truncation), Task("", "exact", 0))
        == expected
    )


def test_fit_names_the_row_and_both_lengths():
    with pytest.raises(ValueError, match="row 7 has 5 tokens.*data.max_prompt_length=4.*data.truncation"):
        fit([0, 1, 2, 3, 4], DataConfig(max_prompt_length=4), Task("", "exact", 0, index=7))


def test_filter_keeps_equality_and_counts_what_render_gives(tokenizer, capsys):
    prompts = [
        "1 2 3",
        "1 2 3 4",
        "1 2 3 4 5",
        *([{"role": "user", "content": text}] for text in ("1 2", "1 2 3", "1 2 3 4")),
    ]
    tasks = [Task(p, "exact", 0, index=i) for i, p in enumerate(prompts)]
    for limit in range(4, 8):
        expected = [t.index for t in tasks if len(render(t.messages, tokenizer)) <= limit]
        assert [t.index for t in filter_overlong(tasks, tokenizer, DataConfig(max_prompt_length=limit))] == expected
    capsys.readouterr()
    assert (
        len(filter_overlong(tasks, tokenizer, DataConfig(max_prompt_length=5))) == 4
    )  # 4, 5 with <bos>; 4, 5 with user, assistant
    assert "dropped 2 of 6 rows" in capsys.readouterr().out
    assert filter_overlong(tasks, tokenizer, DataConfig(max_prompt_length=1, filter_overlong_prompts=False)) == tasks


def test_filter_counts_tools(tokenizer):
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    task, cfg = Task(CHAT, "exact", 0), DataConfig(max_prompt_length=5)
    assert filter_overlong([task], tokenizer, cfg) == [task]
    with pytest.raises(ValueError, match=r"all 1 prompts are longer than data\.max_prompt_length=5"):
        filter_overlong([task], tokenizer, cfg, lambda task: (task.messages, tools))


def test_a_template_that_raises_names_the_row(tokenizer):
    tasks = [Task(CHAT, "exact", 0, index=4), Task([{"role": "bad", "content": ""}], "exact", 0, index=5)]
    with pytest.raises(ValueError, match="row 5.*bad role"):
        filter_overlong(tasks, tokenizer, DataConfig())


# Order


def draw(stream, steps):
    return [[t.index for t in stream.next_batch()] for _ in range(steps)]


def test_an_epoch_hands_out_every_row_once_and_drops_the_rest():
    stream = TaskStream(tasks_of(11), DataConfig(train_batch_size=3), seed=0)
    assert stream.steps_per_epoch == 3
    epochs = [draw(stream, 3) for _ in range(3)]
    for epoch in epochs:
        rows = sum(epoch, [])
        assert len(set(rows)) == 9 and set(rows) <= set(range(11))
    assert len({str(epoch) for epoch in epochs}) == 3, "every epoch has its own order"


def test_an_epoch_of_whole_batches_hands_out_every_row():
    epoch = draw(TaskStream(tasks_of(6), DataConfig(train_batch_size=3), seed=0), 2)
    assert sorted(sum(epoch, [])) == list(range(6))


def test_filter_counts_what_an_agent_makes_of_the_prompt(tokenizer):
    tasks, cfg = [Task("1 2", "exact", 0, index=0), Task(CHAT, "exact", 0, index=1)], DataConfig(max_prompt_length=5)

    def longer(task):
        return ([{"role": "system", "content": "1"}, *CHAT] if task.index else "1 2 3 4"), None

    assert (
        filter_overlong(tasks, tokenizer, cfg) == tasks and filter_overlong(tasks, tokenizer, cfg, longer) == tasks[:1]
    )


def test_a_smaller_batch_takes_the_next_rows_and_never_two_epochs():
    stream = TaskStream(tasks_of(5), DataConfig(train_batch_size=2, shuffle=False), seed=0)
    assert [[t.index for t in stream.next_batch(size)] for size in (None, 1, 1, 2, None)] == [
        [0, 1],
        [2],
        [3],
        [0, 1],
        [2, 3],
    ]


def test_file_order_without_shuffle():
    stream = TaskStream(tasks_of(5), DataConfig(train_batch_size=2, shuffle=False), seed=0)
    assert draw(stream, 5) == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


def test_order_depends_on_seed_alone():
    def make(seed):
        return draw(TaskStream(tasks_of(50), DataConfig(train_batch_size=10), seed), 12)

    assert make(1) == make(1) != make(2)
    assert make(0)[0] == [10, 17, 27, 34, 23, 6, 7, 33, 12, 46], "the order of published runs must not change"


@pytest.mark.parametrize("steps", range(8))
def test_resume_continues_where_it_stopped(steps):
    cfg = DataConfig(train_batch_size=3)
    whole = draw(TaskStream(tasks_of(10), cfg, seed=3), 12)
    first = TaskStream(tasks_of(10), cfg, seed=3)
    assert draw(first, steps) == whole[:steps]
    state = json.loads(json.dumps(first.state_dict()))
    assert set(state) == {"epoch", "position"}
    second = TaskStream(tasks_of(10), cfg, seed=3)
    second.load_state_dict(state)
    assert draw(second, 12 - steps) == whole[steps:]


def test_resume_on_fewer_rows():
    stream = TaskStream(tasks_of(4), DataConfig(train_batch_size=2), seed=0)
    with pytest.raises(ValueError, match="6 rows into an epoch, and data.train_files has 4"):
        stream.load_state_dict({"epoch": 0, "position": 6})


def test_dataset_smaller_than_a_batch():
    with pytest.raises(ValueError, match=r"has 3 rows, fewer than data\.train_batch_size=4"):
        TaskStream(tasks_of(3), DataConfig(train_batch_size=4), seed=0)


# Tasks of reasoning_gym


def gym(source, **knobs):
    return load(f"reasoning_gym:{source}", **knobs)


def test_reasoning_gym_rows_are_its_own(monkeypatch):
    entry = reasoning_gym.create_dataset("chain_sum", size=3, seed=42, min_terms=3, max_terms=3)[2]
    tasks = gym("chain_sum?size=3&seed=42&min_terms=3&max_terms=3")
    assert len(tasks) == 3 and tasks[2].index == 2 and tasks[2].data_source == "reasoning_gym/chain_sum"
    assert tasks[2].ground_truth == entry["answer"] and tasks[2].extra_info == entry
    [message] = tasks[2].messages
    assert (
        message["role"] == "user"
        and message["content"].startswith(entry["question"])
        and "<answer>" in message["content"]
    )


def test_tasks_take_turns_and_max_samples_counts_rows():
    sources = [t.data_source.partition("/")[2] for t in gym("chain_sum,countdown?size=2")]
    assert sources == ["chain_sum", "countdown", "chain_sum", "countdown"]
    assert len(load_tasks(("reasoning_gym:chain_sum",), DataConfig(), 7)) == 7


def test_default_is_500_rows_from_seed_0():
    assert (tasks := gym("leg_counting")) == gym("leg_counting?seed=0&size=500") and len(tasks) == 500
    assert gym("leg_counting?size=5&seed=3") == [
        Task(t.messages, t.data_source, t.ground_truth, t.extra_info, None, i)
        for i, t in enumerate(gym("leg_counting?size=5&seed=3"))
    ]
    assert gym("leg_counting?size=5&seed=3")[0].messages == tasks[3].messages != tasks[0].messages


@pytest.mark.slow
def test_every_task_loads_and_is_the_same_in_every_process(tmp_path):
    """Several tasks look at the hash seed or at the global random state: ranks and restarts would train on different rows."""
    names = sorted(set(DATASETS) - {"composite"})
    assert len(names) > 100
    script = f"import json, random; from data import *; random.seed(); print(json.dumps([(t.messages, t.extra_info) for t in load_tasks(('reasoning_gym:{','.join(names)}?size=2',), DataConfig())], default=str))"
    made = [
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "12"
    ]
    assert made[0] == made[1] and len(json.loads(made[0])) == 2 * len(names)


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("basic_arithmetic", "format_style=natural", "natural"),
        ("basic_arithmetic", "allow_parentheses=false", False),
        ("basic_arithmetic", "operators=+,*", ["+", "*"]),
        ("complex_arithmetic", "operations_weights=0,1,0,0", [0.0, 1.0, 0.0, 0.0]),
        ("complex_arithmetic", "operations=+,-", ("+", "-")),
        ("time_intervals", "min_date=2001-02-03", datetime.date(2001, 2, 3)),
        ("word_sorting", "transformation=uppercase", TextTransformation.UPPERCASE),
        ("binary_alternation", "p_solvable=1", 1.0),
        ("chain_sum", "seed=7", 7),
    ],
)
def test_options_take_the_type_of_their_field(name, text, value):
    _, options = procedural.parse(f"reasoning_gym:{name}?{text}", "data.train_files")
    typed = procedural.typed_options(name, options, "data.train_files")[text.partition("=")[0]]
    assert typed == value and type(typed) is type(value)


def test_a_reasoning_gym_data_source_is_not_looked_for_on_the_hub():
    with pytest.raises(
        ValueError,
        match="'reasoning_gym/chain_sum' is no file; rows that reasoning_gym makes are asked for as reasoning_gym:chain_sum",
    ):
        load_tasks(("reasoning_gym/chain_sum",), DataConfig())


@pytest.mark.parametrize(
    "source, says",
    [
        ("chainsum", ["no task 'chainsum'", "did you mean chain_sum"]),
        ("composite", ["no task 'composite'"]),
        ("chain_sum?terms=3", ["chain_sum has no option 'terms'", "min_terms", "max_terms"]),
        ("chain_sum,leg_counting?min_terms=3", ["leg_counting has no option 'min_terms'", "min_animals"]),
        ("chain_sum?min_terms=few", ["min_terms=few is no int"]),
        ("basic_arithmetic?format_style=odd", ["format_style=odd", "simple, natural"]),
        ("chain_sum?allow_negation=maybe", ["allow_negation=maybe is no bool"]),
        ("chain_sum?min_terms=5&max_terms=2", ["can't be made", "max_terms must be"]),
        ("chain_sum?size=0", ["size='0'", "at least one"]),
        ("chain_sum?seed=-1", ["seed='-1'"]),
        ("chain_sum?size", ["NAME,NAME?option=value"]),
        ("", ["NAME,NAME?option=value"]),
        ("chain_sum,?size=2", ["NAME,NAME?option=value"]),
    ],
)
def test_bad_reasoning_gym_source(source, says):
    with pytest.raises(ValueError) as e:
        gym(source)
    for part in ["data.train_files", *says]:
        assert part in str(e.value)
    assert "\n" not in str(e.value)


def test_reasoning_gym_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ValueError, match=r"data\.train_files.*pip install reasoning-gym"):
        gym("chain_sum")


@pytest.mark.parametrize(
    "val, clean",
    [
        ("chain_sum?seed=499", False),
        ("chain_sum", False),
        ("leg_counting,chain_sum?size=9&seed=3", False),
        ("chain_sum?seed=500", True),
        ("leg_counting", True),
        ("chain_sum?min_terms=6", True),
    ],
)
def test_validation_may_not_hold_rows_of_training(val, clean):
    files = {
        "train_files": ("a.jsonl", "reasoning_gym:chain_sum,countdown?seed=0&size=500"),
        "val_files": ("b.jsonl", f"reasoning_gym:{val}"),
    }
    if clean:
        DataConfig(**files)
        return
    with pytest.raises(ValueError, match=r"data\.val_files: rows of reasoning_gym:chain_sum.*seed of 500 or more"):
        DataConfig(**files)
