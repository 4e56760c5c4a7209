"""Sessions through real vLLM: seeds, finish reasons, log-probs, the token ids that exist, and agents of one or more turns."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from fakes import make_trajectory
from test_scheduler import Schedule, stock

import agent as agents
from agent import single_turn_agent
from batch import Task, Trajectory
from policy import session_seed, stop_token_ids
from rollout import Group, Rollout, ValConfig, check_groups, sample, usable
from sync_weights import sync_weights

TASKS = [Task([{"role": "user", "content": f"{n}+7="}], "exact", "", index=n) for n in range(10, 16)]


@pytest.fixture
def awake(cfg, engine, actor):
    sync_weights(actor, engine, cfg.sync, [])
    return engine


class Unscored:
    async def score(self, trajectory):
        trajectory.score = 0.0


UNSCORED = Unscored()


def run(engine, tasks, step, sampling, scorer=UNSCORED):
    """The trajectories of a rollout, without its groups."""
    return [t for group in Rollout(engine, scorer, step, sampling).run(tasks) for t in group.trajectories]


def key(t):
    return t.uid, t.session_id, t.index


def idle(engine):
    """Neither vLLM's scheduler nor its front end has a request."""
    return (
        not engine.unfinished
        and not engine.llm.llm_engine.engine_core.engine_core.scheduler.requests
        and not engine.llm.llm_engine.has_unfinished_requests()
    )


def test_trajectories_come_in_submission_order_with_their_keys(cfg, awake):
    trajectories = run(awake, TASKS, 3, cfg.rollout)
    assert [t.task.index for t in trajectories] == [task.index for task in TASKS for _ in range(4)]
    assert [t.session_id for t in trajectories] == [0, 1, 2, 3] * len(TASKS)
    assert len({t.uid for t in trajectories}) == len(TASKS)
    assert {t.weight_version for t in trajectories} == {0} and {t.num_turns for t in trajectories} == {1}


def test_prompt_is_rendered_and_not_trained_on(cfg, awake, tokenizer):
    for t in run(awake, TASKS[:2], 0, cfg.rollout):
        rendered = tokenizer.apply_chat_template(t.task.messages, add_generation_prompt=True, return_dict=False)
        assert t.tokens[: len(rendered)] == rendered
        assert t.response_mask == [0] * len(rendered) + [1] * (len(t.tokens) - len(rendered))
        assert all(lp == 0.0 for lp in t.rollout_logprobs[: len(rendered)]) and all(
            lp < 0 for lp in t.rollout_logprobs[len(rendered) :]
        )


def test_sessions_differ_and_repeat_whatever_is_sampled_beside_them(cfg, awake):
    """The model's generation_config says top_k=1: were it used, the sessions of a prompt would be equal."""
    together = run(awake, TASKS, 5, cfg.rollout)
    assert len({tuple(t.tokens) for t in together[:4]}) == 4
    alone = run(awake, TASKS[:1], 5, cfg.rollout)
    assert [(key(t), t.tokens) for t in alone] == [(key(t), t.tokens) for t in together[:4]]
    assert [t.tokens for t in run(awake, TASKS[:1], 6, cfg.rollout)] != [
        t.tokens for t in alone
    ]  # another step, other seeds


def test_same_row_twice_in_a_batch_is_two_prompts(cfg, awake):
    trajectories = run(awake, [TASKS[0], TASKS[0]], 0, cfg.rollout)
    assert len({t.uid for t in trajectories}) == 2
    assert len({tuple(t.tokens) for t in trajectories}) == 8


def test_no_two_sessions_share_a_seed():
    seeds = {
        session_seed(0, kind, step, prompt, session)
        for kind in ("train", "val")
        for step in range(20)
        for prompt in range(50)
        for session in range(8)
    }
    assert len(seeds) == 2 * 20 * 50 * 8 and all(0 <= seed < 2**63 for seed in seeds)


