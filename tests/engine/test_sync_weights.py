"""The weights reach vLLM, and a sync that lies stops the run and names what is wrong. Real vLLM, real FSDP."""

import dataclasses
import gc
from types import SimpleNamespace

import pytest
import torch
from test_actor import LOSS, sequences

from batch import Task
from fast.copies import Copies
from rollout import Rollout
from sync_weights import SyncConfig, SyncError, bit_sum, probe_is_due, sync_weights, tolerances

PROMPTS = [Task([{"role": "user", "content": f"{n}+1="}], "exact", "") for n in range(10, 14)]


def train_once(actor, tokenizer):
    actor.optimizer.param_groups[0]["lr"] = 1e-2
    actor.update(sequences(tokenizer), LOSS, step=actor.version, total_steps=100, seed=0)


def test_vllm_agrees_with_the_actor_after_every_sync(cfg, tokenizer, engine, actor):
    for step in range(3):
        metrics = sync_weights(actor, engine, cfg.sync, PROMPTS)
        assert metrics["sync/probe_diff_max"] < 1e-4
        assert engine.weight_version == step
        engine.sleep()
        train_once(actor, tokenizer)


def test_sum_of_bits_is_of_the_whole_tensor(monkeypatch):
    tensor = torch.arange(-50, 50, dtype=torch.float32).view(10, 10).bfloat16()
    whole = int(tensor.view(torch.int16).sum(dtype=torch.int64))
    for at_once in (1, 7, 100, 1000):
        monkeypatch.setattr("sync_weights.SUMMED_AT_ONCE", at_once)
        assert int(bit_sum(tensor)) == int(bit_sum(tensor.t())) == whole


