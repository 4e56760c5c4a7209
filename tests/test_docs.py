"""What the documents say is there: their commands parse, their examples run, their files, links, knobs and error messages exist."""

import ast
import dataclasses
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

AROUND = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md")]
DOCS = [ROOT / "README.md", *AROUND, *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "forks" / "README.md"]
TEXTS = {str(path.relative_to(ROOT)).removeprefix("docs/"): path.read_text() for path in DOCS}
ALL = "\n".join(TEXTS.values())
ROOMS = ("fast", "look", "tasks", "host")
CODE = [path for folder in (".", *ROOMS) for path in sorted((ROOT / folder).glob("*.py"))]
CLIS = [
    "-m look",
    "-m look.bench",
    "-m look.replay",
    "-m look.export",
    "-m look.pictures",
    "-m look.selftest",
    "-m tasks.quickstart",
    "-m tasks.chain_sum",
    "tests/tools/gpu_ranks.py",
]
A_USERS = {
    "growth.json",
    "my.py",
    "mine.py",
    "theirs.py",
    "file.py",
    "branches.py",
    "bracket.py",
    "train.parquet",
    "test.parquet",
}
A_RUNS = {"metrics.jsonl", "config.yaml", "generation_config.json"}


def fences(text: str) -> list[tuple[str, str]]:
    """(language, body) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def ticks(text: str) -> list[str]:
    """What stands between backticks, but for others' names: the first column of a table that translates them."""
    before, _, table = re.sub("TRL (?=. Lockstep)", "verl ", prose(text)).partition("| verl | Lockstep |\n")
    return re.findall(r"`([^`\n]+)`", before + re.sub(r"^\|[^|]*\|", "|", table, flags=re.MULTILINE))


def commands(text: str) -> list[str]:
    lines = [
        line
        for language, body in fences(text)
        if language in ("", "bash")
        for line in body.replace("\\\n", " ").splitlines()
    ]
    lines = [line.partition(" #")[0].strip() for line in lines] + ticks(text)
    return [
        re.sub(r"\bN\b", "2", " ".join(line.split()))
        for line in lines
        if re.match(r"(python|make|accelerate launch) \S", line)
    ]


COMMANDS = sorted({command for text in TEXTS.values() for command in commands(text)})


def program(words: list[str]) -> tuple[str, list[str]]:
    """What a command line of Python runs, `train.py` or `-m look.bench`, and the words that it is given."""
    return (" ".join(words[:2]), words[2:]) if words[0] == "-m" else (words[0], words[1:])


