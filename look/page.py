"""The page of a run: one HTML file with its curves and a browser of its rollouts, which needs no network.

page.html is the template. The records stay what they are on disk: each file of a step becomes one compressed chunk that the page
inflates when the step is opened, so that many thousand rollouts cost a file's size and no more. A traced trajectory has a chunk of
its own. Chunks are base64 in script elements of a type that no browser runs: nothing that a model wrote is part of the markup.
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
    if not out.parent.is_dir() or out.is_dir():
        raise ValueError(
            f"--html {out}: " + ("that is a folder" if out.is_dir() else f"there is no folder {out.parent}")
        )
    # The page's own scripts carry a nonce that no model can know: were a text ever taken for markup, it still could not run or fetch anything.
    head, tail = TEMPLATE.read_text().replace("NONCE", secrets.token_hex(16)).split("<!-- CHUNKS -->")
    before, after = tail.split("/* PLOTLY */")
    part = out.with_name(out.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(head.encode())
            chunks = Chunks(file)
            index = [read_run(path, name, chunks) for name, path in zip(names, runs)]
            chunks.add([json.dumps(index, allow_nan=False).encode()], "index")
            file.write(f"{before}{get_plotlyjs()}{after}".encode())
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)


class Chunks:
    """Writes bytes as compressed elements of the page, one after the other and never whole in memory."""

    def __init__(self, file: BinaryIO):
        self.file, self.count = file, 0

    def add(self, blocks: Iterable[bytes], name: str | None = None) -> str:
        """The id of the element that now has the bytes."""
        self.count += 1
        name = name or f"c{self.count}"
        self.file.write(f'<script type="application/octet-stream" id="{name}">'.encode())
        squeeze, rest = zlib.compressobj(6, wbits=31), b""
        for block in blocks:
            data = rest + squeeze.compress(block)
            whole = len(data) // 3 * 3  # three bytes are four characters
            self.file.write(base64.b64encode(data[:whole]))
            rest = data[whole:]
        self.file.write(base64.b64encode(rest + squeeze.flush()) + b"</script>\n")
        return name


def run_names(runs: list[Path]) -> list[str]:
    """A name a run: its folder's, or as much of the path as tells it from the others."""
    parts = [(path.with_suffix("") if path.suffix == ".jsonl" else path).resolve().parts for path in runs]
    if len({path.resolve() for path in runs}) < len(runs):
        raise ValueError(f"a run is named twice: {', '.join(map(str, runs))}")
    tail = next(
        n for n in range(1, 100) if n >= max(map(len, parts), default=1) or len({p[-n:] for p in parts}) == len(parts)
    )
    return ["/".join(p[-tail:]) for p in parts]


def read_run(path: Path, name: str, chunks: Chunks) -> dict:
    """What the page knows of a run at once. The rest goes into chunks, which it names."""
    if path.is_file():
        return {"name": name, "commit": None, "config": None, "knobs": {}, "metrics": read_metrics(path), "dumps": []}
    dumps: dict[str, dict] = {}
    for folder in ("rollouts", "traces"):
        for file in sorted((path / folder).glob("*.jsonl")):
            if match := DUMP.fullmatch(file.name):
                dump = dumps.setdefault(
                    match[1],
                    {"name": match[1], "step": int(match[2]), "val": file.name.startswith("val-"), "traces": {}},
                )
                if folder == "traces":
                    dump["traces"] = {trace_key(record, file): chunks.add([line]) for line, record in whole_lines(file)}
                else:
                    dump["failed" if match[3] else "rollouts"] = chunks.add(blocks(file))
    metrics = path / "metrics.jsonl"
    if not dumps and not metrics.exists():
        raise ValueError(
            f"{path} is no run's folder: it has no metrics.jsonl and no rollouts/STEP.jsonl or traces/STEP.jsonl"
            if path.exists()
            else f"there is no run {path}"
        )
    ordered = sorted(dumps.values(), key=lambda dump: (dump["val"], dump["step"]))
    return {
        "name": name,
        **read_config(path / "config.yaml"),
        "metrics": read_metrics(metrics) if metrics.exists() else {},
        "dumps": ordered,
    }


def trace_key(record, file: Path) -> str:
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
    try:
        groups = yaml.safe_load(text) or {}
        knobs = {
            f"{group}.{knob}": value if isinstance(value, str) else json.dumps(value, default=str)
            for group, knobs in groups.items()
            for knob, value in knobs.items()
        }
    except (yaml.YAMLError, AttributeError) as error:
        raise ValueError(
            f"{path} is no run's configuration, {{group: {{knob: value}}}}: {' '.join(str(error).split())}"
        ) from error
    commit = re.match(r"# commit (.+)", text)
    return {"commit": commit and commit[1], "config": text, "knobs": knobs}