def test_sum_of_bits_of_many_tensors_is_that_of_each(monkeypatch):
    """Small ones are added up together, of two types too."""
    tensors = [
        torch.randn(n, 3, generator=torch.Generator().manual_seed(n)).to(dtype)
        for n in (1, 2, 40, 7, 30)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    each = sum(int(t.view({2: torch.int16, 4: torch.int32}[t.element_size()]).long().sum()) for t in tensors)
    for at_once in (1, 7, 100, 1000):
        monkeypatch.setattr("sync_weights.SUMMED_AT_ONCE", at_once)
        assert int(bit_sum(*tensors)) == each


def loads(engine, monkeypatch):
    """The numbers of tensors that vLLM's own loader is given from now on, in one call each; and nothing is noted yet."""
    monkeypatch.setattr(engine, "copies", Copies())
    real, calls = engine.model.load_weights, []

    def counted(weights):
        calls.append(0)

        def each():
            for weight in weights:
                calls[-1] += 1
                yield weight

        return real(each())

    monkeypatch.setattr(engine.model, "load_weights", counted)
    return calls


def held(engine):
    return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


@pytest.mark.parametrize("at_once", [1, 5000, 2**23])
def test_a_later_sync_does_vllms_copies_without_its_loader(cfg, tokenizer, engine, actor, monkeypatch, at_once):
    """Of new weights, whatever is copied at once; what vLLM holds is what its own loader makes of them."""
    monkeypatch.setattr("sync_weights.SUMMED_AT_ONCE", at_once)
    calls = loads(engine, monkeypatch)
    sync_weights(actor, engine, cfg.sync, [])
    before = held(engine)
    for _ in range(2):
        engine.sleep()
        train_once(actor, tokenizer)
        sync_weights(actor, engine, cfg.sync, PROMPTS)
    assert calls == [len(list(actor.model.parameters()))]
    copied = held(engine)
    engine.model.load_weights(actor.weights(engine.dtype))
    loaded = held(engine)
    assert all(
        torch.equal(copied[name], loaded[name]) and not torch.equal(copied[name], before[name]) for name in loaded
    )


def test_a_wrong_copy_is_found_by_its_bits(cfg, tokenizer, engine, actor, monkeypatch):
    loads(engine, monkeypatch)
    sync_weights(actor, engine, cfg.sync, [])
    [key] = [key for key in engine.copies.places if key[0] == "model.layers.1.self_attn.v_proj.weight"]
    [(parameter, into, *part)] = engine.copies.places[key]
    engine.copies.places[key] = [(parameter, into.clone(), *part)]
    engine.sleep()
    train_once(actor, tokenizer)
    with pytest.raises(
        SyncError,
        match=r"vLLM holds other bits.*1 of the actor's tensors were different: model.layers.1.self_attn.v_proj.weight",
    ):
        sync_weights(actor, engine, cfg.sync, [])
    reset(engine)


def test_a_tensor_of_another_form_goes_through_vllms_loader(cfg, engine, actor, monkeypatch):
    calls = loads(engine, monkeypatch)
    sync_weights(actor, engine, cfg.sync, [])
    engine.sleep()
    with_stream(actor, monkeypatch, lambda ws: ((n, w.t().contiguous().t() if "down_proj" in n else w) for n, w in ws))
    sync_weights(actor, engine, cfg.sync, PROMPTS)
    assert calls[1:] == [2]  # one a layer, in one batch


@pytest.mark.parametrize("does", ["copies", "adds", "sums up", "clears first"])
def test_parts_of_a_tensor_land_where_the_loader_put_them_unless_it_does_more(does):
    """A slice of it here, the rest turned round there. What the loader makes of a tensor beside copies, copies alone would leave behind."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.top, self.turned, self.calls, self.total = (
                torch.nn.Parameter(torch.zeros(2, 3)),
                torch.nn.Parameter(torch.zeros(3, 2)),
                0,
                None,
            )

        @torch.no_grad()
        def load_weights(self, weights):
            self.calls += 1
            if does == "clears first":
                self.top.zero_()
            for _, w in weights:
                self.top.copy_(w[:2])
                self.turned[:, :].copy_(w[2:].t())
                if does == "adds":
                    self.top.add_(1)
                if does == "sums up":
                    self.total = w.sum()
            return {"top", "turned"}

    model, copies = Model(), Copies()
    for n in range(3):
        whole = torch.arange(40.0).view(8, 5)[2:6, 1:4] + n  # a view, as parts of FSDP's are
        assert copies.load(model, [("whole", whole)], lambda: None) == {"top", "turned"}
        assert torch.equal(model.top, whole[:2] + (does == "adds")) and torch.equal(model.turned, whole[2:].t())
        assert does != "sums up" or model.total == whole.sum()
    assert model.calls == (1 if does == "copies" else 3)


def test_parameters_that_share_memory_are_left_to_the_loader():
    """Where one is, both are: which was written could not be said."""
    model = torch.nn.Module()
    model.a, model.b = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(0))
    model.b.data = model.a.data[:2]
    calls = []

    @torch.no_grad()
    def load_weights(weights):
        calls.append(1)
        for _, w in weights:
            model.a.copy_(w)
        return {"a", "b"}

    model.load_weights, copies = load_weights, Copies()
    for n in range(3):
        assert copies.load(model, [("a", torch.arange(4.0) + n)], lambda: None) == {"a", "b"} and model.b.tolist() == [
            n,
            n + 1,
        ]
    assert len(calls) == 3


@pytest.mark.parametrize("way", ["changes", "keeps"])
def test_a_loader_that_does_more_than_copies_loads_every_stream(cfg, engine, actor, monkeypatch, way):
    """One that makes tensors of its own of what it gets, or writes when it has seen all; the stream's own work is not the loader's."""
    calls = loads(engine, monkeypatch)
    real = engine.model.load_weights
    monkeypatch.setattr(
        engine.model, "load_weights", lambda ws: real(((n, w.clone()) for n, w in ws) if way == "changes" else list(ws))
    )
    for _ in range(3):
        sync_weights(actor, engine, cfg.sync, [])
        engine.sleep()
    assert calls == [len(list(actor.model.parameters()))] * 3


def test_copies_are_noted_anew_when_a_parameter_has_moved(cfg, tokenizer, engine, actor, monkeypatch):
    calls = loads(engine, monkeypatch)
    sync_weights(actor, engine, cfg.sync, [])
    for _ in range(2):
        engine.sleep()
        if len(calls) == 1:
            moved = engine.model.get_parameter("model.layers.0.mlp.down_proj.weight")
            moved.data = moved.data.clone()
        train_once(actor, tokenizer)
        sync_weights(actor, engine, cfg.sync, PROMPTS)
    assert len(calls) == 2


@pytest.mark.parametrize("touches, times", [("a buffer", 1), ("a parameter", 3), ("a tensor", 3)])
def test_what_follows_on_loading_is_left_out_only_when_no_parameter_is_in_it(
    cfg, engine, actor, monkeypatch, touches, times
):
    """vLLM makes other forms of some models' weights then, which must follow the weights; of most it does nothing but to set constants, in buffers that it keeps over a sleep."""
    loads(engine, monkeypatch)
    weight, tensor, done = engine.model.get_parameter("model.norm.weight"), torch.zeros(()), []
    monkeypatch.setitem(engine.model._buffers, "scale", torch.zeros(()))

    def finish(llm):
        (tensor if touches == "a tensor" else engine.model.scale).fill_(1.0)
        done.append(weight.detach().float() * 2 if touches == "a parameter" else None)

    monkeypatch.setattr("fast.engine.finish_loading", finish)
    for _ in range(3):
        sync_weights(actor, engine, cfg.sync, [])
        engine.sleep()
    assert len(done) == times


def test_no_probe_no_generation(cfg, engine, actor):
    assert sync_weights(actor, engine, cfg.sync, []) == {}


@pytest.mark.parametrize(
    "every, held, version, due",
    [
        (0, None, 0, True),
        (0, None, 7, True),
        (3, None, 7, True),
        (0, 0, 0, False),
        (0, 5, 6, False),
        (3, 5, 6, True),
        (3, 6, 7, False),
    ],
)
def test_probe_is_due_at_the_first_sync_of_an_engine_and_every_so_many_steps(every, held, version, due):
    """A resumed run's first sync, at step 7 here, is its engine's first too."""
    actor, engine = SimpleNamespace(version=version), SimpleNamespace(weight_version=held)
    assert probe_is_due(actor, engine, SyncConfig(verify_every=every)) == due


def test_probe_that_is_not_due_generates_nothing(cfg, engine, actor, monkeypatch):
    monkeypatch.setattr(engine, "weight_version", None)
    for sync, due in [(SyncConfig(verify_every=0), True), (SyncConfig(verify_every=0), False), (SyncConfig(), True)]:
        assert bool(sync_weights(actor, engine, sync, PROMPTS)) == due
        engine.sleep()


def test_moments_make_room_before_vllm_wakes(cfg, engine, actor, monkeypatch):
    events, wake_weights = [], engine.wake_weights
    monkeypatch.setattr(actor, "moments", SimpleNamespace(offload=lambda: events.append("offload")))
    monkeypatch.setattr(engine, "wake_weights", lambda: (events.append("wake"), wake_weights()))
    sync_weights(actor, engine, cfg.sync, [])
    assert events == ["offload", "wake"]


def test_without_replayed_copies_vllms_loader_takes_every_stream(cfg, tokenizer, engine, actor, monkeypatch):
    """sync.replay_copies off: what vLLM holds is proven the same way."""
    calls = loads(engine, monkeypatch)
    monkeypatch.setattr(engine, "copies", None)
    for _ in range(2):
        sync_weights(actor, engine, cfg.sync, PROMPTS)
        engine.sleep()
        train_once(actor, tokenizer)
    assert calls == [len(list(actor.model.parameters()))] * 2


def test_a_sleep_does_not_stop_when_another_process_takes_memory_of_the_gpu(cfg, engine, actor, monkeypatch):
    """vLLM asserts, after it slept, that more is free than before. It also collects garbage, which is left to Python, and empties torch's cache."""
    sync_weights(actor, engine, cfg.sync, [])
    free = iter([100, 40])
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (next(free), 100))
    collect, empty, slept = gc.collect, torch.cuda.empty_cache, []

    def sleep(level):
        before = torch.accelerator.get_memory_info()[0]
        assert torch.accelerator.get_memory_info()[0] >= before, "Memory usage increased after sleeping."
        slept.append((level, gc.collect is collect, torch.cuda.empty_cache is empty))

    monkeypatch.setattr(engine.llm, "sleep", sleep)
    monkeypatch.setattr(engine, "sleeps", True)
    engine.sleep()
    assert (slept, engine.state) == ([(2, False, False)], "asleep")
    assert (
        gc.collect is collect and torch.cuda.empty_cache is empty and torch.accelerator.get_memory_info() == (100, 100)
    )  # as they were


