"""What rank 0 says. That no text reaches a terminal as a command is in test_dump.py."""

import pytest

from host.console import say


@pytest.mark.parametrize("rank, said", [(None, True), ("0", True), ("1", False), ("10", False)])
def test_rank_0_speaks_and_no_other(monkeypatch, capsys, rank, said):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    say("a folder named \x1b[2J")
    assert capsys.readouterr().out == ("a folder named \\x1b[2J\n" if said else "")
