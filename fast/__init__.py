"""Speed-ups: each does sooner what plain code in the root, in vLLM or in torch does. The root imports them only inside
the `if` of a knob; `trainer.plain` turns all of them off.

    file                   knobs
    scheduler.py           rollout.lean_scheduler
    cohort.py              rollout.lean_scheduler
    engine.py              rollout.lean_engine, rollout.lean_scheduler, rollout.lean_kernels, sync.replay_copies
    decoding.py            rollout.lean_kernels
    sampling.py            rollout.lean_kernels
    kernels.py             rollout.lean_kernels, actor.lean_kernels
    attention.py           actor.flash_attention, actor.share_prompts
    attention_kernels.py   actor.lean_kernels
    prompts.py             actor.share_prompts
    copies.py              sync.replay_copies
    offload.py             actor.optimizer_offload
"""