def file_of(program: str) -> Path:
    """The file that a program's name stands for."""
    if not program.startswith("-m "):
        return ROOT / program
    path = ROOT / program.removeprefix("-m ").replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """In a folder with the documents' own examples, as files, and the configs."""
    from tasks import tools

    for text in TEXTS.values():
        for language, body in fences(text):
            if named := re.match(r"# (\w+\.py)\n", body) if language == "python" else None:
                (tmp_path / named[1]).write_text(body)
    (tmp_path / "my.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.0\n"
    )
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    for variable, value in {"MACHINE": "0", "HEAD": "127.0.0.1"}.items():
        monkeypatch.setenv(variable, value)
    kept = dict(tools.TOOLS), dict(tools.FORMATS)
    tools.load_custom.cache_clear()
    yield tmp_path
    for known, before in zip((tools.TOOLS, tools.FORMATS), kept):
        known.clear()
        known.update(before)
    tools.load_custom.cache_clear()


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What every CLI's --help prints, but for train.py's, whose flags are the knobs; all at once, since most of their time is imports."""
    started = {
        name: subprocess.Popen(
            [sys.executable, *name.split(), "--help"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in CLIS
    }
    ended = {name: (*process.communicate(timeout=100), process.returncode) for name, process in started.items()}
    assert all(status == 0 for _, _, status in ended.values()), ended
    return {name: out for name, (out, _, _) in ended.items()}


def test_there_are_commands():
    assert sum("train.py" in command for command in COMMANDS) >= 5
    assert any("-m look.bench" in command for command in COMMANDS)


@pytest.mark.parametrize("command", [c for c in COMMANDS if re.search(r"(\btrain\.py|-m look\.bench) --config", c)])
def test_command_that_trains_is_accepted(examples, monkeypatch, command):
    from accelerate.commands.launch import launch_command_parser

    from config import load_config
    from look import bench

    words = shlex.split(os.path.expandvars(command))
    if words[0] == "accelerate":
        launched = launch_command_parser().parse_args(words[2:])
        monkeypatch.setenv("WORLD_SIZE", str(launched.num_processes or 1))
        script = f"-m {launched.training_script}" if launched.module else launched.training_script
        argv = launched.training_script_args
    else:
        script, argv = program(words[1:])
    if script == "-m look.bench":
        argv = bench.parse(argv)[1]
    cfg = load_config(argv)
    assert script in ("train.py", "-m look.bench") and cfg.actor.path


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python")])
def test_options_of_a_command_are_in_its_help(helps, command):
    script, words = program(shlex.split(command)[1:])
    assert file_of(script).is_file(), script
    for word in words if script in helps else []:
        option = re.match(r"--[\w-]+", word)
        if option and not re.match(r"--\w+\.", word):  # those are knobs
            assert option[0] in helps[script] or (script == "-m look.bench" and option[0] == "--config"), word
        elif script.startswith("tests/") and word.isalpha():
            assert word in helps[script], word


@pytest.mark.parametrize(
    "target", sorted({c.split()[1] for c in COMMANDS if c.startswith("make ")} | {"quickstart", "tool-agent"})
)
def test_target_of_make(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules = [name for name in re.findall(r"-m [\w.]+", done.stdout) if name.split()[1].split(".")[0] in ROOMS]
    for script in re.findall(r"[\w/]+\.py\b", done.stdout) + modules:
        assert file_of(script).is_file(), script


OTHERS = [ROOT / "docs" / "runs" / "README.md", *sorted((ROOT / "configs").glob("*.yaml"))]


@pytest.mark.parametrize("path", [*DOCS, *OTHERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_that_a_text_names_exist(path):
    """`look.bench`, and what stands in a module, as `host.lookup.may_change`."""
    for folder, name, inside in re.findall(rf"(?<![\w./-])({'|'.join(ROOMS)})\.(\w+)(?:\.(\w+))?", path.read_text()):
        if name not in ("py", "custom_path"):
            module = ROOT / folder / f"{name}.py"
            assert module.is_file(), f"{folder}.{name}"
            assert not inside or re.search(rf"^(def |class )?{inside}\b", module.read_text(), re.M), f"{name}.{inside}"


@pytest.mark.parametrize("name", TEXTS)
def test_links_and_files_exist(name):
    folder = next(path for path in DOCS if path.read_text() == TEXTS[name]).parent
    for link in re.findall(r"\]\(([^)#]+)", TEXTS[name]):
        assert link.startswith("https://") or (folder / link).exists(), link
    for said in ticks(TEXTS[name]):
        for path in re.findall(r"(?<![\w./:*-])[\w./-]+\.(?:py|md|yaml|jsonl|json|txt)\b(?![\w.])", said):
            assert path in A_USERS | A_RUNS or (ROOT / path).exists() or list((ROOT / "tests").rglob(path)), path


def knobs() -> dict[str, type]:
    from config import Config

    return {
        f"{group.name}.{knob.name}": knob.type
        for group in dataclasses.fields(Config)
        for knob in dataclasses.fields(group.type)
    }


@pytest.mark.parametrize("name", TEXTS)
def test_knobs_exist(name):
    known = knobs()
    groups = "|".join(sorted({knob.partition(".")[0] for knob in known}))
    for said in ticks(TEXTS[name]) + [
        body for language, body in fences(TEXTS[name]) if language not in ("python", "py")
    ]:
        for flag, group, knob in re.findall(rf"(?<![\w./-])(--)?({groups})\.([a-z][\w-]*)(?![\w*]|\.\w)", said):
            if knob not in ("py", "jsonl", "yaml", "json"):
                knob = knob.replace("-", "_") if flag else knob
                switched_off = knob.removeprefix("no_") if flag else knob
                assert f"{group}.{knob}" in known or known.get(f"{group}.{switched_off}") is bool, (
                    f"{flag}{group}.{knob}"
                )


def test_file_table_is_complete():
    """The root's files in the first column, a folder's in the second, without their `.py`."""
    table = TEXTS["CONTRIBUTING.md"].partition("| room | what it does |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    of_root = [name for first, _ in rows for name in re.findall(r"`(\w+\.py)`", first)]
    assert sorted(of_root) == sorted(path.name for path in ROOT.glob("*.py"))
    of_folders = {first.strip(" `/"): re.findall(r"`(\w+)`", second) for first, second in rows if "/`" in first}
    assert {folder: sorted(names) for folder, names in of_folders.items()} == {
        folder: sorted(path.stem for path in (ROOT / folder).glob("[a-z]*.py")) for folder in ROOMS
    }


def test_the_loop_is_shown_as_it_is():
    """What stands under "The step" is train.py's function, to the letter."""
    import train

    section = TEXTS["README.md"].partition("\n## The step\n")[2].partition("\n## ")[0]
    assert [body for language, body in fences(section) if language == "py"] == [inspect.getsource(train.train)]