def test_finish_reason_is_vllms_and_the_end_token_is_the_policys(cfg, awake, tokenizer):
    trajectories = run(awake, TASKS * 8, 0, cfg.rollout)
    reasons = {t.finish_reason for t in trajectories}
    assert reasons == {"stop", "length"}
    for t in trajectories:
        if t.finish_reason == "stop":
            assert t.tokens[-1] == tokenizer.eos_token_id and t.response_mask[-1] == 1
        else:
            assert (
                t.response_length == cfg.data.max_response_length
                and tokenizer.eos_token_id not in t.tokens[t.prompt_length :]
            )


def test_ids_past_the_tokenizer_are_never_sampled(cfg, awake, tokenizer, actor):
    """The padded rows of this model's embedding would get about a quarter of all samples; here the likeliest of all."""
    assert awake.model.config.vocab_size > len(tokenizer)
    sampled = [x for t in run(awake, TASKS * 8, 0, cfg.rollout) for x in t.tokens[t.prompt_length :]]
    assert len(sampled) > 1000 and max(sampled) < len(tokenizer)


def test_rollout_logprobs_are_the_actors_at_any_temperature(cfg, awake, tokenizer, actor):
    sampling = dataclasses.replace(cfg.rollout, temperature=0.6)
    trajectories = run(awake, TASKS[:2], 0, sampling)
    actor.model.get_output_embeddings().temperature = 0.6
    for t, logprobs in zip(trajectories, actor.score(trajectories)):
        assert logprobs.tolist() == pytest.approx(t.rollout_logprobs, abs=1e-4)


def test_greedy_validation_gives_one_answer(awake):
    trajectories = run(awake, TASKS[:2], 0, ValConfig(n=3))
    assert len({tuple(t.tokens) for t in trajectories}) == 2


def test_end_tokens_are_the_tokenizers_and_the_models(tiny, tokenizer):
    assert stop_token_ids(str(tiny / "model"), tokenizer) == [tokenizer.eos_token_id]
    assert stop_token_ids(str(tiny), tokenizer) == [tokenizer.eos_token_id]  # a folder without a generation_config


def test_every_end_token_ends_a_turn(cfg, awake, tokenizer, monkeypatch):
    """A chat model's generation_config lists more of them than its tokenizer has."""
    letters = [tokenizer.convert_tokens_to_ids(c) for c in "abcdefghij"]
    monkeypatch.setattr(awake, "stop_token_ids", [tokenizer.eos_token_id, *letters])
    responses = [t.tokens[t.prompt_length :] for t in run(awake, TASKS * 8, 0, cfg.rollout)]
    assert any(r[-1] in letters for r in responses)
    assert not any(x in letters for r in responses for x in r[:-1])


def use_agent(monkeypatch, agent):
    monkeypatch.setitem(agents.AGENTS, "single_turn_agent", agent)


def test_agent_of_two_turns_keeps_every_token(cfg, awake, monkeypatch):
    async def twice(task, policy, cfg):
        t = Trajectory(task)
        t.observe(policy.encode(task.messages))
        for _ in range(2):
            reply = await policy.generate(t.tokens, max_tokens=4)
            t.act(reply.tokens, reply.logprobs)
            t.observe([5, 6])
        return t

    use_agent(monkeypatch, twice)
    trajectories = run(awake, TASKS[:2], 0, cfg.rollout)
    assert all(t.num_turns == 2 for t in trajectories)
    for t in trajectories:
        turns = "".join(map(str, t.response_mask)).strip("0").split("00")
        assert len(turns) == 2 and all(set(turn) == {"1"} for turn in turns)


def test_slow_session_delays_only_itself(cfg, awake, monkeypatch):
    ended = []

    async def slow_first(task, policy, cfg):
        t = Trajectory(task)
        t.observe(policy.encode(task.messages))
        for _ in range(2):
            reply = await policy.generate(t.tokens, max_tokens=4)
            t.act(reply.tokens, reply.logprobs)
            await asyncio.sleep(0.5 if task.index == 10 else 0)
        ended.append(task.index)
        return t

    use_agent(monkeypatch, slow_first)
    trajectories = run(awake, TASKS, 0, dataclasses.replace(cfg.rollout, n=1))
    assert ended[-1] == 10 and [t.task.index for t in trajectories] == [task.index for task in TASKS]


