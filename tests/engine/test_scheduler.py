"""fast/scheduler.py beside vLLM's own scheduler: the same tokens, log-probs and ends, request by request, in every order of events."""

import asyncio
import itertools
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]  # when it is run as a program
from conftest import ROOT, flags, launch_environment  # noqa: E402

from fast.cohort import Cohort  # noqa: E402

VAL = type("Sampling", (), {"temperature": 1.0, "top_p": 1.0, "top_k": 0})


class Schedule:
    """Puts a scheduler of the same settings into the engine's core, and its own back."""

    def __init__(self, engine, kind, asynchronous=False):
        self.core, self.kind, self.asynchronous = engine.llm.llm_engine.engine_core.engine_core, kind, asynchronous

    def __enter__(self):
        own = self.own = self.core.scheduler
        assert not own.has_requests()
        own.vllm_config.scheduler_config.async_scheduling = self.asynchronous
        self.core.scheduler = self.kind(
            vllm_config=own.vllm_config,
            kv_cache_config=own.kv_cache_config,
            structured_output_manager=own.structured_output_manager,
            include_finished_set=False,
            log_stats=False,
            block_size=own.block_size,
            hash_block_size=own.hash_block_size,
        )
        return self.core.scheduler

    def __exit__(self, *_):
        self.core.scheduler = self.own
        self.own.vllm_config.scheduler_config.async_scheduling = False


def play(engine, kind, sessions, few_blocks=None, few_seqs=None):
    """Replies of the sessions, with a scheduler of this kind; the tokens of each step, and the most preemptions of a request."""
    engine.past_front_end = kind is not stock()  # a request's one output, when it ends, is ours alone
    with Schedule(engine, kind) as schedules:
        preempted, steps = [0], []
        if few_seqs:
            schedules.max_num_running_reqs = schedules.max_num_active_reqs = few_seqs
        if few_blocks:  # what is taken from the pool leaves room for few sequences
            pool = schedules.kv_cache_manager.block_pool
            held = pool.get_new_blocks(pool.get_num_free_blocks() - few_blocks)
        preempt, schedule = schedules._preempt_request, schedules.schedule

        def counted(request, *args, **kwargs):
            preempted.append(request.num_preemptions + 1)
            return preempt(request, *args, **kwargs)

        def counting(*args, **kwargs):
            output = schedule(*args, **kwargs)
            steps.append(output.total_num_scheduled_tokens)  # fewer where the prefix cache had some
            return output

        schedules._preempt_request, schedules.schedule = counted, counting
        replies = engine.drive([session(engine) for session in sessions])
        if few_blocks:
            pool.free_blocks(held)
        assert not schedules.requests and schedules.kv_cache_manager.block_pool.get_num_free_blocks() == engine_blocks(
            engine
        ), "every block came back"
        return replies, steps, max(preempted)


def engine_blocks(engine):
    return (
        engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.num_blocks - 1
    )  # one is vLLM's own null block


def stock():
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler


def one_turn(prompt, max_tokens, seed):
    async def session(engine):
        reply = await engine.generate(prompt, VAL, max_tokens, seed)
        return reply.tokens, reply.logprobs, reply.finish_reason

    return session


def turns(prompt, num, seed):
    """Each turn's prompt is all that was before: found in the prefix cache, across blocks that decoding filled."""

    async def session(engine):
        tokens, said = list(prompt), []
        for turn in range(num):
            await asyncio.sleep(0)
            reply = await engine.generate(tokens, VAL, 30, seed + turn)
            tokens += [*reply.tokens, 5]
            said.append((reply.tokens, reply.logprobs, reply.finish_reason))
        return said

    return session


def given_up(prompt, seed, after):
    """Aborted after some turns of the engine."""

    async def session(engine):
        job = asyncio.ensure_future(engine.generate(prompt, VAL, 12, seed))
        for _ in range(after):
            await asyncio.sleep(0)
        job.cancel()
        return await asyncio.gather(job, return_exceptions=True) and None

    return session


