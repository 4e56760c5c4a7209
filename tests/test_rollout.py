"""Sessions through real vLLM: seeds, finish reasons, log-probs, the token ids that exist, and agents of one or more turns."""
import asyncio
import dataclasses

import pytest

import agent as agents
from agent import session_seed, single_turn_agent, stop_token_ids
from batch import Task, Trajectory
from rollout import ValConfig
from sync_weights import sync_weights

TASKS = [Task([{"role": "user", "content": f"{n}+7="}], "exact", "", index=n) for n in range(10, 16)]


@pytest.fixture
def awake(cfg, engine, actor):
    sync_weights(actor, engine, cfg.sync, [])
    return engine


def key(t):
    return t.uid, t.session_id, t.index


def test_trajectories_come_in_submission_order_with_their_keys(cfg, awake):
    trajectories = awake.run(TASKS, 3, cfg.rollout)
    assert [t.task.index for t in trajectories] == [task.index for task in TASKS for _ in range(4)]
    assert [t.session_id for t in trajectories] == [0, 1, 2, 3] * len(TASKS)
    assert len({t.uid for t in trajectories}) == len(TASKS)
    assert {t.weight_version for t in trajectories} == {0} and {t.num_turns for t in trajectories} == {1}


def test_prompt_is_rendered_and_not_trained_on(cfg, awake, tokenizer):
    for t in awake.run(TASKS[:2], 0, cfg.rollout):
        rendered = tokenizer.apply_chat_template(t.task.messages, add_generation_prompt=True, return_dict=False)
        assert t.tokens[: len(rendered)] == rendered
        assert t.response_mask == [0] * len(rendered) + [1] * (len(t.tokens) - len(rendered))
        assert all(lp == 0.0 for lp in t.rollout_logprobs[: len(rendered)]) and all(lp < 0 for lp in t.rollout_logprobs[len(rendered) :])


def test_sessions_differ_and_repeat_whatever_is_sampled_beside_them(cfg, awake):
    """The model's generation_config says top_k=1: were it used, the sessions of a prompt would be equal."""
    together = awake.run(TASKS, 5, cfg.rollout)
    assert len({tuple(t.tokens) for t in together[:4]}) == 4
    alone = awake.run(TASKS[:1], 5, cfg.rollout)
    assert [(key(t), t.tokens) for t in alone] == [(key(t), t.tokens) for t in together[:4]]
    assert [t.tokens for t in awake.run(TASKS[:1], 6, cfg.rollout)] != [t.tokens for t in alone]  # another step, other seeds


def test_same_row_twice_in_a_batch_is_two_prompts(cfg, awake):
    trajectories = awake.run([TASKS[0], TASKS[0]], 0, cfg.rollout)
    assert len({t.uid for t in trajectories}) == 2
    assert len({tuple(t.tokens) for t in trajectories}) == 8


def test_no_two_sessions_share_a_seed():
    seeds = {session_seed(0, kind, step, prompt, session) for kind in ("train", "val") for step in range(20) for prompt in range(50) for session in range(8)}
    assert len(seeds) == 2 * 20 * 50 * 8 and all(0 <= seed < 2**63 for seed in seeds)


def test_finish_reason_is_vllms_and_the_end_token_is_the_policys(cfg, awake, tokenizer):
    trajectories = awake.run(TASKS * 8, 0, cfg.rollout)
    reasons = {t.finish_reason for t in trajectories}
    assert reasons == {"stop", "length"}
    for t in trajectories:
        if t.finish_reason == "stop":
            assert t.tokens[-1] == tokenizer.eos_token_id and t.response_mask[-1] == 1
        else:
            assert t.response_length == cfg.data.max_response_length and tokenizer.eos_token_id not in t.tokens[t.prompt_length :]


def test_ids_past_the_tokenizer_are_never_sampled(cfg, awake, tokenizer, actor):
    """The padded rows of this model's embedding would get about a quarter of all samples; here the likeliest of all."""
    assert awake.model.config.vocab_size > len(tokenizer)
    sampled = [x for t in awake.run(TASKS * 8, 0, cfg.rollout) for x in t.tokens[t.prompt_length :]]
    assert len(sampled) > 1000 and max(sampled) < len(tokenizer)