def test_finished_session_is_scored_while_others_generate(cfg, awake, monkeypatch):
    events = []

    class Slow:
        async def score(self, trajectory):
            events.append(("scoring", trajectory.task.index))
            await asyncio.sleep(0.05)
            events.append(("scored", trajectory.task.index))

    async def slow_first(task, policy, cfg):
        if task.index == 10:
            await asyncio.sleep(0.5)
        t = await single_turn_agent(task, policy, cfg)
        events.append(("sampled", task.index))
        return t

    use_agent(monkeypatch, slow_first)
    run(awake, TASKS, 0, dataclasses.replace(cfg.rollout, n=1), Slow())
    assert events.index(("scored", 15)) < events.index(("sampled", 10))
    assert {index for event, index in events if event == "scored"} == {task.index for task in TASKS}


@contextlib.contextmanager
def knobs(engine, **changes):
    """The engine with other rollout knobs, for a while; yields the sampling that goes with them."""
    cfg = engine.cfg
    engine.cfg = dataclasses.replace(cfg, rollout=dataclasses.replace(cfg.rollout, **changes))
    try:
        yield engine.cfg.rollout
    finally:
        engine.cfg = cfg


async def raises(task, policy, cfg):
    await policy.generate(policy.encode(task.messages))
    raise KeyError("no such tool")


async def hangs(task, policy, cfg):
    await asyncio.sleep(60)


async def returns_nothing(task, policy, cfg):
    return None


async def returns_an_empty_list(task, policy, cfg):
    return []


async def returns_what_was_not_sampled(task, policy, cfg):
    t = Trajectory(task)
    t.observe(policy.encode(task.messages))
    return t


async def returns_too_much(task, policy, cfg):
    t = await single_turn_agent(task, policy, cfg)
    t.observe([5] * 100)
    return t


async def exits(task, policy, cfg):
    raise SystemExit(3)


async def cancels_its_own_child(task, policy, cfg):
    child = asyncio.ensure_future(asyncio.sleep(60))
    child.cancel()
    await child


ENDS_S = 100  # what holds on ends by itself, so that a test of what must not wait for it fails and does not hang
let_go = threading.Event()


async def holds_on(task, policy, cfg):
    """Swallows its cancellation until it is let go."""
    until = time.monotonic() + ENDS_S
    while time.monotonic() < until and not let_go.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)


async def leaves_a_thread(task, policy, cfg):
    await asyncio.to_thread(let_go.wait, ENDS_S)


async def writes_tokens_by_hand(task, policy, cfg):
    t = await single_turn_agent(task, policy, cfg)
    t.tokens.append(5)
    return t


async def returns_ids_that_are_none(task, policy, cfg):
    t = await single_turn_agent(task, policy, cfg)
    t.tokens[-1] = 10**6
    return t


async def measures_no_number(task, policy, cfg):
    t = await single_turn_agent(task, policy, cfg)
    t.metrics["mood"] = "good"
    return t


async def knows_no_log_prob(task, policy, cfg):
    t = await single_turn_agent(task, policy, cfg)
    t.rollout_logprobs[-1] = None
    return t


async def knows_half_a_log_prob(task, policy, cfg):
    t = await single_turn_agent(task, policy, cfg)
    t.rollout_logprobs[-1] = float("nan")
    return t


async def falls_deep(task, policy, cfg):
    await falls_deep_by_turns(task, policy, cfg)


async def falls_deep_by_turns(task, policy, cfg):
    await falls_deep(task, policy, cfg)


async def begins_with_a_sampled_token(task, policy, cfg):
    t, whole = Trajectory(task), await single_turn_agent(task, policy, cfg)
    t.act(whole.tokens[-1:], whole.rollout_logprobs[-1:])
    return t


