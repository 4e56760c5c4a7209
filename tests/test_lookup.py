"""What users write: numbers and their bounds, names and their nearest."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

from host.lookup import check_bounds, may_change, nearest, unknown

INF, NAN = math.inf, math.nan


def refusal(interval, value):
    """What check_bounds says of a knob's value; None when it takes it."""
    try:
        check_bounds("group", SimpleNamespace(knob=value), knob=interval)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    "interval, inside, outside, words",
    [
        ("[0, inf)", [0, 0.0, 5, 1e300], [-1, -1e-300, INF, -INF], "at least 0"),
        ("(0, inf)", [1, 1e-300], [0, 0.0, -0.0, -1, INF], "above 0"),
        ("[0, inf]", [0, INF], [-1, -INF], "at least 0"),
        ("(-inf, 0]", [0, -5], [1e-300, -INF, INF], "at most 0"),
        ("(-inf, 0)", [-1e-300, -5], [0, 1], "below 0"),
        ("[-inf, 0)", [-INF, -5], [0], "below 0"),
        ("(0, 1)", [0.5, 1e-300], [0, 1, 2, -1], "above 0 and below 1"),
        ("(0, 1]", [0.5, 1], [0, 1.0000001], "above 0 and at most 1"),
        ("[0, 1)", [0, 0.5], [1, -0.1], "at least 0 and below 1"),
        ("[0, 1]", [0, 1, True], [-0.1, 1.1, 2], "at least 0 and at most 1"),
        ("[-2, -1.5]", [-2, -1.5], [-1, -3, 0], "at least -2 and at most -1.5"),
        ("(-inf, inf)", [0, -1e300, 1e300], [INF, -INF], "a finite number"),
        ("-1 or [1, inf)", [-1, -1.0, 1, 2], [0, -2, 0.5, INF, -INF], "-1 or at least 1"),
        ("0 or (1, 2)", [0, 1.5], [1, 2, -1, 0.5], "0 or above 1 and below 2"),
        ("5 or [-1, 0]", [5, -1, 0], [1, 4.999, 6], "5 or at least -1 and at most 0"),
    ],
)
def test_number_is_in_its_interval_or_the_message_names_it(interval, inside, outside, words):
    for value in inside:
        assert refusal(interval, value) is None, value
    for value in [*outside, NAN]:
        assert refusal(interval, value) == f"group.knob={value} must be {words}", value


def test_knob_that_is_not_given_is_in_all():
    for interval in ("[0, 1]", "(0, inf)", "-1 or [1, inf)"):
        assert refusal(interval, None) is None


def test_each_number_of_a_tuple_counts():
    assert (
        refusal("(0, 1]", ()) is None and refusal("(0, 1]", (0.5, 1.0)) is None and refusal("(0, 1]", (None, 1)) is None
    )
    assert refusal("(0, 1]", (0.5, 0.0)) == "group.knob=(0.5, 0.0) must be above 0 and at most 1"
    assert refusal("(0, 1]", (NAN,)) == "group.knob=(nan,) must be above 0 and at most 1"


def test_first_knob_that_is_wrong_is_named_and_no_other():
    cfg = SimpleNamespace(lr=1e-6, betas=(0.9, 1.5), size=-7)
    with pytest.raises(ValueError) as error:
        check_bounds("actor", cfg, lr="[0, inf)", betas="[0, 1)", size="-1 or [1, inf)")
    assert str(error.value) == "actor.betas=(0.9, 1.5) must be at least 0 and below 1"


@pytest.mark.parametrize("interval", ["", "0, 1", "[0 1]", "[0, 1", "{0, 1}", "[0,1]", "or [0, 1]"])
def test_interval_that_is_written_wrongly_is_an_error_of_ours(interval):
    assert "is not written as an interval" in refusal(interval, 0.5)


def test_may_change_is_a_default_that_says_so():
    @dataclasses.dataclass(frozen=True)
    class Config:
        seconds: float = may_change(10.0)
        seed: int = 1

    assert Config() == Config(seconds=10.0, seed=1)
    assert [field.metadata.get("may_change", False) for field in dataclasses.fields(Config)] == [True, False]


def test_unknown_names_the_nearest_and_all():
    known = {"grpo": 1, "rloo": 2}
    assert str(unknown("algorithm.adv_estimator", "gprpo", known)) == (
        "algorithm.adv_estimator='gprpo' is not known; did you mean grpo?; known: grpo, rloo"
    )
    assert str(unknown("x", "zzz", known)) == "x='zzz' is not known; known: grpo, rloo"
    assert nearest("zzz", known) == "" and nearest(5, ["5x"]) == "; did you mean 5x?"