def prompts(n, rng):
    return [
        [rng.randrange(5, 90) for _ in range(rng.choice([1, 3, 16, 100, 126, 127, 128, 129, 255, 257]))]
        for _ in range(n)
    ]


CASES = {
    "all decode": lambda rng: ([one_turn(p, 140, i) for i, p in enumerate(prompts(12, rng))], {}),
    "lengths of one to 150": lambda rng: (
        [one_turn(p, rng.choice([1, 2, 5, 149, 150]), i) for i, p in enumerate(prompts(20, rng))],
        {},
    ),
    "more than run at once": lambda rng: (
        [one_turn(p, rng.randrange(1, 60), i) for i, p in enumerate(prompts(20, rng))],
        {"few_seqs": 3},
    ),
    "one prompt, many sessions": lambda rng: ([one_turn(p, 60, i) for p in prompts(2, rng) for i in range(8)], {}),
    "turns": lambda rng: ([turns(p, 4, 100 * i) for i, p in enumerate(prompts(8, rng))], {}),
    "some are given up": lambda rng: (
        [
            *[one_turn(p, 12, i) for i, p in enumerate(prompts(6, rng))],
            *[given_up(p, i, i) for i, p in enumerate(prompts(9, rng))],
        ],
        {},
    ),
    "stop tokens": lambda rng: ([one_turn(p, 150, i) for i, p in enumerate(prompts(12, rng))], {}),
    "too few blocks": lambda rng: ([one_turn(p, 150, i) for i, p in enumerate(prompts(12, rng))], {"few_blocks": 9}),
}


STOPS = list(range(5, 40))


def ahead(engine, kind, seed: int, few_blocks: int):
    """What GPUs have and the CPU lacks: the next step is scheduled before the last one's tokens are there. A made-up model of 24 requests that come
    at different times, some given up. Returns each request's tokens, log-probs and end, the tokens of each step, and how many were preempted, and the blocks that the prefix cache was left with."""
    import numpy
    from vllm import SamplingParams
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    from fast.scheduler import OUTCOME

    with Schedule(engine, kind, asynchronous=True) as schedules:
        rng, pool, hasher = (
            random.Random(seed),
            schedules.kv_cache_manager.block_pool,
            engine.llm.llm_engine.engine_core.engine_core.request_block_hasher,
        )
        held = pool.get_new_blocks(pool.get_num_free_blocks() - few_blocks)
        waiting, given_up, at = {}, {}, {}
        for name in map(str, range(24)):
            most = rng.choice([1, 2, 60, 150, 430])
            params = SamplingParams(
                temperature=1.0,
                max_tokens=most,
                min_tokens=min(rng.choice([0, 0, 1, 40]), most),
                logprobs=0,
                stop_token_ids=rng.choice([[7], [], [*range(5, 12)]]),
            )
            prompt = [rng.randrange(5, 90) for _ in range(rng.choice([1, 100, 127, 128, 129, 250]))]
            waiting[name] = (
                rng.choice([0, 0, rng.randrange(40)]),
                Request(
                    request_id=name,
                    prompt_token_ids=prompt,
                    sampling_params=params,
                    pooling_params=None,
                    block_hasher=hasher,
                ),
            )
            if rng.random() < 0.2:
                given_up[name] = rng.randrange(1, 60)
        made, ended, steps, queue, preempted, step = {name: ([], []) for name in waiting}, {}, [], [], 0, 0
        while waiting or queue or schedules.has_requests():
            for name in [name for name, (when, _) in waiting.items() if when <= step]:
                schedules.add_request(waiting.pop(name)[1])
            for name in [name for name, when in given_up.items() if when == step]:
                schedules.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            step += 1
            if schedules.has_requests():
                output = schedules.schedule()
                names = list(output.num_scheduled_tokens)
                steps.append(sorted(output.num_scheduled_tokens.items()))
                preempted += len(output.preempted_req_ids or ())
                tokens = []
                for new in output.scheduled_new_reqs:
                    at[new.req_id] = new.num_computed_tokens, len(new.prompt_token_ids)
                resumed = dict(
                    zip(output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.num_computed_tokens)
                )
                for name in names:
                    place, whole = at[name]
                    if name in output.scheduled_cached_reqs.resumed_req_ids:
                        whole = len(schedules.requests[name]._all_token_ids)
                    place = resumed.get(name, place) + output.num_scheduled_tokens[name]
                    at[name] = place, whole
                    tokens.append([random.Random(f"{name}/{place}").randrange(5, 90)] if place >= whole else [])
                rows = len(names)
                logprobs = LogprobsLists(
                    numpy.zeros((rows, 1)),
                    numpy.array([[-float(at[name][0])] for name in names]).reshape(rows, 1),
                    numpy.zeros(rows),
                    None,
                )
                if names:
                    places = {name: i for i, name in enumerate(names)}
                    queue.append(
                        (
                            output,
                            ModelRunnerOutput(
                                req_ids=names,
                                req_id_to_index=places,
                                sampled_token_ids=tokens,
                                logprobs=logprobs,
                                prompt_logprobs_dict={},
                                pooler_output=[],
                            ),
                        )
                    )
            if queue and (len(queue) == 2 or not steps[-1] or not schedules.has_requests()):
                for of in schedules.update_from_output(*queue.pop(0)).values():
                    for o in of.outputs:
                        if o.kv_transfer_params:
                            made[o.request_id] = list(o.new_token_ids), list(o.kv_transfer_params[OUTCOME])
                        else:
                            made[o.request_id][0].extend(o.new_token_ids)
                            made[o.request_id][1].extend(o.new_logprobs.logprobs[:, 0].tolist())
                        if o.finish_reason is not None:
                            ended[o.request_id] = str(o.finish_reason), o.stop_reason
            assert step < 5000
        pool.free_blocks(held)
        assert pool.get_num_free_blocks() == engine_blocks(engine)
        cached = sum(block.block_hash is not None for block in pool.blocks)
        return {name: (made[name], how) for name, how in ended.items()}, steps, preempted, cached