def test_what_plain_turns_off_is_in_the_table_of_troubleshooting():
    """A row for each knob of fast/, with the knob's files."""
    import fast
    from config import PLAIN

    section = TEXTS["troubleshooting.md"].partition("\n## A number is wrong\n")[2].partition("\n## ")[0]
    said = {}
    for row in section.splitlines():
        if row.startswith("| `--"):
            knob, files = row.split("|")[1:3]
            group, name = re.search(r"--(\w+)\.no-([\w-]+)", knob).groups()
            said[f"{group}.{name.replace('-', '_')}"] = set(re.findall(r"`fast/(\w+\.py)`", files))
    there = {knob: set() for knob in PLAIN if knob.split(".")[0] in ("actor", "rollout", "sync")}
    for file, knobs_of_file in re.findall(r"^ +(\w+\.py) +(.*)$", fast.__doc__, re.MULTILINE):
        for knob in knobs_of_file.split(", "):
            there[knob].add(file)
    assert said == there
    assert all(f"`{knob}`" in section for knob in PLAIN if knob not in said)


def test_numbers_that_can_be_counted():
    import mutate
    from reasoning_gym.factory import DATASETS
    from test_reward import ROWS

    files, longest, shapes, families, *bugs = (
        int(found)
        for pattern in (
            r"in (\d+) flat Python files",
            r"none longer than (\d+) lines",
            r"table of (\d+) real answer",
            r"the (\d+) task\sfamilies",
            r"puts (\d+) bugs",
        )
        for found in sorted(set(re.findall(pattern, ALL)))
    )
    assert files == len(list(ROOT.glob("*.py")))
    assert max(len(path.read_text().splitlines()) for path in CODE) <= longest
    assert (shapes, families, bugs) == (len(ROWS), len(set(DATASETS) - {"composite"}), [len(mutate.BUGS)])


def test_readme_is_for_five_minutes():
    """150 lines, of 100 columns but for code and tables."""
    prose_lines = prose(TEXTS["README.md"]).splitlines()
    assert len(TEXTS["README.md"].splitlines()) <= 150
    assert [line for line in prose_lines if len(line) > 100 and not line.startswith("|")] == []