def test_torch_gives_back_what_it_keeps_for_the_update_only_when_vllm_needs_it(cfg, engine, actor, monkeypatch):
    """Before vLLM's weights wake, and again before its cache does: another process may have taken memory in between."""
    free, asleep, events = [0], [0], []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[0] * 2**30, 140 * 2**30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("emptied"))
    monkeypatch.setattr("fast.engine.asleep_bytes", lambda: asleep[0] * 2**30)
    monkeypatch.setattr(engine.llm, "wake_up", lambda tags: events.append(tags[0]))
    monkeypatch.setattr(engine, "sleeps", True)
    for (free[0], asleep[0]), state, wake, expected in [
        ((53, 50), "asleep", engine.wake_weights, ["weights"]),
        ((51, 50), "asleep", engine.wake_weights, ["emptied", "weights"]),
        ((53, 49), "loading", lambda: engine.wake_cache(0), ["kv_cache"]),
        ((50, 49), "loading", lambda: engine.wake_cache(0), ["emptied", "kv_cache"]),
    ]:
        engine.state = state
        wake()
        assert events == expected, (free, asleep)
        events.clear()
    monkeypatch.setattr(engine, "state", "asleep")


def test_only_the_right_order_is_possible(cfg, engine, actor):
    with pytest.raises(RuntimeError, match="vLLM is asleep"):
        Rollout(engine, None, 0, cfg.rollout).run(PROMPTS)  # a skipped sync
    with pytest.raises(RuntimeError, match="vLLM is asleep"):
        engine.load_weights([])
    with pytest.raises(RuntimeError, match="vLLM is asleep"):
        engine.wake_cache(0)
    with pytest.raises(RuntimeError, match="vLLM is asleep"):
        engine.sleep()
    engine.wake_weights()
    with pytest.raises(RuntimeError, match="vLLM is loading"):
        Rollout(engine, None, 0, cfg.rollout).run(PROMPTS)
    with pytest.raises(RuntimeError, match="vLLM is loading"):
        engine.wake_weights()
    engine.load_weights(actor.weights(engine.dtype))
    engine.wake_cache(0)
    with pytest.raises(RuntimeError, match="vLLM is awake"):
        engine.load_weights([])