FAILURES = [
    (raises, "KeyError: 'no such tool'"),
    (hangs, "session 1 had not ended after rollout.session_timeout_s=3.0"),
    (returns_nothing, "must return a Trajectory or a list of them, not None"),
    (returns_an_empty_list, "must return a Trajectory or a list of them, not []"),
    (returns_what_was_not_sampled, "returned a trajectory without a sampled token"),
    (returns_too_much, "more than data.max_prompt_length=24 + data.max_response_length=12"),
    (exits, "SystemExit: 3"),
    (cancels_its_own_child, "CancelledError"),
    (leaves_a_thread, "session 1 had not ended after rollout.session_timeout_s=3.0"),
    (writes_tokens_by_hand, "mask bits"),
    (returns_ids_that_are_none, "ids 1 to 1000000 of"),
    (measures_no_number, "metrics that are no numbers: {'mood': 'good'}"),
    (knows_half_a_log_prob, "without a prompt, or with a log-prob that is no number"),
    (knows_no_log_prob, "without a prompt, or with a log-prob that is no number"),
    (falls_deep, "lines left out ...]\n"),
    (begins_with_a_sampled_token, "without a prompt, or with a log-prob that is no number"),
]


@pytest.mark.parametrize("broken, message", FAILURES, ids=[agent.__name__ for agent, _ in FAILURES])
def test_failed_session_fails_its_group_only_and_keeps_its_error(cfg, awake, monkeypatch, broken, message):
    turns = Counter()

    async def breaks_one(task, policy, cfg):
        turns[task.index] += 1
        return await (broken if task.index == 12 and turns[12] == 2 else single_turn_agent)(task, policy, cfg)

    use_agent(monkeypatch, breaks_one)
    start = time.monotonic()
    let_go.clear()
    with knobs(awake, session_timeout_s=3.0 if "session_timeout_s" in message else 60.0) as sampling:
        groups = Rollout(awake, Unscored(), 0, sampling).run(TASKS)
        after = Rollout(awake, Unscored(), 0, sampling).run(TASKS[:1])
    let_go.set()
    assert time.monotonic() - start < ENDS_S  # whatever it left behind is not waited for
    assert [g.status for g in groups] == ["failure" if task.index == 12 else "finished" for task in TASKS]
    assert [g.task for g in groups] == TASKS and [len(g.trajectories) for g in groups] == [4, 4, 3, 4, 4, 4]
    assert [t.session_id for t in groups[2].trajectories] == [0, 2, 3]
    assert len(groups[2].errors) == 1 and message in groups[2].errors[0] and groups[2].errors[0].count("\n") < 50
    assert idle(awake) and after[0].status == "finished"


def test_session_that_swallows_its_cancellation_is_left_behind(cfg, awake, monkeypatch):
    async def one_holds_on(task, policy, cfg):
        return await (holds_on if task.index == 12 else single_turn_agent)(task, policy, cfg)

    use_agent(monkeypatch, one_holds_on)
    start = time.monotonic()
    let_go.clear()
    with knobs(awake, group_timeout_s=3.0) as sampling:
        groups = Rollout(awake, Unscored(), 0, sampling).run(TASKS)
    let_go.set()
    assert time.monotonic() - start < ENDS_S and [g.status for g in groups].count("failure") == 1


def test_what_an_agent_does_to_its_prompt_is_its_own_business(cfg, awake, monkeypatch):
    async def adds(task, policy, cfg):
        t, prompt = Trajectory(task), policy.encode(task.messages)
        prompt += [5, 6]
        t.observe(prompt)
        reply = await policy.generate(t.tokens)
        t.act(reply.tokens, reply.logprobs)
        return t

    use_agent(monkeypatch, adds)
    trajectories = run(awake, TASKS[:1], 0, cfg.rollout)
    assert len({t.prompt_length for t in trajectories}) == 1
    assert all(t.finish_reason in ("stop", "length") for t in trajectories)  # the agent left it out


def test_cancelled_session_leaves_vllm(cfg, awake, monkeypatch):
    """A session that passes its deadline while it generates: its request must not go on beside the others, nor into the sleep."""

    async def forever(task, policy, cfg):
        while True:
            await policy.generate(policy.encode(task.messages))

    use_agent(monkeypatch, forever)
    with knobs(awake, session_timeout_s=0.3) as sampling:
        groups = Rollout(awake, Unscored(), 0, sampling).run(TASKS[:2])
    assert [len(g.errors) for g in groups] == [4, 4]
    assert idle(awake) and not awake.waiting