def main(tiny: str, out: str) -> None:
    """Play every case with vLLM's scheduler and with ours, on an engine whose sequences are longer than the KV cache's blocks of 128 tokens."""
    from actor import Actor
    from config import load_config
    from fast.engine import LeanEngine
    from fsdp import make_accelerator
    from policy import load_tokenizer
    from sync_weights import sync_weights

    cfg = load_config(
        [
            *flags(Path(tiny)),
            "--data.max-prompt-length",
            "300",
            "--data.max-response-length",
            "150",
            "--actor.ppo-max-token-len-per-gpu",
            "512",
            "--rollout.max-num-seqs",
            "64",
        ]
    )
    tokenizer, accelerator = load_tokenizer(cfg.actor.path), make_accelerator(cfg.actor)
    engine = LeanEngine(cfg, tokenizer)
    from fast.scheduler import lean_scheduler

    sync_weights(Actor(cfg.actor, accelerator, len(tokenizer), 1.0), engine, cfg.sync, [])
    played, kinds, own_stops = {}, {"vLLM's": stock(), "ours": lean_scheduler(False)}, engine.stop_token_ids
    short = kinds["ours"].short = []
    real = kinds["ours"].decode_output
    kinds["ours"].decode_output = lambda self, names, *rest: (
        short.append((len(names), self.cohort is not None)) or real(self, names, *rest)
    )
    taken, in_vain = kinds["ours"].schedule_cohort, []

    def taking(self):
        new, output = self.cohort.scheduled == 0, taken(self)
        return in_vain.append(1) if new and output is None else output

    kinds["ours"].schedule_cohort = taking
    for case in CASES:
        for name, kind in kinds.items():
            short.clear()
            engine.stop_token_ids = STOPS if case == "stop tokens" else own_stops
            sessions, knobs = CASES[case](random.Random(case))
            played[case, name] = (*play(engine, kind, sessions, **knobs), list(short))
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    for seed, few_blocks in itertools.product(range(8), (200, 60, 12)):
        Cohort.AHEAD = 1 + 3 * (seed % 2)
        for name, kind in {"vLLM's": AsyncScheduler, "ours": lean_scheduler(True)}.items():
            played[f"ahead {seed} {few_blocks}", name] = ahead(engine, kind, seed, few_blocks)
    engine.stop_token_ids = own_stops
    sessions, _ = CASES["all decode"](random.Random(0))
    short.clear()
    play(engine, kinds["ours"], sessions, few_blocks=60)
    played["few blocks"] = len(in_vain), list(short)
    Path(out).write_bytes(pickle.dumps(played))
    os._exit(0)