def test_the_version_is_the_same_everywhere():
    from host.disk import VERSION

    newest = re.search(r"^## (\S+) ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    assert newest == cited == VERSION


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-cpu.txt", "requirements-dev.txt"])
def test_every_requirement_has_a_version(name):
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    assert lines and [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.+]+", line)] == []


def test_diagnoses_are_counted():
    from look.doctor import DIAGNOSES, TRENDS

    assert f"afterwards, {len(DIAGNOSES) + len(TRENDS)} of them" in TEXTS["look.md"]


def test_every_seeded_bug_can_be_put_in():
    """`make mutate` replaces a piece of code that stands in its file once; code that moves must take its bug along."""
    import mutate

    assert {
        bug.what: count for bug in mutate.BUGS if (count := (ROOT / bug.file).read_text().count(bug.old)) != 1
    } == {}
    tests = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    named = {bug.what: bug.test.split("::") for bug in mutate.BUGS}
    assert [what for what, (file, test) in named.items() if f"def {test.partition('[')[0]}(" not in tests[file]] == []


def test_curves_end_where_the_readme_says():
    import json

    curve = [json.loads(line) for line in (ROOT / "docs" / "runs" / "tool_agent_cpu.jsonl").read_text().splitlines()]
    said = re.search(
        r"from (0\.\d+) of the unseen products right \(sampled\) to (0\.\d+), calls from (0\.\d+) a session to (1\.0)",
        ALL,
    )
    assert [f"{curve[0]['val/exact/mean@1']:.3f}", f"{curve[-1]['val/exact/mean@1']:.3f}"] == [said[1], said[2]]
    assert [f"{curve[0]['agent/tool_calls/mean']:.2f}", f"{curve[-2]['agent/tool_calls/mean']:.1f}"] == [
        said[3],
        said[4],
    ]


def test_messages_to_look_up_are_those_of_the_code():
    """`...` stands for what differs; the rest has to stand in a text of the code as it is."""
    messages = [
        row.split("`")[1]
        for row in TEXTS["troubleshooting.md"].splitlines()
        if row.startswith("| `") and " " in row.split("`")[1]
    ]
    assert len(messages) > 20
    said = "\n".join(text for path in CODE for text in texts(ast.parse(path.read_text())))
    for message in messages:
        for part in re.split(r"\s*\.\.\.\s*", message):
            assert part in said, f"{part!r} of {message!r}"


def texts(tree: ast.AST) -> list[str]:
    """Every string of the code, joined where it goes over several lines; an f-string's values are left out."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_changelog_says_where_files_went():
    """A path in the second column is there."""
    table = (ROOT / "CHANGELOG.md").read_text().partition("| old | new |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 44
    for old, new in rows:
        places = re.findall(r"`([\w/]+\.(?:py|html))`", new)
        assert places or "unchanged" in new, old
        assert [place for place in places if not (ROOT / place).is_file()] == [], old


# The examples


def test_things_to_change_can_be_changed():
    """Each function of docs/change.md, put into its file's dict as the comment above it says; README has one of them."""
    import importlib

    from fakes import make_trajectory

    def functions(text: str) -> dict:
        [body] = [body for language, body in fences(text) if language == "python"]
        parts = re.split(r"^# ([\w/]+)\.py +(\w+)\[\"(\w+)\"\].*\n", body, flags=re.MULTILINE)[1:]
        made = {}
        for file, table, name, code in zip(*(parts[i::4] for i in range(4))):
            module = importlib.import_module(file.replace("/", "."))
            assert isinstance(getattr(module, table), dict)
            scope = dict(vars(module))
            exec(code, scope)
            made[name] = scope[name]
        return made

    made, short = functions(TEXTS["change.md"]), functions(TEXTS["README.md"])
    assert list(made) == ["brevity", "centred", "reinforce", "letters", "twice"]

    from test_agent import CHATML, ScriptedEngine

    from batch import Task
    from reward import score_and_parts
    from tasks.tools import function_schema

    t = make_trajectory()
    t.answer, t.response, task = "so 12", "12", Task("?", "exact", "12")
    assert score_and_parts(made["brevity"](task, t)) == (1.0, {"length": float(t.response_length)})
    scores, mask = torch.zeros(1, 2, 3, dtype=torch.float64), torch.ones(1, 2, 3, dtype=torch.bool)
    scores[0, 0, 2] = 1.0
    for centred in (made["centred"], short["centred"]):
        assert centred(scores, mask, None)[0, :, 0].tolist() == [0.5, -0.5]
    loss, metrics = made["reinforce"](torch.tensor([-1.0, -2.0]), None, torch.tensor([1.0, 3.0]), None, None, None)
    assert loss.tolist() == [1.0, 6.0] and metrics == {}
    assert function_schema(made["letters"])["function"]["parameters"]["properties"] == {
        "word": {"type": "string", "description": "the word"}
    }
    engine = ScriptedEngine(CHATML, ["a" * 200, "b"], max_response_length=256)
    assert engine.play(made["twice"]).num_turns == 2 and [asked.max_tokens for asked in engine.asked] == [128, 128]


def test_agents_of_ones_own(examples):
    from test_agent import CHATML, SEPARATED, ScriptedEngine

    from agent import AgentConfig, check_agents
    from tasks.tools import FORMATS, Call, load_custom

    cfg = AgentConfig(custom_path="mine.py:hinted", tools=("letters",), tool_workers=1)
    check_agents([], cfg)
    engine = ScriptedEngine(SEPARATED, ["twelve", "12"], cfg)
    t = engine.play(load_custom(cfg.custom_path))
    text = engine.tokenizer.decode(t.tokens[t.prompt_length :])
    assert t.metrics == {"second_turns": 1.0} and t.num_turns == 2 and "<|im_start|>user\n\n6<|im_end|>" in text, text
    cut = ScriptedEngine(SEPARATED, ["twelve", "12"], cfg, max_response_length=20).play(load_custom(cfg.custom_path))
    assert cut.num_turns == 1 and cut.response_mask[-1] == 1

    drafts = ScriptedEngine(CHATML, ["a", "b"]).play(load_custom("branches.py:two_drafts"))
    assert len(drafts) == 2 and drafts[0].tokens != drafts[1].tokens

    cfg = AgentConfig(custom_path="bracket.py:tool_agent", format="bracket")
    check_agents([], cfg)
    assert FORMATS["bracket"].parse('so [[{"name": "calculator", "arguments": {"expression": "1+1"}}]]') == [
        Call("calculator", {"expression": "1+1"})
    ]
    t = ScriptedEngine(CHATML, ['[[{"name": "calculate", "arguments": {}}]]', "2"], cfg).play(
        load_custom(cfg.custom_path)
    )
    assert t.num_turns == 2 and t.metrics == {
        "tool_calls": 1.0,
        "tool_errors": 1.0,
    }  # there is no such tool: no worker has to start
