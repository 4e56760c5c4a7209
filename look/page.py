"""The page of a run: one HTML file with its curves and a browser of its rollouts, which needs no network.

page.html is the template. The records stay what they are on disk: each file of a step becomes one compressed chunk that
the page inflates when the step is opened, so that many thousand rollouts cost a file's size and no more. A traced
trajectory has a chunk of its own. Chunks are base64 in script elements of a type that no browser runs: nothing that a
model wrote is part of the markup.
"""

import base64
import json
import math
import os
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import yaml

from host.disk import whole_lines

TEMPLATE = Path(__file__).with_suffix(".html")
DUMP = re.compile(r"((?:val-)?(\d+))(\.failed)?\.jsonl")  # of rollouts/ and traces/


def write_page(runs: list[Path], out: Path) -> None:
    """Show runs, folders or files of metrics records, in OUT. ValueError for what is neither; OUT is then as it was."""
    from plotly.offline import get_plotlyjs

    names = run_names(runs)
    if out.is_dir():
        raise ValueError(f"--html {out}: that is a folder")
    if not out.parent.is_dir():
        raise ValueError(f"--html {out}: there is no folder {out.parent}")
    # The page's own scripts carry a nonce that no model can know: were a text ever taken for markup, it still could not
    # run or fetch anything.
    head, tail = TEMPLATE.read_text().replace("NONCE", secrets.token_hex(16)).split("<!-- CHUNKS -->")
    before, after = tail.split("/* PLOTLY */")
    part = out.with_name(out.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(head.encode())
            chunks = Chunks(file)
            index = []
            for path, name in zip(runs, names):
                index.append(add_run(path, name, chunks))
            chunks.add([json.dumps(index, allow_nan=False).encode()], "index")
            file.write(f"{before}{get_plotlyjs()}{after}".encode())
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)


class Chunks:
    """Writes bytes as compressed elements of the page, one after the other and never whole in memory."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.count = 0

    def add(self, blocks: Iterable[bytes], name: str | None = None) -> str:
        """The id of the element that now has the bytes."""
        self.count += 1
        name = name or f"c{self.count}"
        self.file.write(f'<script type="application/octet-stream" id="{name}">'.encode())
        squeeze = zlib.compressobj(6, wbits=31)  # gzip
        rest = b""
        for block in blocks:
            data = rest + squeeze.compress(block)
            whole = len(data) // 3 * 3  # three bytes are four characters
            self.file.write(base64.b64encode(data[:whole]))
            rest = data[whole:]
        self.file.write(base64.b64encode(rest + squeeze.flush()) + b"</script>\n")
        return name


def run_names(runs: list[Path]) -> list[str]:
    """A name a run: its folder's, or as much of the path as tells it from the others."""
    if len({path.resolve() for path in runs}) < len(runs):
        raise ValueError(f"a run is named twice: {', '.join(map(str, runs))}")
    parts = [(path.with_suffix("") if path.suffix == ".jsonl" else path).resolve().parts for path in runs]
    longest = max(map(len, parts), default=1)
    tail = 1
    while tail < longest and len({p[-tail:] for p in parts}) < len(parts):
        tail += 1
    return ["/".join(p[-tail:]) for p in parts]


def add_run(path: Path, name: str, chunks: Chunks) -> dict:
    """What the page knows of a run at once. The rest goes into chunks, which it names.

    ValueError when path is neither a run's folder nor a file of metrics.
    """
    if path.is_file():
        return {"name": name, "commit": None, "config": None, "knobs": {}, "metrics": read_metrics(path), "dumps": []}
    if not path.exists():
        raise ValueError(f"there is no run {path}")
    dumps = add_dumps(path, chunks)
    metrics = path / "metrics.jsonl"
    if not dumps and not metrics.exists():
        raise ValueError(
            f"{path} is no run's folder: it has no metrics.jsonl and no rollouts/STEP.jsonl or traces/STEP.jsonl"
        )
    return {
        "name": name,
        **read_config(path / "config.yaml"),
        "metrics": read_metrics(metrics) if metrics.exists() else {},
        "dumps": dumps,
    }


def add_dumps(path: Path, chunks: Chunks) -> list[dict]:
    """A run's dumps and traces into chunks; the steps in order, those of training before the validations.

    Of each step {name, step, val, traces: {key: chunk}}, and rollouts and failed: the chunk of a file that is there.
    """
    dumps: dict[str, dict] = {}
    for file in [*sorted((path / "rollouts").glob("*.jsonl")), *sorted((path / "traces").glob("*.jsonl"))]:
        match = DUMP.fullmatch(file.name)
        if not match:
            continue
        name, step, failed = match.groups()
        dump = dumps.setdefault(name, {"name": name, "step": int(step), "val": name.startswith("val-"), "traces": {}})
        if file.parent.name == "traces":
            dump["traces"] = add_traces(file, chunks)
        else:
            dump["failed" if failed else "rollouts"] = chunks.add(blocks(file))
    return sorted(dumps.values(), key=lambda dump: (dump["val"], dump["step"]))


def add_traces(file: Path, chunks: Chunks) -> dict[str, str]:
    """{key of a trajectory: its chunk} of a file of traces."""
    traces = {}
    for line, record in whole_lines(file):
        key = trace_key(record, file)
        traces[key] = chunks.add([line])
    return traces


def trace_key(record: object, file: Path) -> str:
    if not isinstance(record, dict) or not isinstance(record.get("key"), str):
        raise ValueError(f"{file} holds a line that is no traced trajectory: {str(record)[:80]!r}")
    return record["key"]


def blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            yield block


def read_metrics(path: Path) -> dict[str, list[list]]:
    """{name: [steps, values]} of the numbers in a file of metrics records; None for one that is not finite."""
    metrics: dict[str, list[list]] = {}
    for number, (line, record) in enumerate(whole_lines(path), 1):
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ValueError(
                f'{path}, line {number}, is no metrics record, {{"step": ..., name: value, ...}}: {line[:80]!r}'
            )
        for name, value in record.items():
            if name != "step" and (value is None or isinstance(value, (int, float))):
                steps, values = metrics.setdefault(name, [[], []])
                steps.append(record["step"])
                values.append(value if value is not None and math.isfinite(value) else None)
    return metrics


def read_config(path: Path) -> dict:
    """The resolved configuration as text and as {group.knob: value}, and the commit in its first line."""
    if not path.exists():
        return {"commit": None, "config": None, "knobs": {}}
    text = path.read_text()
    values = {}
    try:
        for group, knobs in (yaml.safe_load(text) or {}).items():
            for knob, value in knobs.items():
                values[f"{group}.{knob}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    except (yaml.YAMLError, AttributeError) as error:
        raise ValueError(
            f"{path} is no run's configuration, {{group: {{knob: value}}}}: {' '.join(str(error).split())}"
        ) from error
    commit = re.match(r"# (?:Lockstep \S+, )?commit (.+)", text)
    return {"commit": commit[1] if commit else None, "config": text, "knobs": values}
