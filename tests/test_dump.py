"""Records, traces and samples, of made-up trajectories; and that nothing a policy writes reaches a terminal as a
command.
"""

import io
import math
from types import SimpleNamespace

import pytest
import torch
from fakes import make_trajectory

from actor import Update
from advantage import AlgorithmConfig, compute_advantages, set_loss_mask, set_token_level_rewards
from host.console import SpeltOut, one_line, printable, traceback_text
from look.trace import consumed, gather_entropies, pieces, returns, trace_records
from metrics import sample_table, samples


def told(t, loss_mask=None, rewards=None):
    t.loss_mask = torch.tensor(t.response_mask if loss_mask is None else loss_mask, dtype=torch.bool)
    t.token_level_rewards = (
        torch.zeros(len(t.tokens)) if rewards is None else torch.tensor(rewards, dtype=torch.float32)
    )
    return t


def test_returns_discount_at_sampled_tokens_only():
    t = told(make_trajectory(prompt=2, response=(1, 1, 0, 1)), rewards=[0, 0, 0.5, 0, 0, 1.0])
    assert returns(t, 0.5) == [0, 0, 0.5 + 0.5 * 0.5, 0.5, 1.0, 1.0]
    assert returns(t, 1.0) == [0, 0, 1.5, 1.0, 1.0, 1.0]
    assert returns(told(t, loss_mask=[0, 0, 1, 1, 0, 0], rewards=[0, 0, 0, 0, 0, 1.0]), 1.0)[2:] == [0, 0, 0, 0], (
        "what is left out of the loss earns nothing"
    )


def test_returns_are_what_reinforce_plus_plus_whitens():
    group = [
        make_trajectory(prompt=i + 1, response=response, score=score, session_id=i)
        for i, (response, score) in enumerate([((1, 1, 0, 1), 1.0), ((1, 0, 1), -0.3)])
    ]
    cfg = AlgorithmConfig(adv_estimator="reinforce_plus_plus", gamma=0.9)
    set_loss_mask(group)
    set_token_level_rewards(group, cfg, 0.0)
    compute_advantages(group, cfg)
    values = [torch.tensor(returns(t, 0.9), dtype=torch.float64)[t.loss_mask] for t in group]
    whole, found = torch.cat(values), torch.cat([t.advantages[t.loss_mask] for t in group])
    assert len(set(whole.tolist())) == 5 and found.tolist() == pytest.approx(
        ((whole - whole.mean()) / whole.std()).tolist(), rel=1e-5
    )


def test_consumed_names_every_update_of_several_epochs():
    a, b = make_trajectory(), make_trajectory()  # equal, and not the same
    updates = [
        Update([a, b], [[[1]], [[0]]]),
        Update([b], [[[0]], [[]]]),
        Update([b, a], [[[], [1]], [[0], []]]),
    ]
    assert consumed(a, updates) == [
        {"update": 0, "micro_batch": 0, "rank": 1},
        {"update": 2, "micro_batch": 1, "rank": 0},
    ]
    assert consumed(make_trajectory(), updates) == []


def test_only_the_first_groups_are_traced():
    group = [
        told(make_trajectory(uid=uid, session_id=i, old=[-0.25] * 3, advantages=[0.5] * 3))
        for uid in "ab"
        for i in range(2)
    ]
    actor = SimpleNamespace(
        entropies={t.key: torch.ones(6) for t in group[:1] + group[2:]},
        updates=[Update(group, [[[0, 1], [2, 3]]])],
        version=5,
    )
    tokenizer = SimpleNamespace(decode=lambda tokens: "".join(f"<{token}>" for token in tokens))
    gather_entropies(group, 1, actor)
    trace = list(trace_records(group, 1, actor, tokenizer, 1.0))
    assert (
        [t["uid"] for t in trace] == ["a", "a"]
        and trace[0]["pieces"][:2] == ["<10>", "<11>"]
        and trace[0]["sync_step"] == 5
    )
    assert (
        trace[0]["entropy"] == [1.0] * 6
        and trace[1]["entropy"] is None
        and trace[0]["old_logprobs"] == [0, 0, 0, -0.25, -0.25, -0.25]
    )


def byte_level():
    """Each token is a byte of UTF-8, as the rare ones of a byte-level BPE are."""
    return SimpleNamespace(decode=lambda tokens: bytes(tokens).decode(errors="replace"))