@pytest.fixture(scope="module")
def played(tiny, tmp_path_factory):
    """(replies, tokens of each step, most preemptions, requests of each short step) by case and scheduler. In a process of its own: a second engine ends the first one's groups."""
    out = tmp_path_factory.mktemp("played") / "out.pickle"
    done = subprocess.run(
        [sys.executable, __file__, str(tiny), str(out)],
        cwd=ROOT,
        env=launch_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads(out.read_bytes())


@pytest.mark.parametrize("case", CASES)
def test_same_tokens_log_probs_and_ends(played, case):
    theirs, steps, preempted, _ = played[case, "vLLM's"]
    ours, our_steps, our_preempted, _ = played[case, "ours"]
    assert ours == theirs and our_steps == steps and any(theirs)
    assert our_preempted == preempted and (preempted > 0) == (case == "too few blocks")


@pytest.mark.parametrize("few_blocks", [200, 60, 12])
@pytest.mark.parametrize("seed", range(8))
def test_the_same_when_steps_are_scheduled_ahead(played, seed, few_blocks):
    (theirs, steps, preempted, cached), (ours, our_steps, our_preempted, ours_cached) = (
        played[f"ahead {seed} {few_blocks}", name] for name in ("vLLM's", "ours")
    )
    assert ours == theirs and our_steps == steps and our_preempted == preempted
    assert few_blocks < 200 or ours_cached == cached > 10, "blocks that decoding filled are found by later prompts"
    assert len(theirs) > 15 and (preempted > 0) == (few_blocks == 12)


def test_steady_decoding_takes_the_short_way(played):
    """Otherwise the test above compares vLLM with itself."""
    _, steps, _, short = played["all decode", "ours"]
    assert len(short) >= len(steps) - 2 and max(short)[0] >= 11
    assert sum(together for _, together in short) > 0.9 * len(short), "the cohort's steps"
    assert not played["all decode", "vLLM's"][3]


def test_no_cohort_is_made_where_blocks_are_too_few_for_one(played):
    """To make one and give it up in every other step would take longer than the loop."""
    in_vain, short = played["few blocks"]
    assert in_vain == 0 and len(short) > 100 and not any(together for _, together in short)


def test_tokens_that_went_round_a_cohorts_ring_come_back_in_order():
    request = SimpleNamespace(
        request_id="1",
        num_computed_tokens=3,
        _output_token_ids=[],
        num_output_placeholders=0,
        max_tokens=99,
        sampling_params=SimpleNamespace(eos_token_id=None, stop_token_ids=[]),
    )
    cohort, given, known = Cohort([request], block_size=4, longest=200), [], 0
    for step in range(1, 100):
        cohort.tokens[0, cohort.done % cohort.width] = step
        cohort.done += 1
        if step % 7 == 0:
            given += cohort.taken(cohort.tokens[0], known)
            known = step
    assert len(given) > 3 * cohort.width and given == list(range(1, len(given) + 1))


def test_stop_token_ends_a_request(played):
    replies = played["stop tokens", "ours"][0]
    assert {reason for _, _, reason in replies} == {"stop"} and all(
        tokens[-1] in STOPS and not {*tokens[:-1]} & {*STOPS} for tokens, _, _ in replies
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