def with_stream(actor, monkeypatch, change):
    """The next stream of the actor's weights passes through `change`; later ones do not."""
    whole = actor.weights

    def stream(dtype):
        monkeypatch.setattr(actor, "weights", whole)
        return change(whole(dtype))

    monkeypatch.setattr(actor, "weights", stream)


def test_sync_without_a_whole_parameter_names_it(cfg, engine, actor, monkeypatch):
    with_stream(actor, monkeypatch, lambda ws: ((n, w) for n, w in ws if n != "model.layers.1.mlp.down_proj.weight"))
    with pytest.raises(
        SyncError, match=r"1 of vLLM's \d+ parameters were not written: model.layers.1.mlp.down_proj.weight"
    ):
        sync_weights(actor, engine, cfg.sync, PROMPTS)
    reset(engine)


def test_sync_without_a_part_of_a_fused_parameter_names_it(cfg, tokenizer, engine, actor, monkeypatch):
    """vLLM says that qkv_proj was written when q and v were: the bits say that k was not."""
    sync_weights(actor, engine, cfg.sync, [])
    engine.sleep()
    train_once(actor, tokenizer)
    with_stream(actor, monkeypatch, lambda ws: ((n, w) for n, w in ws if n != "model.layers.0.self_attn.k_proj.weight"))
    with pytest.raises(
        SyncError, match=r"1 of the actor's tensors were different: model.layers.0.self_attn.k_proj.weight"
    ):
        sync_weights(actor, engine, cfg.sync, [])
    reset(engine)


