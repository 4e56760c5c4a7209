"""What wandb (offline) and TensorBoard hold of a run that was stopped after step 1's record and did that step again."""

import json
import os
import struct
import subprocess
import sys
import time

import pytest

from log import LogConfig
from look.tracking import Trackers

SAMPLE = {
    "prompt": [{"role": "user", "content": "2+2="}],
    "response": "is 4",
    "ground_truth": "4",
    "score": 1.0,
    "advantage": 0.5,
    "finish_reason": "stop",
}
SETTINGS = {"actor": {"lr": 0.25}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, accelerator):
    os.environ["WANDB_MODE"] = "offline"
    folder, cfg = (
        tmp_path_factory.mktemp("tracked"),
        LogConfig(logger=("wandb", "tensorboard"), experiment_name="named"),
    )
    first = Trackers(cfg, folder, 0, SETTINGS, None)
    first.log(0, {"reward/mean": 0.125}, [SAMPLE])
    first.log(1, {"reward/mean": 0.25}, [])
    name = first.wandb_id
    first.finish()
    again = Trackers(cfg, folder, 1, SETTINGS, name)
    again.log(1, {"reward/mean": 0.5}, [])
    again.log(2, {"reward/mean": 0.75}, [SAMPLE])
    assert again.wandb_id == name
    again.finish()
    return folder


def wandb_records(path):
    """The records of an offline run's file: LevelDB's log format after a head of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        whole, place = whole + data[place + 7 : place + 7 + size], place + 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def test_wandb_holds_metrics_by_step_configuration_and_samples(folder):
    files, until = sorted(folder.glob("wandb/offline-run-*/*.wandb")), time.monotonic() + 60
    while "exit" not in {r.WhichOneof("record_type") for r in wandb_records(files[-1])} and time.monotonic() < until:
        time.sleep(0.2)  # wandb's own process writes them, on a busy machine after finish() has returned
    runs = [list(wandb_records(path)) for path in files]
    assert len({path.stem for path in files}) == 1 and len(runs) == 2, "one run, begun and resumed"
    history = [
        [
            {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in r.history.item}
            for r in run
            if r.WhichOneof("record_type") == "history"
        ]
        for run in runs
    ]
    assert [[(row["step"], row["reward/mean"]) for row in rows] for rows in history] == [
        [(0, 0.125), (1, 0.25)],
        [(1, 0.5), (2, 0.75)],
    ]
    assert all(any(r.metric.glob_name == "*" and r.metric.step_metric == "step" for r in run) for run in runs), (
        "drawn over the training step, not over wandb's own count"
    )
    [started] = [r.run for r in runs[0] if r.WhichOneof("record_type") == "run"]
    assert {
        c.key: json.loads(c.value_json) for c in started.config.update if c.key != "_wandb"
    } == SETTINGS and started.display_name == "named"
    table = json.loads((files[0].parent / "files" / history[0][0]["samples/path"]).read_text())
    assert table["columns"][:2] == ["prompt", "response"] and table["data"] == [
        [str(SAMPLE["prompt"]), "is 4", "4", 1.0, 0.5, "stop"]
    ]


def test_tensorboard_shows_a_step_as_it_was_done_last(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(0, 0.125), (1, 0.5), (2, 0.75)]
    texts = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("samples/text_summary")]
    assert (
        "is 4" in texts[-1]
        and "lr: 0.25" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    )


def test_a_tracker_that_is_not_installed_is_the_users_to_install():
    code = "import sys; sys.modules['tensorboard'] = None\n"
    code += "from pathlib import Path; from log import LogConfig; from look.tracking import Trackers\n"
    code += "Trackers(LogConfig(logger=('tensorboard',)), Path('.'), 0, {}, None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "ValueError: log.logger names tensorboard, which is not installed: pip install tensorboard" in done.stderr
