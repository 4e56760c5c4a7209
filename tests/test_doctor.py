"""What the doctor says: of records that deserve a finding and of those just short of it, of healthy runs, and of whole runs that are ill on purpose."""

import json
import math

import pytest
from conftest import ROOT

from look.doctor import AGAIN, DIAGNOSES, GONE, HEAD, TAIL, TRENDS, Doctor, Finding, diagnose, examine_step
from look.step import diagnosis, trend

KNOBS = {
    "data": {"max_response_length": 512, "train_batch_size": 32, "val_files": ["val.jsonl"]},
    "rollout": {"top_p": 1.0, "top_k": 0, "failed_groups": "drop"},
    "actor": {"dtype": "bfloat16", "grad_clip": 1.0, "lr_warmup_steps": 0, "lr": 1e-6},
    "algorithm": {"adv_estimator": "grpo", "max_num_gen_batches": 10},
    "loss": {"loss_mode": "vanilla", "loss_agg_mode": "token-mean", "kl_loss_coef": 0.001},
    "reward": {"max_failed_fraction": 0.1, "timeout_s": 10.0},
}


def healthy(step: int) -> dict:
    """A step of a run that learns: rewards of 0 or 1 rise from 0.2 to 0.7 in 60 steps, with noise."""
    noise = (0.02, -0.01, 0.0, -0.02, 0.01)[step % 5]
    metrics = {
        "step": step,
        "reward/mean": 0.2 + min(step, 60) / 120 + noise,
        "reward/std": 0.4,
        "reward/max": 1.0,
        "reward/min": 0.0,
        "reward/frac_zero_std": 0.5,
        "reward/frac_zero_std_positive": 0.3,
        "reward/error": 0.0,
        "reward/timeout": 0.0,
        "reward/kl": 0.02,
        "rollout/groups_informative": 16,
        "rollout/groups_solved": 10,
        "rollout/groups_failed": 6,
        "rollout/groups_lost": 0,
        "rollout/gen_batches": 1,
        "response_length/mean": 200.0 + step,
        "response_length/clip_ratio": 0.1,
        "actor/grad_norm": 0.8 + noise,
        "actor/skipped_steps": 0,
        "actor/num_updates": 2,
        "actor/lr": 1e-6,
        "actor/pg_loss": 0.01,
        "actor/kl_loss": 0.02,
        "actor/entropy": 0.5 - min(step, 60) / 200,
        "actor/ppo_kl": 0.002,
        "actor/pg_clipfrac": 0.02,
        "correction/k3": 0.003,
        "correction/prob_diff_mean": 0.008,
        "correction/ess": 0.99,
        "correction/rejected_frac": 0.0,
        "agent/tool_calls/mean": 1.0,
        "agent/tool_errors/mean": 0.02,
        "perf/token_imbalance": 0.02,
        "perf/gen_tokens_per_s": 5000.0,
        "perf/train_tokens_per_s": 20000.0,
        "perf/max_memory_gb": 60.0,
        "timing_s/gen": 10.0,
        "timing_s/gen/max": 10.0,
        "timing_s/gen/mean": 9.0,
        "timing_s/idle": 0.5,
        "timing_s/sync": 1.0,
        "timing_s/step": 30.0,
    }
    if step % 10 == 0:
        metrics |= {
            "val/x/mean@1": 0.2 + min(step, 60) / 120,
            "val/x/mean@1/stderr": 0.01,
            "val/x/failed_sessions": 0.0,
            "val/error": 0.0,
            "val/timeout": 0.0,
            "timing_s/testing": 20.0,
        }
    if step % 20 == 0:
        metrics["timing_s/save_checkpoint"] = 5.0
    return metrics


def records(length: int, changes: dict | None = None) -> list[dict]:
    """Healthy steps with changes: a value is the last step's, a function gives each step's."""
    run = [healthy(step) for step in range(length)]
    for name, change in (changes or {}).items():
        for record in run if callable(change) else run[-1:]:
            record[name] = change(record["step"]) if callable(change) else change
    return run