def test_group_deadline_covers_the_scores(cfg, awake):
    class Hangs:
        async def score(self, trajectory):
            if (trajectory.task.index, trajectory.session_id) == (11, 2):
                await asyncio.sleep(60)

    with knobs(awake, group_timeout_s=3.0) as sampling:
        groups = Rollout(awake, Hangs(), 0, sampling).run(TASKS)
    assert [g.status for g in groups] == ["finished", "failure", *["finished"] * 4]
    assert groups[1].errors == ["session 2 and its scores had not ended after rollout.group_timeout_s=3.0\n"]
    assert [t.session_id for t in groups[1].trajectories] == [0, 1, 3]


def test_raise_stops_with_the_agents_error_and_leaves_the_engine_usable(cfg, awake, monkeypatch):
    with monkeypatch.context() as patch, knobs(awake, failed_groups="raise") as sampling:
        use_agent(patch, raises)
        with pytest.raises(RuntimeError, match="(?s)rollout.failed_groups=raise:.*KeyError: 'no such tool'"):
            Rollout(awake, Unscored(), 0, sampling).run(TASKS)
    with monkeypatch.context() as patch, knobs(awake, failed_groups="raise", session_timeout_s=0.2) as sampling:
        use_agent(patch, hangs)
        with pytest.raises(RuntimeError, match="had not ended after rollout.session_timeout_s=0.2"):
            Rollout(awake, Unscored(), 0, sampling).run(TASKS)
    assert idle(awake)
    assert len(run(awake, TASKS, 0, cfg.rollout)) == 24


def test_too_many_failed_scores_stop_the_rollout_before_it_ends(cfg, awake, monkeypatch):
    async def slow(task, policy, cfg):
        await asyncio.sleep(60 if task.index == 15 else 0)
        return await single_turn_agent(task, policy, cfg)

    class Broken:
        async def score(self, trajectory):
            trajectory.error = "Traceback: no such key"

    use_agent(monkeypatch, slow)
    with pytest.raises(RuntimeError, match=r"(?s)of 24 .*reward.max_failed_fraction=0.1.*no such key"):
        Rollout(awake, Broken(), 0, cfg.rollout).run(TASKS)


def test_prompt_longer_than_allowed_stops_the_run_and_names_the_row_and_both_lengths(cfg, awake):
    task = Task([{"role": "user", "content": "1+" * 30}], "exact", "", index=77)
    with pytest.raises(ValueError, match=r"row 77 has \d+ tokens, more than data.max_prompt_length=24"):
        run(awake, [task], 0, cfg.rollout)