@pytest.mark.parametrize("text", ["plain", "é", "答案 é 😀 x", "👨‍👩‍👧 a"])
def test_character_of_several_tokens_belongs_to_the_one_that_completes_it(text):
    tokens = list(text.encode())
    found = pieces(tokens, byte_level())
    assert "".join(found) == text and len(found) == len(tokens) and "\ufffd" not in found
    assert found[-1] == text[-1]


def test_space_that_a_tokenizer_writes_between_tokens_is_kept():
    words = {0: "hello", 1: "world", 2: "!"}
    tokenizer = SimpleNamespace(decode=lambda tokens: " ".join(words[t] for t in tokens).replace(" !", "!"))
    assert pieces([0, 1, 2, 0, 1], tokenizer) == ["hello", " world", "!", " hello", " world"]


def test_bytes_that_are_no_text_do_not_swallow_what_follows():
    found = pieces([0xFF] * 12 + list(b"ok"), byte_level())
    assert "".join(found).endswith("ok") and len(found) == 14


def test_samples_are_the_best_the_worst_and_some_between():
    group = [make_trajectory(score=score) for score in (0.1, math.nan, 0.9, 0.5, 0.3, 0.7)]
    assert [r["score"] for r in samples(group, 3)] == [0.9, 0.5, 0.1]
    assert [r["score"] for r in samples(group[:1], 4)] == [0.1] and samples(group[1:2]) == []


def test_table_fits_its_width_and_shows_the_ends_of_texts():
    t = make_trajectory(score=1.0, advantages=[0.5] * 3)
    t.task.messages, t.response = [{"role": "user", "content": "so many words\n" * 20 + "2+2="}], "reasons, " * 50 + "4"
    head, line = sample_table(samples([t]), 80).splitlines()
    assert len(line) <= 80 and "2+2= …" in line and line.endswith("reasons, 4")
    assert line.split()[:2] == ["1.00", "0.50"]
    assert len(one_line("x" * 100, 10)) == 10


@pytest.mark.parametrize(
    "text, shown",
    [
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("\x9b31m", "\\x9b31m"),
        ("a\rb\x07", "a\\x0db\\x07"),
        ("\u202egnp.exe", "\\x202egnp.exe"),
        ("a\r\nb", "a\nb"),
        ("👨‍👩‍👧 می‌خواهم \U0001fae8", "👨‍👩‍👧 می‌خواهم \U0001fae8"),
        ("\ud800", "\\xd800"),
        ("two\nlines\té 数 🙂", "two\nlines\té 数 🙂"),
    ],
)
def test_what_a_terminal_would_obey_is_spelt_out(text, shown):
    assert printable(text) == shown


def told_of(error: Exception, cause: Exception | None = None) -> list[str]:
    try:
        raise error from cause
    except Exception:
        return traceback_text().splitlines()


def test_traceback_keeps_its_head_and_what_the_error_says():
    short = told_of(KeyError("a"))
    assert short[0] == "Traceback (most recent call last):" and short[-1] == "KeyError: 'a'" and len(short) == 4
    long = told_of(ValueError("\n".join(f"row {i} is no row" for i in range(1000))), KeyError("the cause"))
    assert "KeyError: 'the cause'" in long and "ValueError: row 0 is no row" in long and long[-1] == "row 999 is no row"
    assert long[-20] == "[... 961 lines left out ...]" and len(long) < 60
    group = told_of(ExceptionGroup("many", [KeyError(i) for i in range(100)]))
    assert "ExceptionGroup: many (100 sub-exceptions)" in "".join(group) and len(group) < 50


@pytest.mark.parametrize(
    "length, shown",
    [
        (1000, "y" * 1000),
        (1001, "y" * 500 + " [... 1 characters left out ...] " + "y" * 500),
        (10**6, "y" * 500 + " [... 999000 characters left out ...] " + "y" * 500),
    ],
)
def test_long_line_of_a_traceback_loses_its_middle(length, shown):
    name = type("y" * length, (Exception,), {"__module__": "builtins"})
    assert told_of(name())[-1] == shown


def test_stream_spells_out_what_is_written_to_it():
    stream = io.StringIO()
    print("a\x1b[31mb", file=SpeltOut(stream), flush=True)
    assert stream.getvalue() == "a\\x1b[31mb\n"