def always(value):
    return lambda step: value


def flat(step):
    """A reward that goes nowhere."""
    return 0.4 + (0.02, -0.01, 0.0, -0.02, 0.01)[step % 5]


FLAT, VAL, NO = {"reward/mean": flat}, "val/x/mean@1", float("nan")


CUT = {"response_length/clip_ratio": 0.62, "reward/truncated": 0.1, "rollout/num_trajectories": 256}


def after(start, before, then):
    return lambda step: before if step < start else then


def val(*last):
    """Validations at steps 0, 10, ... 50: 0.2, 0.3, 0.4, 0.35, and these."""
    return lambda step: (0.2, 0.3, 0.4, 0.35, *last)[step // 10] if step % 10 == 0 else NO


def knobs(**changes) -> dict:
    return KNOBS | {group: KNOBS.get(group, {}) | values for group, values in changes.items()}


# name of a diagnosis -> steps, changes that deserve it, changes that are just short of it, and a word that the text must have; knobs of both, knobs of the second
STEPS = {
    "rewards_all_low": (
        3,
        {"reward/max": 0.0, "reward/mean": 0.0},
        {"reward/max": 0.01, "reward/mean": 0.001},
        "all 32 groups had equal rewards",
    ),
    "rewards_all_high": (
        3,
        {"reward/min": 1.0, "reward/mean": 1.0},
        {"reward/min": 0.99, "reward/mean": 1.0},
        "filter_groups",
    ),
    "groups_all_equal": (
        3,
        {"reward/frac_zero_std": 1.0},
        {"reward/frac_zero_std": 0.97},
        "all 32 groups had equal rewards: nothing was learned this step",
    ),
    "groups_mostly_equal": (
        12,
        {"reward/frac_zero_std": always(0.97)},
        {"reward/frac_zero_std": after(3, 0.5, 0.97)},
        "97%",
    ),
    "gradient_zero": (3, {"actor/grad_norm": 0.0}, {"actor/grad_norm": 1e-9}, "although rewards differ"),
    "gradient_not_finite": (3, {"actor/skipped_steps": 1}, {"actor/skipped_steps": 0}, "python -m look.replay"),
    "gradient_clipped": (
        20,
        {"actor/grad_norm": always(10.1)},
        {"actor/grad_norm": after(1, 9.9, 10.1)},
        "actor.grad_clip=1.0",
    ),
    "gradient_spike": (11, {"actor/grad_norm": 8.5}, {"actor/grad_norm": 7.5}, "usual is 0.8"),
    "loss_zero": (
        3,
        {"actor/num_updates": 1, "actor/pg_loss": 4e-9},
        {"actor/num_updates": 2, "actor/pg_loss": 4e-9},
        "normal, the gradient is not 0 but 0.8",
    ),
    "lr_zero": (1, {"actor/lr": 0.0}, {"actor/lr": 1e-9}, "normal", knobs(actor={"lr_warmup_steps": 10})),
    "lr_stays_zero": (3, {"actor/lr": 0.0}, {"actor/lr": 1e-9}, "min_lr_ratio"),
    "entropy_collapsed": (
        40,
        FLAT | {"actor/entropy": lambda i: 0.8 * 0.9**i},
        FLAT | {"actor/entropy": lambda i: 0.8 * 0.94**i},
        "nothing new is tried",
    ),
    "entropy_exploded": (
        40,
        {"actor/entropy": lambda i: 0.5 + i / 30},
        {"actor/entropy": lambda i: 0.5 + i / 50},
        "entropy rose from 0.57",
    ),
    "step_kl": (3, {"actor/ppo_kl": 0.11}, {"actor/ppo_kl": 0.09}, "0.11 nats"),
    "kl_in_loss": (3, {"actor/kl_loss": 1.1}, {"actor/kl_loss": 0.9}, "loss.kl_loss_coef=0.001"),
    "kl_in_reward": (3, {"reward/kl": 1.1}, {"reward/kl": 0.9}, "algorithm.kl_coef"),
    "clipped": (3, {"actor/pg_clipfrac": 0.31}, {"actor/pg_clipfrac": 0.29}, "31% of the tokens"),
    "mismatch": (3, {"correction/k3": 0.08}, {"correction/k3": 0.019}, "the sampler and the actor disagree (k3 0.08"),
    "low_ess": (3, {"correction/ess": 0.69}, {"correction/ess": 0.71}, "69%"),
    "rejected": (3, {"correction/rejected_frac": 0.51}, {"correction/rejected_frac": 0.49}, "51%"),
    "truncated": (
        3,
        {"response_length/clip_ratio": 0.62},
        {"response_length/clip_ratio": 0.29},
        "62% of responses hit data.max_response_length=512: raise it, or see algorithm.overlong_buffer_len",
    ),
    "truncated_on_purpose": (
        3,
        {"response_length/clip_ratio": 1.0},
        {"response_length/clip_ratio": 0.3},
        "100% of responses",
    ),
    "length_collapsed": (
        40,
        FLAT | {"response_length/mean": lambda i: 300 - 6 * i},
        FLAT | {"response_length/mean": lambda i: 300 - 5 * i},
        "shrank from 288 tokens",
    ),
    "length_ran_away": (
        40,
        FLAT | {"response_length/mean": lambda i: 100 + 7 * i},
        FLAT | {"response_length/mean": lambda i: 100 + 6 * i},
        "grew from 114 tokens",
    ),
    "reward_fell": (
        60,
        {"reward/mean": lambda i: flat(i) + 0.02 * min(i, 60 - i)},
        {"reward/mean": lambda i: flat(i) + 0.02 * min(i, 44)},
        "fell from",
    ),
    "reward_outlier": (20, {"reward/max": 21.0}, {"reward/max": 19.0}, "bound the reward"),
    "rewards_failed": (3, {"reward/error": 2.0}, {"reward/error": 0.0}, "2 of the rewards raised"),
    "rewards_late": (3, {"reward/timeout": 2.0}, {"reward/timeout": 0.0}, "reward.timeout_s=10.0"),
    "groups_lost": (3, {"rollout/groups_lost": 3}, {"rollout/groups_lost": 0}, "3 of the groups lost a session"),
    "tools_fail": (3, {"agent/tool_errors/mean": 0.51}, {"agent/tool_errors/mean": 0.49}, "51% of the tool calls"),
    "many_batches": (3, {"rollout/gen_batches": 8}, {"rollout/gen_batches": 7}, "max_num_gen_batches=10"),
    "no_validation": (1, {}, {}, "no validation", knobs(data={"val_files": []}), KNOBS),
    "validation_failed": (11, {"val/x/failed_sessions": 0.1}, {"val/x/failed_sessions": 0.0}, "count as wrong"),
    "validation_fell": (
        51,
        {VAL: val(0.34, 0.33)},
        {VAL: val(0.38, 0.3)},
        "fell from 0.4 (step 20) to 0.33 while the training reward rose from",
    ),
    "engine_idle": (6, {"timing_s/idle": always(3.1)}, {"timing_s/idle": always(2.9)}, "31% of the generation"),
    "engine_late": (6, {"timing_s/gen/max": always(13.6)}, {"timing_s/gen/max": always(13.4)}, "13.6 s"),
    "ranks_uneven": (
        6,
        {"perf/token_imbalance": always(0.31)},
        {"perf/token_imbalance": always(0.29)},
        "31% more tokens",
    ),
    "slowed": (
        30,
        {"perf/gen_tokens_per_s": after(27, 5000, 2400), "perf/train_tokens_per_s": after(27, 20000, 9900)},
        {"perf/gen_tokens_per_s": after(27, 5000, 2400), "perf/train_tokens_per_s": after(27, 20000, 10100)},
        "2400 tokens/s are generated and 9900 trained on",
    ),
    "saving": (
        20,
        {"timing_s/save_checkpoint": always(9.1)},
        {"timing_s/save_checkpoint": always(8.9)},
        "30% of 600 s",
    ),
}
RUNS = {
    "reward_flat": (
        60,
        FLAT,
        {"reward/mean": lambda i: flat(i) + i / 300},
        "the reward did not rise: 0.4 in the first quarter",
    ),
    "validation_worse": (
        31,
        FLAT | {VAL: lambda i: 0.5 - i / 900 if i % 10 == 0 else NO},
        FLAT | {VAL: lambda i: 0.5 - i / 1100 if i % 10 == 0 else NO},
        "ended at 0.467, below the 0.5",
    ),
    "truncation_rose": (
        40,
        {"response_length/clip_ratio": after(30, 0.05, 0.26)},
        {"response_length/clip_ratio": after(30, 0.05, 0.24)},
        "0.05 in the first quarter",
    ),
    "mismatch_rose": (
        40,
        {"correction/k3": after(30, 0.003, 0.0155)},
        {"correction/k3": after(30, 0.003, 0.0149)},
        "drift apart",
    ),
    "memory_grew": (
        40,
        {"perf/max_memory_gb": after(30, 60, 79)},
        {"perf/max_memory_gb": after(30, 60, 77)},
        "memory grows",
    ),
    "testing_long": (40, {"timing_s/testing": always(9.1)}, {"timing_s/testing": always(8.9)}, "went into validation"),
    "sync_long": (40, {"timing_s/sync": always(9.1)}, {"timing_s/sync": always(8.9)}, "went into sync"),
}


def names(run: list[dict], settings: dict) -> dict[str, Finding]:
    return {f.name: f for f in examine_step(run[-1], run[:-1], settings)}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_deserves_a_finding_has_this_one_alone_and_one_just_short_of_it_none(name):
    length, deserves, short, word, *settings = STEPS[name]
    found = names(records(length, deserves), settings[0] if settings else KNOBS)
    assert list(found) == [name]
    level, see = next((level, see) for row, level, see, _ in DIAGNOSES if row == name)
    assert word in found[name].text and (found[name].level, found[name].see) == (level, see)
    assert names(records(length, short), settings[-1] if settings else KNOBS) == {}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_deserves_a_trend_has_it_and_one_just_short_of_it_not(name):
    length, deserves, short, word = RUNS[name]
    lines = diagnose(records(length, deserves), KNOBS)
    assert len(lines) == 1 and lines[0].startswith("warning: ") and word in lines[0], lines
    assert diagnose(records(length, short), KNOBS)[0].startswith("nothing found")


def test_a_reward_that_stays_near_its_top_is_not_flat():
    assert diagnose(records(60, {"reward/mean": lambda i: flat(i) + 0.48}), KNOBS)[0].startswith("nothing found")


def test_every_diagnosis_is_tested_and_findings_come_in_this_order():
    assert list(STEPS) == [name for name, *_ in DIAGNOSES]
    assert list(RUNS) == [name for name, *_ in TRENDS]


def test_a_diagnosis_is_one_function_with_one_decorator():
    @diagnosis("note", "response_length/mean")
    def too_short(s, x):
        return f"{x:.0f} tokens" if x < 2 else None

    @trend("problem", "actor/lr")
    def no_lr(records):
        return "never" if all(record["actor/lr"] == 0 for record in records) else None

    try:
        run = records(3, {"response_length/mean": always(1.0), "actor/lr": always(0.0)})
        *_, found = examine_step(run[-1], run[:-1], KNOBS)
        assert found == Finding("too_short", "note", "1 tokens", "response_length/mean")
        lines = diagnose(run, KNOBS)
        assert lines[0] == "problem: never (actor/lr)" and lines[-1] == "note: 1 tokens (response_length/mean)"
    finally:
        assert (DIAGNOSES.pop().name, TRENDS.pop().name) == ("too_short", "no_lr")


@pytest.mark.parametrize(
    "changes, length, settings, expected",
    [
        # Whose baseline is not the group's.
        ({"reward/frac_zero_std": 1.0}, 3, knobs(algorithm={"adv_estimator": "reinforce_plus_plus"}), []),
        ({"reward/frac_zero_std": 1.0}, 3, knobs(algorithm={"adv_estimator": "remax"}), []),
        # Not known: as grpo and vanilla.
        ({"reward/frac_zero_std": 1.0}, 3, knobs(algorithm={"adv_estimator": "mine"}), ["groups_all_equal"]),
        ({"actor/grad_norm": 0.0}, 3, knobs(algorithm={"adv_estimator": "mine"}), ["gradient_zero"]),
        ({"actor/pg_clipfrac": 0.6}, 3, knobs(loss={"loss_mode": "mine"}), ["clipped"]),
        # The two best may be equal.
        ({"actor/grad_norm": 0.0}, 3, knobs(algorithm={"adv_estimator": "grpo_passk"}), []),
        ({"actor/pg_clipfrac": 0.6}, 3, knobs(loss={"loss_mode": "gspo"}), []),
        # Of a sequence, not of a token.
        ({"actor/kl_loss": 3.0}, 3, knobs(loss={"loss_agg_mode": "seq-mean-token-sum"}), []),
        # What bfloat16 may, float32 may not.
        ({"correction/k3": 0.002}, 3, knobs(actor={"dtype": "float32"}), ["mismatch"]),
        ({"actor/lr": 0.0}, 3, knobs(actor={"lr_warmup_steps": 2}), ["lr_stays_zero"]),  # the warm-up is over
        # Cut, and no reward: not on purpose.
        (
            {"response_length/clip_ratio": 1.0, "reward/frac_zero_std": 1.0, "reward/max": 0.0, "reward/mean": 0.0},
            3,
            KNOBS,
            ["rewards_all_low", "truncated"],
        ),
        # The answer is a sum, a limit of 8 no mistake.
        ({"response_length/clip_ratio": 0.62}, 3, knobs(data={"max_response_length": 32}), ["truncated_on_purpose"]),
        ({"response_length/clip_ratio": 0.62}, 3, knobs(data={"max_response_length": 33}), ["truncated"]),
        (
            {"response_length/clip_ratio": 0.62, "reward/frac_zero_std": 1.0},
            3,
            knobs(data={"max_response_length": 8}),
            ["groups_all_equal", "truncated"],
        ),
        # Cut, and better than the others: so long is right.
        (CUT | {"reward/truncated": 0.5}, 3, KNOBS, ["truncated_on_purpose"]),
        # 3 standard errors below 0.217 are 0.157.
        (CUT | {"reward/truncated": 0.16}, 3, KNOBS, ["truncated_on_purpose"]),
        (CUT | {"reward/truncated": 0.15}, 3, KNOBS, ["truncated"]),
        # Of so few it may be chance.
        (CUT | {"reward/truncated": 0.15, "rollout/num_trajectories": 128}, 3, KNOBS, ["truncated_on_purpose"]),
        (CUT | {"reward/truncated": 0.0, "response_length/clip_ratio": 0.9}, 3, KNOBS, ["truncated"]),
        ({"actor/entropy": lambda i: 0.8 * 0.9**i}, 40, KNOBS, []),  # the reward rises
        ({"actor/entropy": lambda i: 0.8 * 0.9**i, "reward/mean": lambda i: 0.85}, 40, KNOBS, []),  # the task is solved
        (FLAT | {"actor/entropy": always(0.009)}, 40, KNOBS, ["entropy_collapsed"]),  # from the beginning
        ({"response_length/mean": lambda i: 100 + 10 * i}, 40, KNOBS, []),  # longer, and better
        ({"perf/gen_tokens_per_s": 100.0, "perf/train_tokens_per_s": 100.0}, 40, KNOBS, []),  # one slow step
        ({VAL: val(0.2, 0.2), "reward/mean": lambda i: 0.5 - i / 1000}, 51, KNOBS, []),  # training went down as well
        ({VAL: val(0.39, 0.2)}, 51, KNOBS, []),  # one bad validation
        # Of rewards of -1 or 1.
        ({"reward/max": -1.0, "reward/min": -1.0, "reward/mean": -1.0}, 3, KNOBS, ["rewards_all_low"]),
        # Too young to call it lasting.
        ({"reward/frac_zero_std": always(0.97), "actor/grad_norm": always(11.0)}, 9, KNOBS, []),
        ({"timing_s/save_checkpoint": 20.0}, 2, KNOBS, []),  # a minute has not passed
        ({"timing_s/idle": always(0.3), "timing_s/gen": always(0.5)}, 6, KNOBS, []),  # nobody waits half a second
    ],
)
def test_what_looks_alike_is_told_apart(changes, length, settings, expected):
    assert list(names(records(length, changes), settings)) == expected


def test_healthy_runs_have_no_finding():
    run, doctor = records(300), Doctor(KNOBS)
    assert [line for record in run for line in doctor.lines(record)] == []
    (line,) = diagnose(run, KNOBS)
    assert (
        line.startswith("nothing found that is wrong in 300 steps: looked for rewards_all_low, ")
        and "without" not in line
        and "no numbers" not in line
    )


@pytest.mark.parametrize("path", sorted((ROOT / "docs/runs").glob("*.jsonl")), ids=lambda path: path.stem)
def test_published_runs_have_no_finding(path):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for seed in {record.get("seed") for record in records}:  # some files hold several runs
        run = [record for record in records if record.get("seed") == seed]
        (line,) = diagnose(run, {})
        assert line.startswith(f"nothing found that is wrong in {sum('reward/mean' in record for record in run)} steps")
        assert "the records have no numbers for" in line and "truncated" in line.split("no numbers for")[1]


@pytest.mark.parametrize("name", STEPS)
def test_null_missing_and_odd_numbers_crash_nothing(name):
    """JSON has null for NaN and infinity; the live record has the floats; older runs lack metrics, and knobs."""
    length, deserves, _, _, *settings = STEPS[name]
    run = records(length, deserves)
    for metric in [*run[-1], "step"]:
        for value in (None, math.nan, math.inf, -math.inf, 0.0, "text"):
            examine_step(run[-1] | {metric: value}, run[:-1], settings[0] if settings else KNOBS)
        for spoiled in (
            [{k: v for k, v in record.items() if k != metric} for record in run],
            [record | {metric: None} for record in run],
            [record | {metric: 0} for record in run],
        ):
            examine_step(spoiled[-1], spoiled[:-1], settings[0] if settings else KNOBS)
    for settings in (
        {},
        {"data": None, "actor": {}},
        {group: dict.fromkeys(values) for group, values in KNOBS.items()},
    ):
        examine_step(run[-1], run[:-1], settings)
        diagnose(run, settings)
    diagnose([record | {"step": None} for record in run], KNOBS)
    assert all(type(text) is str for text in diagnose([{}, *run, {}, {"step": length + 1}], {}))


def test_no_record_has_nothing():
    assert examine_step({}, [], {}) == []
    assert diagnose([], {})[0].startswith("nothing found that is wrong in 0 steps")


def test_diagnose_groups_steps_and_puts_problems_first():
    bad = {3, 4, 5, 9, 11}
    run = records(
        20,
        {
            "reward/frac_zero_std": lambda i: 1.0 if i in bad else 0.5,
            "rollout/groups_lost": after(19, 0, 2),
            "actor/num_updates": always(1),
            "actor/pg_loss": always(0.0),
        },
    )
    run.append({"step": 20, "val/x/mean@1": 0.9, "timing_s/step": 3.0})  # the record after the last step is no step
    problem, warning, note = diagnose(run, KNOBS)
    assert problem.startswith(
        "problem: steps 3-5 and 2 others, 5 of 20: all 32 groups had equal rewards"
    ) and problem.endswith("(reward/frac_zero_std)")
    assert warning.startswith("warning: step 19, 1 of 20: 2 of the groups lost a session")
    assert note.startswith("note: the loss is 0")
    assert diagnose(records(5, {"actor/lr": after(1, 0.0, 1e-6)}), knobs(actor={"lr_warmup_steps": 1})) == [
        diagnose(records(5), KNOBS)[0],
        "note: the learning rate is 0 in the first step of the warm-up: normal, from the next step on it is not (actor/lr)",
    ]


def said(pattern, metric="reward/error", level="warning") -> list[int]:
    """Steps at which the console has a line, where `pattern(step)` is true of the steps that deserve it."""
    doctor, steps = Doctor(KNOBS), []
    for record in records(100, {metric: lambda i: float(pattern(i))}):
        if lines := doctor.lines(record):
            assert len(lines) == 1 and lines[0].startswith(f"{level}: ") and lines[0].endswith(f"({metric})")
            steps.append(record["step"])
    return steps


def test_a_finding_that_lasts_is_said_when_it_begins_and_every_20th_step():
    assert said(lambda i: 7 <= i < 60) == [7, 7 + AGAIN, 7 + 2 * AGAIN]
    assert said(lambda i: i in (7, 50)) == [7, 50]
    assert said(lambda i: i in (7, 7 + GONE + 1)) == [7, 7 + GONE + 1], "it had ended"
    assert said(lambda i: i % 2 == 0) == [0, 20, 40, 60, 80], "one that comes and goes lasts"


def test_a_note_is_said_once():
    doctor = Doctor(KNOBS)
    run = records(100, {"actor/num_updates": always(1), "actor/pg_loss": lambda i: 0.0 if i % 30 < 10 else 0.1})
    assert [record["step"] for record in run if doctor.lines(record)] == [0]


def test_doctor_keeps_a_bounded_past_with_the_runs_start():
    doctor = Doctor(KNOBS)
    run = records(
        TAIL + 300,
        FLAT
        | {"response_length/mean": lambda i: 100.0 if i < HEAD else 301.0, "response_length/clip_ratio": always(0.0)},
    )
    lines = [doctor.lines(record) for record in run]
    assert len(doctor.head) + len(doctor.tail) == HEAD + TAIL
    assert any("grew from 100 tokens to 301" in line for step in lines[TAIL + 200 :] for line in step)


def test_doctor_of_a_run_that_goes_on_knows_what_was_and_does_not_repeat_it():
    run = records(
        45,
        FLAT
        | {"response_length/mean": lambda i: 100 + 7 * i, "actor/num_updates": always(1), "actor/pg_loss": always(0.0)},
    )
    fresh, resumed = Doctor(KNOBS), Doctor(KNOBS)
    for record in run[:36]:
        resumed.lines(record)
    said = [[line for record in run[36:] for line in doctor.lines(record)] for doctor in (fresh, resumed)]
    assert ["the loss is 0" in line for line in said[0]] == [True]
    assert ["grew from 114 tokens" in line for line in said[1]] == [True]


def test_findings_name_what_to_see():
    (finding,) = examine_step(records(3, {"response_length/clip_ratio": 0.62})[-1], records(2), KNOBS)
    assert (
        str(finding)
        == "62% of responses hit data.max_response_length=512: raise it, or see algorithm.overlong_buffer_len (response_length/clip_ratio)"
    )
    assert all(level in ("problem", "warning", "note") for _, level, _, _ in DIAGNOSES + TRENDS)


def test_a_validation_without_a_number_is_no_finding():
    """Only nulls, as of sessions that all failed, beside a standard error that is a number."""
    records = [{"step": step, "val/sums/mean@1": None, "val/sums/mean@1/stderr": 0.1} for step in range(3)]
    assert not any("validation" in line and "ended at" in line for line in diagnose(records, {}))