def test_tensor_sent_twice_is_named(cfg, engine, actor, monkeypatch):
    with_stream(actor, monkeypatch, lambda ws: ((n, w) for n, w in ws for _ in range(1 + (n == "model.norm.weight"))))
    with pytest.raises(SyncError, match="sent twice to vLLM: model.norm.weight"):
        sync_weights(actor, engine, cfg.sync, PROMPTS)
    reset(engine)


def test_tensor_changed_after_the_bits_were_compared_is_found_by_the_probe(cfg, engine, actor, monkeypatch):
    wake_cache = engine.wake_cache

    def corrupt(version):
        engine.model.get_parameter("model.layers.1.mlp.down_proj.weight").data.mul_(-3.0)
        wake_cache(version)

    monkeypatch.setattr(engine, "wake_cache", corrupt)
    with pytest.raises(
        SyncError,
        match=r"worst .* at token \d+, position \d+ of probe \d+: vLLM .*, actor .*model.layers.1.mlp.down_proj.weight \(by up to",
    ):
        sync_weights(actor, engine, cfg.sync, PROMPTS)


def test_other_temperature_than_the_samplers_is_found_by_the_probe(cfg, engine, actor):
    actor.model.get_output_embeddings().temperature = 0.5
    with pytest.raises(SyncError, match="Every tensor in vLLM equals the actor's, so the two compute differently"):
        sync_weights(actor, engine, cfg.sync, PROMPTS)


def test_stale_weights_of_one_update_are_found(cfg, tokenizer, engine, actor, monkeypatch):
    """A sync that sends the weights of before the update: what vLLM holds is what was sent, and the probe disagrees."""
    old = [(n, w.clone()) for n, w in actor.weights(torch.float32)]
    train_once(actor, tokenizer)
    with_stream(actor, monkeypatch, lambda ws: [list(ws), old][1])
    with pytest.raises(SyncError, match="disagree on the probe.*of the actor's tensors were different"):
        sync_weights(actor, engine, cfg.sync, PROMPTS)


def reset(engine):
    """Back to sleep after a sync that stopped half-way."""
    engine.state = "awake"


def test_probe_allows_what_it_is_told_to(cfg, engine, actor):
    with pytest.raises(SyncError, match="allowed 1e-12"):
        sync_weights(actor, engine, dataclasses.replace(cfg.sync, max_logprob_diff=1e-12), PROMPTS)


def test_tolerances_go_by_type_and_device_and_give_way_to_the_knobs():
    """vLLM multiplies float32 matrices in TF32 on a GPU: 1e-3 there would stop a healthy run."""
    assert tolerances(SyncConfig(), torch.float32, "cpu") == (1e-3, pytest.approx(1e-4))
    assert tolerances(SyncConfig(), torch.float32, "cuda") == (0.05, pytest.approx(0.005))
    assert tolerances(SyncConfig(), torch.bfloat16, "cuda") == (1.0, pytest.approx(0.1))
    assert tolerances(SyncConfig(max_logprob_diff=0.5, mean_logprob_diff=0.2), torch.bfloat16, "cuda") == (0.5, 0.2)
    with pytest.raises(ValueError, match="sync.max_logprob_diff=0.0 must be above 0"):
        SyncConfig(max_logprob_diff=0.0)