def test_requests_ask_for_what_vllms_front_end_makes_of_them(cfg, awake, tokenizer, monkeypatch):
    """Copies of one request's, but for the length and the seed: field by field what each would be by itself."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    asked, turn = [], awake._turn
    monkeypatch.setattr(awake, "_turn", lambda requests, aborted: asked.extend(requests) or turn(requests, aborted))
    kinds = [
        dataclasses.replace(cfg.val, temperature=t, top_p=p, top_k=k)
        for t, p, k in [(1.0, 1.0, 0), (0.7, 0.9, 5), (0.0, 0.5, 3)]
    ]
    wanted = [(kind, max_tokens, seed) for kind in kinds for max_tokens, seed in [(3, 11), (7, 2**62)]] * 2
    awake.drive([awake.generate([5, 6, 7], *want) for want in wanted])
    assert len(asked) == len(wanted) == 12 and len({id(params) for _, _, params in asked}) == 12
    for (kind, max_tokens, seed), (_, _, params) in zip(wanted, asked):
        whole = SamplingParams(
            temperature=kind.temperature,
            top_p=kind.top_p,
            top_k=kind.top_k,
            max_tokens=max_tokens,
            seed=seed,
            stop_token_ids=[tokenizer.eos_token_id],
            ignore_eos=False,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        engine = awake.llm.llm_engine
        whole = engine.input_processor.process_inputs(
            "1", {"prompt_token_ids": [5, 6, 7]}, whole, engine.get_supported_tasks()
        ).sampling_params
        assert {f: getattr(params, f) for f in params.__struct_fields__} == {
            f: getattr(whole, f) for f in whole.__struct_fields__
        }
        assert params.sampling_type == whole.sampling_type and params.all_stop_token_ids == whole.all_stop_token_ids


@pytest.mark.parametrize(
    "tokens, most, found",
    [
        ([], 1, "0 tokens, none, by 1"),
        ([5] * 36, 1, "36 tokens, ids 5 to 5, by 1"),
        ([5, 10**6, 6], 1, "3 tokens, ids 5 to 1000000, by 1"),
        ([5, -1, 6], 1, "3 tokens, ids -1 to 6, by 1"),
        ([5, 6], 0, "2 tokens, ids 5 to 6, by 0"),
    ],
)
def test_a_prompt_that_vllm_cannot_take_is_its_sessions_mistake_alone(cfg, awake, tokens, most, found):
    """vLLM itself would stop the run, look up rows that the embedding has not, or sample a token too many."""

    async def session():
        with pytest.raises(ValueError, match=f"can't continue {found}: vLLM takes 1 to 35 tokens of ids 0 to"):
            await awake.generate(tokens, cfg.rollout, most, 0)
        return (await awake.generate([5] * 35, cfg.rollout, 1, 0)).tokens

    assert [len(sampled) for sampled in awake.drive([session(), session()])] == [1, 1] and idle(awake)


def test_sessions_are_the_same_by_vllms_front_end_and_past_it(cfg, awake, monkeypatch):
    """Tokens, log-probs and ends; one is given up, one has a second turn. (vLLM's own scheduler has need of vLLM's front end.)"""

    async def session(seed):
        job = asyncio.ensure_future(awake.generate([5, 6, 7, seed], cfg.rollout, 12, seed))
        if seed == 20:
            await asyncio.sleep(0.001)
            job.cancel()
            return await asyncio.gather(job, return_exceptions=True) and None
        reply = await job
        return (
            [reply, await awake.generate([5, 6, 7, seed, *reply.tokens], cfg.rollout, 3, seed)] if seed == 21 else reply
        )

    def replies(past):
        with monkeypatch.context() as patch:
            patch.setattr(
                awake.llm.llm_engine,
                "add_request",
                lambda *args, real=awake.llm.llm_engine.add_request: added.append(args) or real(*args),
            )
            patch.setattr(awake, "past_front_end", past)
            with contextlib.nullcontext() if past else Schedule(awake, stock()):
                result, core = awake.drive([session(seed) for seed in range(10, 40)]), awake.llm.llm_engine.engine_core
                assert idle(awake)
                while (
                    core.engine_core.scheduler.has_requests()
                ):  # ended ones, that the model runner is to hear of from the scheduler that had them
                    core.get_output()
        return result

    added: list = []
    ours = replies(True)
    assert not added and {r.finish_reason for r in ours if hasattr(r, "finish_reason")} == {"stop", "length"}
    assert replies(False) == ours and len(added) >= 30


def test_only_waiting_for_tools_and_rewards_is_idle(cfg, awake, monkeypatch):
    """Sessions that start, and tasks that they start in their turn, keep the host at work: no tool is waited for."""

    async def works(task, policy, cfg):
        time.sleep(0.02)
        t = Trajectory(task)
        t.observe(policy.encode(task.messages))
        reply, _ = await asyncio.gather(policy.generate(t.tokens), asyncio.sleep(0))
        t.act(reply.tokens, reply.logprobs)
        return t

    async def waits(task, policy, cfg):
        await asyncio.sleep(0.2)
        return await works(task, policy, cfg)

    for agent, least, most in [(works, 0.0, 0.01), (waits, 0.15, 0.4)]:
        use_agent(monkeypatch, agent)
        run(awake, TASKS[:2], 0, cfg.rollout)
        assert least <= awake.idle_s <= most, agent.__name__


def make_groups(failures):
    """Groups of four sessions; of group i, failures[i] failed."""
    groups = []
    for i, failed in enumerate(failures):
        sessions = [make_trajectory(uid=str(i), session_id=s) for s in range(failed, 4)]
        groups.append(
            Group(
                TASKS[i],
                i,
                "failure" if failed else "finished",
                sessions,
                [f"traceback {i}.{s}" for s in range(failed)],
            )
        )
    return groups


def test_failed_groups_are_dropped_or_their_survivors_kept(cfg):
    def kept(policy):
        return [
            (g.index, len(g.trajectories))
            for g in usable(make_groups([0, 1, 0, 3, 0]), dataclasses.replace(cfg.rollout, failed_groups=policy))
        ]

    assert kept("drop") == kept("refill") == [(0, 4), (2, 4), (4, 4)]
    assert kept("survivors") == [
        (0, 4),
        (1, 3),
        (2, 4),
        (4, 4),
    ]  # one that is left alone has nothing to be compared with


def test_raise_stops_for_a_group_that_passed_its_deadline_too(cfg):
    with pytest.raises(RuntimeError, match="(?s)rollout.failed_groups=raise:.traceback 1.0"):
        check_groups(make_groups([0, 1, 0, 0, 0]), dataclasses.replace(cfg.rollout, failed_groups="raise"))


def test_refill_of_one_prompt_may_fail(cfg, awake, monkeypatch):
    """The share that failed is of the step's groups, not of each batch that fills it up."""
    tries = Counter()

    async def fails_twice(task, policy, cfg):
        tries[task.index] += 1
        if task.index == 12 and tries[12] <= 8:  # the group's four sessions, twice
            raise LookupError("not yet")
        return await single_turn_agent(task, policy, cfg)

    class Stream:
        def next_batch(self, size):
            return [TASKS[2]] if size == 1 else TASKS

    use_agent(monkeypatch, fails_twice)
    log = SimpleNamespace(add=lambda metrics: logged.update(metrics), failures=lambda name, groups: None)
    logged: dict = {}
    with knobs(awake, failed_groups="refill"):
        whole, awake.cfg = (
            awake.cfg,
            dataclasses.replace(awake.cfg, data=dataclasses.replace(awake.cfg.data, train_batch_size=6)),
        )
        run = SimpleNamespace(cfg=awake.cfg, engine=awake, scorer=Unscored(), stream=Stream(), log=log)
        run.actor = SimpleNamespace(device="cpu")
        trajectories = sample(run, 0)
        awake.cfg = whole
    assert len(trajectories) == 24 and logged["rollout/gen_batches"] == 3 and logged["rollout/groups_lost"] == 2


