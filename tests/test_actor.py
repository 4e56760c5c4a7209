"""The actor and the reference on real FSDP2 (one rank, gloo): what they compute is what a plain model computes."""

import dataclasses
import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from gpu_ranks import gradient_difference, work
from transformers import AutoModelForCausalLM

from actor import Actor, ActorConfig, Reference, score, share_logprobs
from batch import Task, Trajectory, collate
from fsdp import make_accelerator, make_plugin
from loss import LossConfig
from model import forward, load_model, packed_attention

LOSS = LossConfig(loss_scale_factor=12.0)


def sequences(tokenizer, advantage=1.0, seed=0):
    """Trajectories of different lengths, one with a tool result in the middle."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(4, len(tokenizer), (n,), generator=random).tolist()  # noqa: E731
    out = []
    for i, turns in enumerate([[(5, 3)], [(2, 7)], [(9, 2), (4, 3)], [(1, 1)]]):
        t = Trajectory(Task("", "", ""), uid=str(i // 2), session_id=i % 2)
        for observed, sampled in turns:
            t.observe(draw(observed))
            t.act(draw(sampled), [-1.0] * sampled)
        t.score, t.loss_mask = 1.0, torch.tensor(t.response_mask, dtype=torch.bool)
        t.advantages = torch.where(t.loss_mask, advantage * (1 if i % 2 else -0.5), 0.0)
        out.append(t)
    return out


def plain_logprobs(path, trajectory, num_tokens, temperature):
    """Log-probs and entropies [L] by an untouched model, one sequence alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([trajectory.tokens])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :, :num_tokens] / temperature
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    own = logprobs[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    mask = torch.tensor(trajectory.response_mask[1:], dtype=torch.bool)
    zero = torch.zeros(1)
    return torch.cat([zero, torch.where(mask, own, 0.0)]), torch.cat([zero, torch.where(mask, entropy[:-1], 0.0)])


@pytest.mark.parametrize("name", ["model", "untied"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_forward_equals_one_forward_a_sequence(tiny, tokenizer, name, temperature):
    model = load_model(str(tiny / name), torch.float32, len(tokenizer), temperature)
    trajectories = sequences(tokenizer)
    batch = collate(trajectories)
    logprobs, entropy = forward(model, batch)
    expected = [plain_logprobs(tiny / name, t, len(tokenizer), temperature) for t in trajectories]
    torch.testing.assert_close(logprobs, torch.cat([e[0] for e in expected]), atol=2e-5, rtol=0)
    torch.testing.assert_close(entropy, torch.cat([e[1] for e in expected]), atol=2e-5, rtol=0)


def test_head_in_chunks_gives_the_same_values_and_gradients(tiny, tokenizer, monkeypatch):
    results = []
    for elements in (2**28, 128 * 3):  # all at once, three positions at a time
        monkeypatch.setattr("model.CHUNK_ELEMENTS", elements)
        model = load_model(str(tiny / "model"), torch.float32, len(tokenizer), 1.0)
        logprobs, entropy = forward(model, collate(sequences(tokenizer)))
        (logprobs.sum() + entropy.square().sum()).backward()
        results.append((logprobs, entropy, model.get_output_embeddings().weight.grad))
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_sliding_window_sees_only_its_window():
    batch = collate([trajectory for trajectory in sequences(range(90))])
    q, k, v = (torch.randn(1, 2, len(batch.tokens), 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    out = packed_attention(None, q, k, v, None, scaling=0.3, sliding_window=3, packing=batch)[0][0]  # [T, H, D]
    offset = torch.arange(len(batch.tokens))[:, None] - torch.arange(len(batch.tokens))[None]
    visible = (offset >= 0) & (offset < 3) & (batch.seq_ids[:, None] == batch.seq_ids[None])
    weights = torch.where(visible, 0.3 * q[0] @ k[0].transpose(1, 2), -torch.inf).softmax(-1)
    torch.testing.assert_close(out, (weights @ v[0]).transpose(0, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("reshard, gathers", [(None, 1), (False, 1), (True, 3)])
def test_one_gpu_gathers_its_weights_once_a_mini_batch(cfg, tokenizer, accelerator, monkeypatch, reshard, gathers):
    """And not for each of its micro-batches, unless told to; the gradient is the same."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    settings = dataclasses.replace(cfg.actor, reshard_after_forward=reshard, ppo_max_token_len_per_gpu=18)
    monkeypatch.setattr(accelerator.state, "fsdp_plugin", make_plugin(settings))
    actor = Actor(settings, accelerator, len(tokenizer), 1.0)
    gathered, gather = [], FSDPParamGroup._to_unsharded
    monkeypatch.setattr(FSDPParamGroup, "_to_unsharded", lambda group: gathered.append(id(group)) or gather(group))
    actor.start_step()
    assert len(actor.backward(sequences(tokenizer), LOSS).plan[0]) == 3
    assert {gathered.count(group) for group in gathered} == (
        {1} if gathers == 1 else {3, 6}
    )  # the last layer and the root stay for their backward
    norm = actor.gradient()[1]
    whole = dataclasses.replace(settings, ppo_max_token_len_per_gpu=1000)
    actor.cfg = whole
    actor.optimizer.zero_grad()
    actor.start_step()
    actor.backward(sequences(tokenizer), LOSS)
    assert actor.gradient()[1] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(
    "knobs, whole",
    [({}, True), ({"enable_gradient_checkpointing": True}, False), ({"reshard_after_forward": True}, False)],
)
def test_a_small_model_on_one_gpu_is_one_group_with_the_same_gradient(
    cfg, tokenizer, accelerator, monkeypatch, knobs, whole
):
    """Unless weights are to be freed between layers, or activations checkpointed: then each layer is one."""
    norms = []
    for settings in (
        dataclasses.replace(cfg.actor, **{"enable_gradient_checkpointing": False} | knobs),
        dataclasses.replace(cfg.actor, enable_gradient_checkpointing=True),
    ):
        monkeypatch.setattr(
            accelerator.state,
            "fsdp_plugin",
            make_plugin(settings, activation_checkpointing=settings.enable_gradient_checkpointing),
        )
        actor = Actor(settings, accelerator, len(tokenizer), 1.0)
        if not norms:
            assert [type(layer).__name__.startswith("FSDP") for layer in actor.model.model.layers] == [not whole] * 2
        actor.start_step()
        actor.backward(sequences(tokenizer), LOSS)
        norms.append(actor.gradient()[1])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_fsdp_is_active_with_one_process(actor):
    assert type(actor.model).__name__.startswith("FSDP")
    assert all(type(p).__name__ == "DTensor" for p in actor.model.parameters())


def test_dropout_is_off(actor):
    """A model that drops activations would score its own samples differently each time."""
    assert not any(module.training for module in actor.model.modules())


def weights_of(actor):
    return {name: tensor.clone() for name, tensor in actor.weights(torch.float32)}


def test_weights_come_once_with_hugging_face_names(tiny, actor):
    plain = dict(AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32).named_parameters())
    streamed = list(actor.weights(torch.float32))
    assert [name for name, _ in streamed] == list(plain)  # no wrapper in a name, the tied head not twice
    assert all(torch.equal(tensor, plain[name]) for name, tensor in streamed)


def test_no_grad_forward_before_a_step_leaves_no_stale_weights(tiny, tokenizer, actor):
    """accelerate leaves the last FSDP group gathered after a no-grad forward: a step after it would not reach the forward or the sync."""
    trajectories = sequences(tokenizer)
    logprobs, _ = forward(actor.model, collate(trajectories))
    actor.accelerator.backward(-logprobs.sum())
    before = actor.score(trajectories)
    actor.optimizer.param_groups[0]["lr"] = 0.1
    actor.optimizer_step()
    streamed = weights_of(actor)
    true = actor.accelerator.get_state_dict(actor.model)
    assert all(torch.equal(streamed[name], true[name]) for name in streamed)
    after = actor.score(trajectories)
    assert max(float((a - b).abs().max()) for a, b in zip(before, after)) > 0.1
    moved = load_model(str(tiny / "model"), torch.float32, len(tokenizer), 1.0)
    moved.load_state_dict(true)
    for ours, theirs in zip(after, score_plain(moved, trajectories)):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def score_plain(model, trajectories):
    with torch.no_grad():
        return forward(model, collate(trajectories))[0].split([len(t.tokens) for t in trajectories])


def test_update_raises_what_was_better_and_lowers_what_was_worse(tokenizer, actor):
    trajectories = sequences(tokenizer)
    metrics = actor.update(trajectories, LOSS, step=0, total_steps=10, seed=0)
    after = actor.score(trajectories)
    for t, logprobs in zip(trajectories, after):
        change = float((logprobs - t.old_logprobs).sum())
        assert change > 0 if t.advantages.sum() > 0 else change < 0
    assert metrics["actor/num_updates"] == 1 and metrics["actor/skipped_steps"] == 0
    assert metrics["actor/ratio"] == 1.0 and metrics["actor/pg_clipfrac"] == 0.0


def test_single_update_leaves_the_old_logprobs_that_scoring_would_have_given(tokenizer, actor):
    trajectories, again = sequences(tokenizer), sequences(tokenizer)
    scored = actor.score(again)
    actor.update(trajectories, LOSS, step=0, total_steps=10, seed=0)
    for t, logprobs in zip(trajectories, scored):
        torch.testing.assert_close(t.old_logprobs, logprobs, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "change",
    [
        {"ppo_max_token_len_per_gpu": 18},
        {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 1},
        {"enable_gradient_checkpointing": False},
    ],
)
def test_update_does_not_depend_on_micro_batches(cfg, tokenizer, accelerator, actor, change):
    first = sequences(tokenizer)
    metrics = actor.update(first, LOSS, step=0, total_steps=10, seed=0)
    other = Actor(dataclasses.replace(cfg.actor, **change), accelerator, len(tokenizer), 1.0)
    second = sequences(tokenizer)
    again = other.update(second, LOSS, step=0, total_steps=10, seed=0)
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        assert metrics[name] == pytest.approx(again[name], rel=1e-4, abs=1e-7), name
    for t, u in zip(first, second):
        torch.testing.assert_close(t.old_logprobs, u.old_logprobs, atol=1e-6, rtol=0)


def test_gradient_equals_a_plain_models(tiny, tokenizer, actor):
    trajectories = sequences(tokenizer)
    plain = load_model(str(tiny / "model"), torch.float32, len(tokenizer), 1.0)
    batch = collate(trajectories)
    logprobs, _ = forward(plain, batch)
    loss = (
        -torch.where(batch.loss_mask, (logprobs - logprobs.detach()).exp() * batch.advantages, 0.0).sum()
        / batch.loss_mask.sum()
    )
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
    metrics = actor.update(trajectories, LOSS, step=0, total_steps=10, seed=0)
    assert metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.fixture(scope="module")
def one_process(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_process")
    return work(1, "gradients", folder, tiny / "model")


@pytest.mark.slow
@pytest.mark.parametrize("ranks, fsdp_size, shard", [(2, 1, 128), (4, 2, 64)])
def test_copies_that_share_the_weights_in_parts_give_one_processs_gradient(
    tiny, tmp_path, one_process, ranks, fsdp_size, shard
):
    """HSDP, up to a whole copy on each rank: gradients, their norm over all shards of one copy, the weights after the step, and a checkpoint of it."""
    many = work(
        ranks,
        "gradients",
        tmp_path,
        tiny / "model",
        "--fsdp-size",
        str(fsdp_size),
        "--checkpoint",
        str(tmp_path / "run"),
    )
    difference = gradient_difference(one_process, many)
    assert many["shard"][0] == shard, "of the embedding's 128 rows"
    assert difference["gradient"] < 1e-5 and difference["grad_norm"] < 1e-5 and difference["logprobs_max"] < 1e-5, (
        difference
    )
    assert len(set(many["forwards"])) == 1 and many["same_weights"]
    assert many["metrics"]["perf/token_imbalance"] == pytest.approx(
        max(many["tokens"]) * ranks / sum(many["tokens"]) - 1
    )
    read = work(
        1, "state", tmp_path, tiny / "model", "--checkpoint", str(tmp_path / "run" / "checkpoints" / "step-000001")
    )
    assert read["bits"] == many["bits"] and read["optimizer"] == many["optimizer"]


@pytest.mark.parametrize("size", [0, -2])
def test_fsdp_size_that_is_no_number_of_gpus_is_refused(size):
    with pytest.raises(ValueError, match=f"actor.fsdp_size={size} must be -1 or at least 1"):
        ActorConfig(fsdp_size=size)


def test_fsdp_size_that_does_not_divide_the_processes_is_refused(accelerator):
    with pytest.raises(ValueError, match="actor.fsdp_size=2 does not divide the 1 processes"):
        make_accelerator(ActorConfig(fsdp_size=2))


def test_gradient_is_clipped_to_grad_clip(cfg, tokenizer, accelerator):
    """With SGD-like state (first Adam step) the size of the gradient does not show, so look at it just before the step."""
    actor = Actor(dataclasses.replace(cfg.actor, grad_clip=0.01), accelerator, len(tokenizer), 1.0)
    seen = []
    step = actor.optimizer.step
    actor.optimizer.step = lambda: (
        seen.append(math.sqrt(sum(float(p.grad.to_local().square().sum()) for p in actor.model.parameters()))),
        step(),
    )
    metrics = actor.update(sequences(tokenizer), LOSS, step=0, total_steps=10, seed=0)
    assert metrics["actor/grad_norm"] > 0.01
    assert seen == [pytest.approx(0.01, rel=1e-3)]


def test_gradient_that_is_not_finite_skips_the_step_and_is_counted(tokenizer, actor):
    trajectories = sequences(tokenizer)
    trajectories[0].advantages[-1] = float("nan")
    before = weights_of(actor)
    metrics = actor.update(trajectories, LOSS, step=0, total_steps=10, seed=0)
    assert metrics["actor/skipped_steps"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(actor).items())
    again = actor.update(sequences(tokenizer), LOSS, step=1, total_steps=10, seed=0)
    assert again["actor/skipped_steps"] == 0 and math.isfinite(again["actor/grad_norm"])


def test_learning_rate_is_that_of_the_step(cfg, tokenizer, accelerator):
    actor = Actor(
        dataclasses.replace(cfg.actor, lr=0.5, lr_warmup_steps=2, lr_scheduler_type="cosine"),
        accelerator,
        len(tokenizer),
        1.0,
    )
    before = weights_of(actor)
    assert actor.update(sequences(tokenizer), LOSS, step=0, total_steps=10, seed=0)["actor/lr"] == 0.0
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(actor).items())
    assert actor.update(sequences(tokenizer), LOSS, step=1, total_steps=10, seed=0)["actor/lr"] == 0.25


def test_mini_batches_are_whole_groups_in_order_or_shuffled_by_the_seed(cfg, tokenizer, actor):
    trajectories = [dataclasses.replace(t, uid=str(i // 2)) for i, t in enumerate(sequences(tokenizer) * 2)]
    actor.cfg = dataclasses.replace(cfg.actor, ppo_mini_batch_size=2, ppo_epochs=2)
    batches = [[t.uid for t in mini] for mini in actor.mini_batches(trajectories, "0/0")]
    assert batches == [["0", "0", "1", "1"], ["2", "2", "3", "3"]] * 2
    actor.cfg = dataclasses.replace(actor.cfg, shuffle=True)
    orders = {
        seed: [t.uid for mini in actor.mini_batches(trajectories, seed) for t in mini]
        for seed in ("0/0", "0/1", "0/2", "0/3")
    }
    assert len({tuple(order) for order in orders.values()}) > 1
    assert orders["0/0"] == [t.uid for mini in actor.mini_batches(trajectories, "0/0") for t in mini]
    assert all(sorted(order) == sorted("00112233" * 2) for order in orders.values())


@pytest.mark.parametrize("offload", [False, True])
def test_reference_is_the_initial_actor_and_stays(cfg, tokenizer, accelerator, actor, offload):
    reference = Reference(
        dataclasses.replace(cfg.ref, param_offload=offload), cfg.actor, accelerator, len(tokenizer), 1.0
    )
    trajectories = sequences(tokenizer)
    initial = reference.score(trajectories)
    for ours, theirs in zip(initial, actor.score(trajectories)):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    actor.update(trajectories, LOSS, step=0, total_steps=10, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(initial, reference.score(trajectories)))
    assert not torch.equal(torch.cat(actor.score(trajectories)), torch.cat(initial))


def test_log_probs_of_micro_batches_come_back_to_their_trajectories(accelerator):
    """Whatever the order within a micro-batch; one that a rank computed for the others' sake counts nowhere."""
    own = [
        ([2, 0], torch.tensor([20.0, 21.0, 22.0, 0.0])),
        ([], torch.tensor([9.0])),
        ([1], torch.tensor([10.0, 11.0])),
    ]
    assert [x.tolist() for x in share_logprobs(own, [1, 2, 3], "cpu")] == [[0.0], [10.0, 11.0], [20.0, 21.0, 22.0]]


def test_score_is_zero_where_nothing_was_sampled(tokenizer, actor):
    for t, logprobs in zip(sequences(tokenizer), score(actor.model, sequences(tokenizer), actor.cfg, actor.device)):
        mask = torch.tensor(t.response_mask, dtype=torch.bool)
        assert (logprobs[~mask] == 0).all() and (logprobs[mask] < 0).all()


COMPILED = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch
from torch._dynamo.utils import counters
from batch import collate
from fakes import make_trajectory
from model import forward, load_model
kinds = torch.float64, torch.float32, torch.float32
exact, plain, compiled = models = [load_model({path!r}, kind, 100, 0.7) for kind in kinds]
exact.double()  # its weights too
for layer in compiled.model.layers:  # as actor.speed_up does on a GPU
    layer.forward = torch.compile(layer.forward, dynamic=True)
for lengths in [(3, 9), (5, 2, 7), (1, 20, 4, 4), (30,), (2, 2, 2, 2, 2)]:
    trajectories = [make_trajectory(prompt=n, response=(1,) * n + (0, 1)) for n in lengths]
    for t in trajectories:
        t.tokens = [token % 90 for token in t.tokens]
    batch = collate(trajectories)
    grads = []
    for model in models:
        logprobs, entropy = forward(model, batch)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        grads.append((logprobs.detach(), *(p.grad.clone() for p in model.parameters())))
        model.zero_grad()
    # Sums in another order are as far from float64's as the plain ones are: some roundings of a float32, by whatever
    # vector instructions. What differs by more computes something else.
    for name, (true, a, b) in enumerate(zip(*grads)):
        rounding = torch.finfo(torch.float32).eps * true.norm()
        usual = max((a - true).norm(), 8 * rounding)
        assert (b - true).norm() <= 4 * usual, (lengths, name, float((b - true).norm() / usual))
print(counters["stats"]["unique_graphs"], len(counters["graph_break"]))
"""


@pytest.mark.slow
def test_compiled_layers_and_head_compute_the_same_in_one_graph_for_all_shapes(tiny, tmp_path):
    """In a process of its own: vLLM's CPU build needs compilation off."""
    script = COMPILED.format(root=str(ROOT), tests=str(ROOT / "tests"), path=str(tiny / "model"))
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    graphs, breaks = map(int, done.stdout.split())
    assert graphs <= 4 and breaks == 0, "a layer, the head, and each for a single sequence"
