"""What rank 0 says. That no text reaches a terminal as a command is in test_dump.py."""

import subprocess
import sys

import pytest
from conftest import ROOT

from host.console import say


@pytest.mark.parametrize("rank, said", [(None, True), ("0", True), ("1", False), ("10", False)])
def test_rank_0_speaks_and_no_other(monkeypatch, capsys, rank, said):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    say("a folder named \x1b[2J")
    assert capsys.readouterr().out == ("a folder named \\x1b[2J\n" if said else "")


def test_a_reader_that_has_gone_stops_nothing():
    """As tee at Ctrl-C, which the terminal sends to both."""
    code = "import sys, time; from host.console import say; time.sleep(1); [say('x' * 99999) for _ in range(9)]; print('on', file=sys.stderr)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert process.stderr.read() == "on\n" and process.wait(60) == 0