def test_rollout_logprobs_are_the_actors_at_any_temperature(cfg, awake, tokenizer, actor):
    sampling = dataclasses.replace(cfg.rollout, temperature=0.6)
    trajectories = awake.run(TASKS[:2], 0, sampling)
    actor.model.get_output_embeddings().temperature = 0.6
    for t, logprobs in zip(trajectories, actor.score(trajectories)):
        assert logprobs.tolist() == pytest.approx(t.rollout_logprobs, abs=1e-4)


def test_greedy_validation_gives_one_answer(awake):
    trajectories = awake.run(TASKS[:2], 0, ValConfig(n=3))
    assert len({tuple(t.tokens) for t in trajectories}) == 2


def test_end_tokens_are_the_tokenizers_and_the_models(tiny, tokenizer):
    assert stop_token_ids(str(tiny / "model"), tokenizer) == [tokenizer.eos_token_id]
    assert stop_token_ids(str(tiny), tokenizer) == [tokenizer.eos_token_id]  # a folder without a generation_config


def test_every_end_token_ends_a_turn(cfg, awake, tokenizer, monkeypatch):
    """A chat model's generation_config lists more of them than its tokenizer has."""
    letters = [tokenizer.convert_tokens_to_ids(c) for c in "abcdefghij"]
    monkeypatch.setattr(awake, "stop_token_ids", [tokenizer.eos_token_id, *letters])
    responses = [t.tokens[t.prompt_length :] for t in awake.run(TASKS * 8, 0, cfg.rollout)]
    assert any(r[-1] in letters for r in responses)
    assert not any(x in letters for r in responses for x in r[:-1])


def use_agent(monkeypatch, agent):
    monkeypatch.setitem(agents.AGENTS, "single_turn_agent", agent)


def test_agent_of_two_turns_keeps_every_token(cfg, awake, monkeypatch):
    async def twice(task, policy, cfg):
        t = Trajectory(task)
        t.observe(policy.encode(task.messages))
        for turn in range(2):
            reply = await policy.generate(t.tokens, max_tokens=4)
            t.act(reply.tokens, reply.logprobs)
            t.observe([5, 6])
        return t

    use_agent(monkeypatch, twice)
    trajectories = awake.run(TASKS[:2], 0, cfg.rollout)
    assert all(t.num_turns == 2 for t in trajectories)
    for t in trajectories:
        turns = "".join(map(str, t.response_mask)).strip("0").split("00")
        assert len(turns) == 2 and all(set(turn) == {"1"} for turn in turns)


def test_slow_session_delays_only_itself(cfg, awake, monkeypatch):
    ended = []

    async def slow_first(task, policy, cfg):
        t = await single_turn_agent(task, policy, cfg)
        if task.index == 10:
            await asyncio.sleep(1.0)
            reply = await policy.generate(t.tokens)
            t.act(reply.tokens, reply.logprobs)
        ended.append(task.index)
        return t

    use_agent(monkeypatch, slow_first)
    trajectories = awake.run(TASKS, 0, dataclasses.replace(cfg.rollout, n=1))
    assert ended[-1] == 10 and [t.task.index for t in trajectories] == [task.index for task in TASKS]


def test_agent_that_raises_ends_the_rollout_with_its_error_and_leaves_the_engine_usable(cfg, awake, monkeypatch):
    async def broken(task, policy, cfg):
        if task.index == 12:
            raise KeyError("no such tool")
        return await single_turn_agent(task, policy, cfg)

    with monkeypatch.context() as patch:
        use_agent(patch, broken)
        with pytest.raises(KeyError, match="no such tool"):
            awake.run(TASKS, 0, cfg.rollout)
    assert not awake.llm.llm_engine.has_unfinished_requests()
    assert len(awake.run(TASKS, 0, cfg.rollout)) == 24


def test_prompt_longer_than_allowed_names_the_row_and_both_lengths(cfg, awake):
    task = Task([{"role": "user", "content": "1+" * 30}], "exact", "", index=77)
    with pytest.raises(ValueError, match=r"row 77 has \d+ tokens, more than data.max_prompt_length=24"):
        awake.run([task], 0, cfg.rollout)