def test_too_many_failed_groups_stop_the_run_with_the_first_traceback(cfg):
    with pytest.raises(
        RuntimeError,
        match=r"(?s)3 of 5 groups failed, more than rollout.max_failed_fraction=0.5; the first:\ntraceback 1.0",
    ):
        check_groups(make_groups([0, 1, 1, 2, 0]), cfg.rollout)


def test_agent_may_return_several_outputs_and_branch(cfg, awake, monkeypatch):
    """Two continuations of one prefix, sampled side by side, and what each is followed by: four outputs of a session."""

    async def branches(task, policy, cfg):
        prompt = policy.encode(task.messages)
        outputs = []
        for reply in await asyncio.gather(*(policy.generate(prompt, max_tokens=4) for _ in range(2))):
            for _ in range(2):
                t = Trajectory(task, metrics={"branches": 2.0})
                t.observe(prompt)
                t.act(reply.tokens, reply.logprobs)
                more = await policy.generate(t.tokens, max_tokens=4)
                t.act(more.tokens, more.logprobs)
                outputs.append(t)
        return outputs

    use_agent(monkeypatch, branches)
    trajectories = run(awake, TASKS[:2], 0, cfg.rollout)
    assert all(t.score == 0.0 for t in trajectories)
    assert [(t.session_id, t.index) for t in trajectories[:16]] == [(s, i) for s in range(4) for i in range(4)]
    assert len({t.uid for t in trajectories}) == 2
    session = trajectories[:4]
    branch = [t.tokens[t.prompt_length : t.prompt_length + 4] for t in session]
    assert branch[0] == branch[1] and branch[2] == branch[3] and branch[0] != branch[2]
    assert len({tuple(t.tokens) for t in session}) == 4  # every call has a seed of its own
    assert [t.tokens for t in run(awake, TASKS[:2], 0, cfg.rollout)] == [t.tokens for t in trajectories]
