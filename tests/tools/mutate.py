"""Do the tests notice? Seeded bugs, each a replacement in one line, and the test that must catch it: `make mutate`.

The repository is copied, one bug at a time is put into the copy, and the named test must fail, or take far longer than without it: a rank
that waits for another is caught too. Prints a table; exits 1 when a bug survives. Words after the command choose bugs: `python tests/tools/mutate.py seed actor.py`.
"""

import collections
import contextlib
import ctypes
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path

import psutil
import pytest
import torch  # noqa: F401 - once, here: every test runs in a fork of this process, which imports none of the repository

ROOT = Path(__file__).resolve().parents[2]
STARTS_S, SLOWER = (
    90,
    4,
)  # seconds for a test with a bug in it: to start up in, and so many times what it takes without one
SHARED_MEMORY = Path("/dev/shm")
Bug = collections.namedtuple("Bug", "what file old new test")

RATIO = "(torch.where(mask, logprobs, 0.0) - torch.where(mask, old_logprobs, 0.0)).clamp(-20, 20)"
GAP = "d = log_ratio(old_logprobs, rollout_logprobs, mask).detach()"
RANKS = "test_proofs.py::test_the_gradient_does_not_depend_on_the_ranks"
CUT = "test_proofs.py::test_the_gradient_does_not_depend_on_the_cut"
SCORES = "await self.score(trajectories)"
WAIT = "self.num_ended = getattr(self, 'num_ended', 0) + 1\n        while self.num_ended < self.num_expected:\n            await asyncio.sleep(0.01)\n        "
TENSOR_PARALLEL = "test_train.py::test_two_ranks_that_share_a_vllm_sample_what_one_samples"
FORWARD = "test_actor.py::test_packed_forward_equals_one_forward_a_sequence"

BUGS = [
    Bug(
        "micro-batch's own totals",
        "actor.py",
        "loss_cfg, totals)",
        "loss_cfg, count_totals([mini_batch[i] for i in indices or [0]]))",
        "test_actor.py::test_update_does_not_depend_on_micro_batches",
    ),
    Bug(
        "token-mean over the micro-batch",
        "loss.py",
        "mask / max(totals.tokens, 1)\n",
        "mask / mask.sum().clamp(min=1)\n",
        CUT,
    ),
    Bug("sequences of the micro-batch", "loss.py", "[seq_ids] / max(totals.seqs, 1)", "[seq_ids] / num_seqs", CUT),
    Bug(
        "factor world size dropped",
        "actor.py",
        "backward(loss * dist.get_world_size())",
        "backward(loss)",
        RANKS + "[2]",
    ),
    Bug(
        "rank without work trains",
        "actor.py",
        "batch.loss_mask = torch.zeros_like(batch.loss_mask)",
        "pass",
        RANKS + "[3]",
    ),
    Bug("shift off by one", "model.py", "batch.position_ids, sampled - 1", "batch.position_ids, sampled", FORWARD),
    Bug(
        "temperature forgotten",
        "model.py",
        "[:, :num_tokens].float() / scale)",
        "[:, :num_tokens].float() / 1)",
        FORWARD,
    ),
    Bug(
        "padding of the vocabulary in the softmax",
        "model.py",
        "scaled = (logits[:, :num_tokens].float() / scale)",
        "scaled = (logits.float() / scale)",
        FORWARD,
    ),
    Bug(
        "head: a chunk's gradient of the weight lost",
        "model.py",
        "grad_weight.addmm_(logits.T, h)",
        "torch.mm(logits.T, h)",
        "test_kernels.py::test_head_gives_log_probs_entropies_and_gradients",
    ),
    Bug(
        "head: the entropy's gradient without its mean",
        "model.py",
        "grad_entropy * (scaled - mean)",
        "grad_entropy * scaled",
        "test_kernels.py::test_head_gives_log_probs_entropies_and_gradients",
    ),
    Bug(
        "kernel: padding takes part in the softmax",
        "fast/kernels.py",
        'x = tl.load(logits_at, mask=ids < num_tokens, other=-float("inf")).to(tl.float32)\n    x = tl.maximum',
        'x = tl.load(logits_at, mask=ids < num_tokens + 7, other=-float("inf")).to(tl.float32)\n    x = tl.maximum',
        "test_kernels.py::test_triton_kernels_compute_what_torch_does",
    ),
    Bug(
        "kernel: a sequence's last tile attends past its end",
        "fast/decoding.py",
        "tl.where((t < end)[None, :], tl.dot(q, k) * scale, LOWEST)",
        "tl.dot(q, k) * scale",
        "test_kernels.py::test_triton_kernels_compute_what_torch_does",
    ),
    Bug(
        "kernel: a head of another group",
        "fast/decoding.py",
        "(head * G + m)[:, None]",
        "(head + m)[:, None]",
        "test_kernels.py::test_triton_kernels_compute_what_torch_does",
    ),
    Bug(
        "backward kernel: a query sees past itself",
        "fast/attention_kernels.py",
        "p = tl.where(keys[None, :] <= limit[:, None], p, 0.0)",
        "p = tl.where(keys[None, :] < end, p, 0.0)",
        "test_attention_kernels.py::test_backward_gives_what_autograd_does",
    ),
    Bug(
        "backward kernel: taken for another card's",
        "fast/attention_kernels.py",
        " or torch.cuda.get_device_capability(q.device)[0] != 9",
        "",
        "test_attention_kernels.py::test_backward_serves_what_it_was_written_for",
    ),
    Bug(
        "backward kernel: responses give a prompt's keys nothing",
        "fast/attention_kernels.py",
        "num = own + tl.cdiv(other_end - other, step)",
        "num = own",
        "test_attention_kernels.py::test_backward_gives_what_autograd_does",
    ),
    Bug(
        "sampler: a token's neighbour",
        "fast/sampling.py",
        "(inner <= before * inner[:, -1:])",
        "(inner < before * inner[:, -1:] + 0.01)",
        "test_kernels.py::test_sampled_tokens_follow_their_probabilities",
    ),
    Bug(
        "sampler: one random number for a whole sequence",
        "fast/sampling.py",
        "seeds + (positions + 1) * GOLDEN",
        "seeds + GOLDEN",
        "test_kernels.py::test_a_token_follows_from_its_logits_seed_and_position_alone",
    ),
    Bug(
        "sampler: top_p forgotten",
        "fast/sampling.py",
        "(states.top_p.np[rows] != 1)",
        "False",
        "test_kernels.py::test_vllm_samples_what_is_cut_or_has_more_to_tell",
    ),
    Bug(
        "decode kernel: a sliding window forgotten",
        "fast/decoding.py",
        "layer.sliding_window == (-1, -1)",
        "True",
        "test_kernels.py::test_decode_kernel_serves_what_it_knows_and_nothing_else",
    ),
    Bug(
        "torch keeps its memory when vLLM needs it",
        "fast/engine.py",
        "< asleep_bytes() + SPARE",
        "< SPARE",
        "test_sync_weights.py::test_torch_gives_back_what_it_keeps_for_the_update_only_when_vllm_needs_it",
    ),
    Bug(
        "log-probs put back in another order",
        "actor.py",
        "torch.arange(starts[i], starts[i + 1]) for i in indices",
        "torch.arange(starts[i], starts[i + 1]) for i in sorted(indices)",
        "test_actor.py::test_log_probs_of_micro_batches_come_back_to_their_trajectories",
    ),
    Bug(
        "positions not reset",
        "batch.py",
        "torch.arange(len(seq_ids)) - cu_seqlens[seq_ids]",
        "torch.arange(len(seq_ids))",
        "test_batch.py::test_collate_puts_sequences_end_to_end",
    ),
    Bug(
        "tool tokens trained on",
        "batch.py",
        "self._append(tokens, 0, ",
        "self._append(tokens, 1, ",
        "test_batch.py::test_observe_and_act_write_the_docstrings_example",
    ),
    Bug(
        "uid without the step",
        "batch.py",
        "repr(key)",
        "repr((key[0], *key[2:]))",
        "test_batch.py::test_prompt_uids_differ_in_every_part_and_do_not_run_together",
    ),
    Bug(
        "submission order lost",
        "batch.py",
        "items[first : (rank + 1) * len(items) // world_size]",
        "items[rank::world_size]",
        "test_batch.py::test_rank_shares_are_the_whole_in_order_and_even",
    ),
    Bug(
        "token budget not kept",
        "batch.py",
        "if held + lengths[i] <= max_tokens:",
        "if True:",
        "test_batch.py::test_pack_holds_its_promises_on_random_lengths",
    ),
    Bug(
        "min and max flipped",
        "loss.py",
        "torch.maximum(plain, clipped)",
        "torch.minimum(plain, clipped)",
        "test_loss.py::test_clipping_is_asymmetric_and_one_sided",
    ),
    Bug(
        "clip low and high swapped",
        "loss.py",
        "-advantages * ratio.clamp(1 - low, 1 + high)",
        "-advantages * ratio.clamp(1 - high, 1 + low)",
        "test_proofs.py::test_golden_policy_loss",
    ),
    Bug(
        "dual clip dropped",
        "loss.py",
        "torch.where(dual, -advantages * dual_clip, loss)",
        "loss",
        "test_loss.py::test_dual_clip_bounds_negative_advantages_only",
    ),
    Bug(
        "gspo: gradient of the mean too",
        "loss.py",
        "mask), mask, seq_ids).detach()",
        "mask), mask, seq_ids)",
        "test_proofs.py::test_finite_differences_agree_with_the_gradient_of_the_loss",
    ),
    Bug(
        "cispo: not clipped",
        "loss.py",
        "-clipped * advantages * logprobs",
        "-ratio * advantages * logprobs",
        "test_loss.py::test_cispo_by_hand",
    ),
    Bug(
        "sapo: temperatures swapped",
        "loss.py",
        "advantages > 0, cfg.tau_pos, cfg.tau_neg",
        "advantages > 0, cfg.tau_neg, cfg.tau_pos",
        "test_loss.py::test_sapo_by_hand",
    ),
    Bug(
        "geo_mean: clip not sign-aware",
        "loss.py",
        "torch.where(advantages > 0, d.clamp(max=high), d.clamp(min=-low))",
        "d.clamp(-low, high)",
        "test_loss.py::test_geo_mean_by_hand",
    ),
    Bug(
        "dppo_tv: wrong side masked",
        "loss.py",
        "moved <= high, moved >= -low",
        "moved >= -low, moved <= high",
        "test_loss.py::test_dppo_tv_by_hand",
    ),
    Bug(
        "gpg: sign",
        "loss.py",
        "return -advantages * logprobs, {}",
        "return advantages * logprobs, {}",
        "test_proofs.py::test_one_step_raises_what_was_good_and_lowers_what_was_bad",
    ),
    Bug(
        "entropy bonus: sign",
        "loss.py",
        "total - cfg.entropy_coeff",
        "total + cfg.entropy_coeff",
        "test_loss.py::test_entropy_bonus_lowers_the_loss",
    ),
    Bug(
        "KL: sign",
        "loss.py",
        "(ref_logprobs - logprobs).clamp",
        "(logprobs - ref_logprobs).clamp",
        "test_loss.py::test_kl_by_hand",
    ),
    Bug(
        "KL: gradient of k3+ is k3's",
        "loss.py",
        "value = with_gradient + (value - with_gradient).detach()",
        "pass",
        "test_proofs.py::test_finite_differences_agree_with_the_gradient_of_kl",
    ),
    Bug(
        "loss * mask",
        "loss.py",
        "return torch.where(mask, x, 0.0)",
        "return x * mask",
        "test_proofs.py::test_what_masked_positions_hold_does_not_matter",
    ),
    Bug(
        "ratio * mask",
        "loss.py",
        RATIO,
        "((logprobs - old_logprobs) * mask).clamp(-20, 20)",
        "test_loss.py::test_log_ratio_is_zero_at_masked_positions_whatever_they_hold",
    ),
    Bug(
        "first ratio against vLLM's log-probs",
        "loss.py",
        "logprobs.detach() if batch.old",
        "batch.rollout_logprobs if batch.old",
        "test_proofs.py::test_the_first_update_has_ratio_one",
    ),
    Bug(
        "loss over all tokens",
        "loss.py",
        "    mask = batch.loss_mask\n",
        "    mask = torch.ones_like(batch.loss_mask)\n",
        "test_proofs.py::test_observations_have_no_gradient",
    ),
    Bug(
        "correction inverted",
        "loss.py",
        GAP,
        "d = log_ratio(rollout_logprobs, old_logprobs, mask).detach()",
        "test_proofs.py::test_golden_rollout_correction",
    ),
    Bug(
        "correction not detached",
        "loss.py",
        GAP,
        GAP.removesuffix(".detach()"),
        "test_proofs.py::test_golden_rollout_correction",
    ),
    Bug(
        "correction not truncated",
        "loss.py",
        "d.exp().clamp(max=cfg.rollout_is_threshold)",
        "d.exp()",
        "test_proofs.py::test_golden_rollout_correction",
    ),
    Bug(
        "rejected tokens in the denominator",
        "loss.py",
        "int(t.loss_mask.sum()) for t in trajectories]",
        "sum(t.response_mask) for t in trajectories]",
        "test_loss.py::test_rejected_tokens_leave_numerator_and_denominator",
    ),
    Bug(
        "rejection by the sum of a sequence",
        "loss.py",
        "gap[t.loss_mask].mean()",
        "gap[t.loss_mask].sum()",
        "test_loss.py::test_rejected_tokens_and_sequences_leave_the_mask",
    ),
    Bug(
        "biased std",
        "advantage.py",
        "(squares / (n - 1).clamp(min=1)).sqrt()",
        "(squares / n.clamp(min=1)).sqrt()",
        "test_advantage.py::test_golden_through_compute_advantages",
    ),
    Bug(
        "rloo: no leave-one-out",
        "advantage.py",
        "(s.sum(1, keepdim=True) - s) / (n - 1).clamp(min=1)",
        "s.sum(1, keepdim=True) / n.clamp(min=1)",
        "test_advantage.py::test_golden_through_compute_advantages",
    ),
    Bug(
        "opo: length ignored",
        "advantage.py",
        "length = mask.sum(-1)",
        "length = mask.any(-1)",
        "test_advantage.py::test_golden_through_compute_advantages",
    ),
    Bug(
        "NaN scores counted in the mean",
        "advantage.py",
        "valid, valid.sum(1, keepdim=True)",
        "valid, valid.sum(1, keepdim=True) * 0 + valid.shape[1]",
        "test_advantage.py::test_nan_scores_get_nothing_and_change_nothing",
    ),
    Bug(
        "unscorable trajectories in the loss",
        "advantage.py",
        "counts = trajectory.scored and",
        "counts = True and",
        "test_advantage.py::test_set_loss_mask_is_the_response_mask_of_what_has_a_score",
    ),
    Bug(
        "equal groups not zeroed",
        "advantage.py",
        "advantages[equal] = 0.0",
        "pass",
        "test_advantage.py::test_equal_scores_teach_exactly_nothing",
    ),
    Bug(
        "whitened over all positions",
        "advantage.py",
        "chosen = values[mask]",
        "chosen = values.flatten()",
        "test_advantage.py::test_reinforce_plus_plus_by_hand",
    ),
    Bug(
        "observations discount",
        "advantage.py",
        "torch.ones_like(scores).masked_fill(mask, gamma)",
        "torch.full_like(scores, gamma)",
        "test_advantage.py::test_reinforce_plus_plus_by_hand",
    ),
    Bug(
        "passk: gap to the mean",
        "advantage.py",
        "top.values[:, -1:], 0.0)",
        "group_mean(s, n), 0.0)",
        "test_advantage.py::test_grpo_passk_by_hand",
    ),
    Bug(
        "remax: baseline added",
        "advantage.py",
        "t.score - t.baseline",
        "t.score + t.baseline",
        "test_advantage.py::test_remax_by_hand",
    ),
    Bug(
        "first output stands for the session",
        "batch.py",
        "sorted(group, key=lambda t: t.index)",
        "sorted(group, key=lambda t: -t.index)",
        "test_advantage.py::test_the_last_output_stands_for_its_session",
    ),
    Bug(
        "overlong penalty: sign",
        "advantage.py",
        "t.score -= penalty",
        "t.score += penalty",
        "test_advantage.py::test_overlong_responses_are_punished_by_hand",
    ),
    Bug(
        "complete responses masked as truncated",
        "advantage.py",
        'trajectory.finish_reason == "length"',
        'trajectory.finish_reason != "length"',
        "test_advantage.py::test_truncated_responses_leave_loss_and_baseline_when_asked_to",
    ),
    Bug(
        "score on the last token, sampled or not",
        "advantage.py",
        "np.where(mask, np.arange(len(mask)), -1)",
        "np.arange(len(mask))",
        "test_advantage.py::test_the_score_sits_on_the_last_sampled_token",
    ),
    Bug(
        "warm-up off by one",
        "actor.py",
        "return step / cfg.lr_warmup_steps",
        "return (step + 1) / cfg.lr_warmup_steps",
        "test_loss.py::test_golden_lr_factor",
    ),
    Bug(
        "data position lost",
        "data.py",
        '"position": self.position}',
        '"position": 0}',
        "test_data.py::test_resume_continues_where_it_stopped",
    ),
    Bug(
        "every epoch in the same order",
        "data.py",
        '{self.seed}/{self.epoch}"',
        '{self.seed}"',
        "test_data.py::test_an_epoch_hands_out_every_row_once_and_drops_the_rest",
    ),
    Bug(
        "a shared prompt's keys get no gradient from responses",
        "fast/attention.py",
        "dk[:n] += more_dk",
        "pass",
        "test_prompts.py::test_attention_to_a_shared_prompt_and_its_gradients",
    ),
    Bug(
        "shared prompt: predicted from the wrong place",
        "model.py",
        "batch.shared.places[before]",
        "before",
        "test_prompts.py::test_log_probs_entropies_and_gradients_are_those_of_prompts_of_their_own",
    ),
    Bug(
        "shared prompt counted for every session",
        "fast/prompts.py",
        "sizes[-1] += response",
        "sizes[-1] += len(trajectories[i].tokens)",
        "test_prompts.py::test_an_update_is_the_same_with_shared_prompts",
    ),
    Bug(
        "stale head (no reshard)",
        "fsdp.py",
        "module.reshard()",
        "pass",
        "test_actor.py::test_no_grad_forward_before_a_step_leaves_no_stale_weights",
    ),
    Bug(
        "gradient not clipped",
        "actor.py",
        "min(1.0, self.cfg.grad_clip / (norm + 1e-6))",
        "1.0",
        "test_actor.py::test_gradient_is_clipped_to_grad_clip",
    ),
    Bug(
        "gradient that is not finite applied",
        "actor.py",
        "        if math.isfinite(norm):",
        "        if True:",
        "test_actor.py::test_gradient_that_is_not_finite_skips_the_step_and_is_counted",
    ),
    Bug("dropout left on", "actor.py", "self.model.eval()", "self.model.train()", "test_actor.py::test_dropout_is_off"),
    Bug(
        "seed shared by a prompt's sessions",
        "rollout.py",
        "session_seed(*key, session_id)",
        "session_seed(*key)",
        "test_rollout.py::test_sessions_differ_and_repeat_whatever_is_sampled_beside_them",
    ),
    Bug(
        "end-of-turn token dropped",
        "fast/engine.py",
        "(o.request_id, o.new_token_ids, o.kv_transfer_params[OUTCOME], ",
        "(o.request_id, o.new_token_ids[:-1], o.kv_transfer_params[OUTCOME][:-1], ",
        "test_rollout.py::test_finish_reason_is_vllms_and_the_end_token_is_the_policys",
    ),
    Bug(
        "ids past the tokenizer allowed",
        "engine.py",
        "logits[..., num_tokens:] = -torch.inf",
        "pass",
        "test_rollout.py::test_ids_past_the_tokenizer_are_never_sampled",
    ),
    Bug(
        "log-probs before the temperature",
        "engine.py",
        '"processed_logprobs"',
        '"raw_logprobs"',
        "test_rollout.py::test_rollout_logprobs_are_the_actors_at_any_temperature",
    ),
    Bug(
        "any order of sleep and wake",
        "engine.py",
        "if self.state != expected:",
        "if False:",
        "test_sync_weights.py::test_only_the_right_order_is_possible",
    ),
    Bug(
        "sync skipped",
        "fast/engine.py",
        "self.copies.load(self.model, weights, lambda: finish_loading(self.llm))",
        "[list(weights), set(dict(self.model.named_parameters()))][1]",
        "test_sync_weights.py::test_vllm_agrees_with_the_actor_after_every_sync",
    ),
    Bug(
        "bits not compared",
        "sync_weights.py",
        "    if differs:\n",
        "    if False:\n",
        "test_sync_weights.py::test_sync_without_a_part_of_a_fused_parameter_names_it",
    ),
    Bug(
        "no probe after the first sync",
        "sync_weights.py",
        "actor.version % cfg.verify_every == 0",
        "False",
        "test_sync_weights.py::test_probe_is_due_at_the_first_sync_of_an_engine_and_every_so_many_steps",
    ),
    Bug(
        "sync: a part of a tensor copied elsewhere",
        "fast/copies.py",
        "part.storage_offset() - whole.storage_offset()",
        "0",
        "test_sync_weights.py::test_parts_of_a_tensor_land_where_the_loader_put_them_unless_it_does_more",
    ),
    Bug(
        "sync: parameters that moved are not noted anew",
        "fast/copies.py",
        "if parameters == self.parameters and self.only_copies:",
        "if self.parameters and self.only_copies:",
        "test_sync_weights.py::test_copies_are_noted_anew_when_a_parameter_has_moved",
    ),
    Bug(
        "sync: a loader that does more than copies is passed by",
        "fast/copies.py",
        "if changes or made_of_it:",
        "if made_of_it:",
        "test_sync_weights.py::test_parts_of_a_tensor_land_where_the_loader_put_them_unless_it_does_more",
    ),
    Bug(
        "sync: what a loader makes of a tensor is left behind",
        "fast/copies.py",
        "if changes or made_of_it:",
        "if changes:",
        "test_sync_weights.py::test_parts_of_a_tensor_land_where_the_loader_put_them_unless_it_does_more",
    ),
    Bug(
        "sync: what follows on loading is always left out",
        "fast/copies.py",
        "self.finish_again |= on_parameter or",
        "self.finish_again |=",
        "test_sync_weights.py::test_what_follows_on_loading_is_left_out_only_when_no_parameter_is_in_it",
    ),
    Bug(
        "prompts past the front end are not looked at",
        "engine.py",
        "if not 0 < len(tokens) <= longest or",
        "if False and",
        "test_rollout.py::test_a_prompt_that_vllm_cannot_take_is_its_sessions_mistake_alone",
    ),
    Bug(
        "requests share a seed with the first of their kind",
        "fast/engine.py",
        "params.max_tokens, params.seed = max_tokens, seed",
        "params.max_tokens = max_tokens",
        "test_rollout.py::test_requests_ask_for_what_vllms_front_end_makes_of_them",
    ),
    Bug(
        "starting the sessions counts as waiting",
        "engine.py",
        "for _ in range(4):",
        "for _ in range(1):",
        "test_rollout.py::test_only_waiting_for_tools_and_rewards_is_idle",
    ),
    Bug(
        "any partial credit is correct",
        "metrics.py",
        "value >= 1 - 1e-9",
        "value > 0",
        "test_metrics.py::test_part_credit_is_not_correct_and_acc_decides_where_there_is_one",
    ),
    Bug(
        "failed validation sessions left out",
        "metrics.py",
        "[[wrong if math.isnan(value) else value for value in row] for row in prompts]",
        "[[value for value in row if not math.isnan(value)] or [wrong] for row in prompts]",
        "test_metrics.py::test_failed_and_unscored_sessions_are_wrong_and_counted",
    ),
    Bug(
        "checkpoint's bytes not compared",
        "host/disk.py",
        "if hash_of(path) != digest:",
        "if False:",
        "test_checkpoint.py::test_torn_checkpoint_is_passed_over_with_one_line_and_never_loaded",
    ),
    Bug(
        "checkpoint named before it is on the disk",
        "host/disk.py",
        "    for path in paths:\n        flush(path)\n",
        "",
        "test_checkpoint.py::test_all_of_it_is_on_the_disk_before_it_has_its_name",
    ),
    Bug(
        "best checkpoint pruned",
        "checkpoint.py",
        "if old.name != best:",
        "if True:",
        "test_checkpoint.py::test_best_is_named_and_never_pruned",
    ),
    Bug(
        "a group of knobs that may change is refused",
        "checkpoint.py",
        'getattr(knobs, "may_change", False)',
        "False",
        "test_checkpoint.py::test_knobs_that_a_resumed_run_may_change",
    ),
    Bug(
        "another learning rate passes for the same run",
        "checkpoint.py",
        'lr_goes_by_steps = config.actor.lr_scheduler_type != "constant"',
        "lr_goes_by_steps = False",
        "test_checkpoint.py::test_more_steps_are_another_run_when_the_learning_rate_goes_by_them",
    ),
    Bug(
        "made rows differ by process",
        "tasks/procedural.py",
        'os.environ | {"PYTHONHASHSEED": "0"}',
        "os.environ",
        "test_data.py::test_every_task_loads_and_is_the_same_in_every_process",
    ),
    Bug(
        "validation made of training's rows",
        "tasks/procedural.py",
        "first < start + count and start < first + size",
        "first == start",
        "test_data.py::test_validation_may_not_hold_rows_of_training",
    ),
    Bug(
        "group of a failed session kept",
        "rollout.py",
        '"failure" if group.errors else "finished"',
        '"finished"',
        "test_rollout.py::test_failed_session_fails_its_group_only_and_keeps_its_error",
    ),
    Bug(
        "scores wait for all sessions",
        "rollout.py",
        SCORES,
        WAIT + SCORES,
        "test_rollout.py::test_finished_session_is_scored_while_others_generate",
    ),
    Bug(
        "a lone survivor is a group",
        "rollout.py",
        "at_least = 2 if cfg",
        "at_least = 1 if cfg",
        "test_rollout.py::test_failed_groups_are_dropped_or_their_survivors_kept",
    ),
    Bug(
        "cancelled session goes on in vLLM",
        "engine.py",
        "self.to_abort.append(name)",
        "pass",
        "test_rollout.py::test_cancelled_session_leaves_vllm",
    ),
    Bug(
        "metrics rewritten in place",
        "host/disk.py",
        'write_durably(path, "".join(to_json(',
        'path.write_text("".join(to_json(',
        "test_resume.py::test_kill_while_metrics_are_rewritten_loses_none",
    ),
    Bug(
        "followers not told of aborts",
        "engine.py",
        "self.ranks.broadcast_object(orders)",
        "self.ranks.broadcast_object((orders[0], []))",
        "test_train.py::test_sessions_given_up_leave_the_vllm_that_ranks_share",
    ),
    Bug(
        "followers add no requests",
        "engine.py",
        "self.ranks.broadcast_object(orders)",
        "self.ranks.broadcast_object(([], orders[1]))",
        TENSOR_PARALLEL,
    ),
    Bug(
        "replicated parameters counted by every rank",
        "sync_weights.py",
        "torch.where(whole, shards[0], shards.sum(0))",
        "shards.sum(0)",
        TENSOR_PARALLEL,
    ),
    Bug(
        "tool's text may hold special tokens",
        "tasks/chat.py",
        "if any(content[m.start() : m.start() + len(token)])",
        "if False",
        "test_agent.py::test_no_text_of_a_tool_becomes_a_special_token",
    ),
    Bug(
        "budget not shared by turns",
        "policy.py",
        "data.max_response_length - used",
        "data.max_response_length",
        "test_agent.py::test_budget_is_shared_by_turns_and_observations",
    ),
    Bug(
        "observation that leaves no room for an answer",
        "agent.py",
        "if len(observation) >= policy.budget_left",
        "if len(observation) > policy.budget_left",
        "test_agent.py::test_observation_that_leaves_no_token_is_not_appended",
    ),
    Bug(
        "branches share a seed",
        "policy.py",
        "session_seed(self.seed, self.calls[tuple(tokens)], *behind_prompt)",
        "session_seed(self.seed, 1)",
        "test_agent.py::test_first_turns_seed_is_the_sessions_and_branches_have_their_own_in_any_order",
    ),
    Bug(
        "calls in the thinking are run",
        "tasks/tools.py",
        'text[text.find("</think>") + 1 :]',
        "text",
        "test_agent.py::test_hermes_calls",
    ),
    Bug(
        "tool errors crash the session",
        "tasks/tools.py",
        "            return error_text(e), False\n\n    return run",
        "            raise\n\n    return run",
        "test_agent.py::test_whatever_a_call_does_is_text",
    ),
    Bug(
        "sandbox inherits the environment",
        "tasks/sandbox.py",
        "env={}",
        "env=None",
        "test_sandbox.py::test_environment_is_empty",
    ),
    Bug(
        "deadline counts the wait for a worker",
        "host/workers.py",
        "return await call.future",
        "return await asyncio.wait_for(call.future, timeout_s)",
        "test_workers.py::test_the_deadline_counts_from_the_calls_own_start",
    ),
    Bug(
        "score that failed is 0",
        "reward.py",
        "trajectory.score = math.nan",
        "trajectory.score = 0.0",
        "test_reward.py::test_scorer",
    ),
    Bug(
        "a tool's result is taken for the answer",
        "tasks/rules.py",
        "trajectory.answer.strip() ==",
        "trajectory.response.strip() ==",
        "test_reward.py::test_a_rule_judges_the_last_turn_only",
    ),
    Bug(
        "a step goes on after a skipped update",
        "actor.py",
        "break  # the rest of the step",
        "pass  # the rest of the step",
        "test_replay.py::test_steps_whose_gradient_is_not_finite[inf-1]",
    ),
    Bug(
        "a step that samples goes on when told to stop",
        "rollout.py",
        "rollout = Rollout(run.engine, run.scorer, step, cfg.rollout, told)",
        "rollout = Rollout(run.engine, run.scorer, step, cfg.rollout)",
        "test_launch.py::test_a_step_that_samples_is_given_up_and_the_last_one_saved",
    ),
    Bug(
        "plain: a speed-up stays on",
        "config.py",
        '"rollout.lean_scheduler": False,\n',
        "",
        "test_plain.py::test_two_plain_steps_run_without_the_folders_and_export_a_model",
    ),
    Bug(
        "skipped steps add up over good ones",
        "train.py",
        "state.skipped + 1 if bad else 0",
        "state.skipped + bad",
        "test_replay.py::test_steps_whose_gradient_is_not_finite[inf-1]",
    ),
    Bug(
        "only the first of all skipped steps is kept",
        "look/replay.py",
        "self.was_bad = bad",
        "self.was_bad = self.was_bad or bad",
        "test_replay.py::test_steps_whose_gradient_is_not_finite[inf-1]",
    ),
    Bug(
        "SIGTERM forgotten",
        "host/rank.py",
        "            seen.add(number)\n            stop.set()\n",
        "            seen.add(number)\n",
        "test_launch.py::test_sigterm_to_the_run_exits_0_and_it_goes_on_from_there",
    ),
    Bug(
        "sum of bits over the first part only",
        "sync_weights.py",
        "in batches(parts, torch.Tensor.numel):",
        "in [parts[:1]]:",
        "test_sync_weights.py::test_sum_of_bits_is_of_the_whole_tensor",
    ),
    Bug(
        "scheduler: another request's log-prob",
        "fast/scheduler.py",
        "logprobs[rows[place] if rows else place]",
        "logprobs[0]",
        "test_scheduler.py::test_same_tokens_log_probs_and_ends[all decode]",
    ),
    Bug(
        "scheduler: who waits is forgotten",
        "fast/scheduler.py",
        "if len(self.requests) != len(self.running):  # some wait",
        "if False:",
        "test_scheduler.py::test_same_tokens_log_probs_and_ends[more than run at once]",
    ),
    Bug(
        "scheduler: preempted requests taken for others",
        "fast/scheduler.py",
        "no_logprobs or r.num_preemptions",
        "no_logprobs",
        "test_scheduler.py::test_the_same_when_steps_are_scheduled_ahead",
    ),
    Bug(
        "cohort: decoded blocks not cached",
        "fast/cohort.py",
        "self.kv_cache_manager.cache_blocks(r, r.num_computed_tokens",
        "(lambda *_: None)(r, r.num_computed_tokens",
        "test_scheduler.py::test_the_same_when_steps_are_scheduled_ahead",
    ),
    Bug(
        "cohort: made where blocks are few",
        "fast/scheduler.py",
        " and self.has_blocks(3 * Cohort.AHEAD * len(requests))",
        "",
        "test_scheduler.py::test_no_cohort_is_made_where_blocks_are_too_few_for_one",
    ),
    Bug(
        "cohort: stop tokens passed by",
        "fast/cohort.py",
        "ends = np.isin(tokens, c.stops) |",
        "ends =",
        "test_scheduler.py::test_same_tokens_log_probs_and_ends[stop tokens]",
    ),
    Bug(
        "cohort: sampled past the most tokens",
        "fast/cohort.py",
        " | (c.steps[rows] <= c.done + 1)",
        "",
        "test_scheduler.py::test_same_tokens_log_probs_and_ends[all decode]",
    ),
    Bug(
        "cohort: what went round the ring is lost",
        "fast/cohort.py",
        "ring[begin:].tolist() + ring[:end].tolist()",
        "ring[begin:].tolist()",
        "test_scheduler.py::test_tokens_that_went_round_a_cohorts_ring_come_back_in_order",
    ),
    Bug(
        "cohort: one that goes on is never scheduled again",
        "fast/scheduler.py",
        "if together and len(stopped) < len(known):",
        "if False:",
        "test_scheduler.py::test_the_same_when_steps_are_scheduled_ahead",
    ),
    Bug(
        "trace: other ranks' entropy lost",
        "look/trace.py",
        "gather([own])",
        "[]",
        "test_show.py::test_trace_has_every_number_of_a_step[two_ranks]",
    ),
    Bug(
        "trace: observations earn",
        "look/trace.py",
        "t.loss_mask[t.prompt_length :]",
        "torch.ones_like(t.loss_mask[t.prompt_length :])",
        "test_dump.py::test_returns_discount_at_sampled_tokens_only",
    ),
    Bug(
        "bound that an interval leaves out is taken",
        "host/lookup.py",
        'number > float(low) or (left == "[" and number == float(low))',
        "number >= float(low)",
        "test_lookup.py::test_number_is_in_its_interval_or_the_message_names_it",
    ),
    Bug(
        "all ranks speak",
        "host/console.py",
        'if os.environ.get("RANK", "0") == "0":',
        "if True:",
        "test_console.py::test_rank_0_speaks_and_no_other",
    ),
    Bug(
        "escape sequences reach the terminal",
        "host/console.py",
        "or (unicodedata",
        "or True or (unicodedata",
        "test_dump.py::test_what_a_terminal_would_obey_is_spelt_out",
    ),
    Bug(
        "an error's quotes reach torchrun as they are",
        "host/rank.py",
        "raise RuntimeError(printable(traceback.format_exc())) from None",
        "raise RuntimeError(traceback.format_exc()) from None",
        "test_launch.py::test_error_that_quotes_what_a_policy_wrote_is_spelt_out[2]",
    ),
    Bug(
        "moments stay on the device",
        "fast/offload.py",
        "            storage.resize_(0)\n",
        "            pass\n",
        "test_offload.py::test_moments_are_really_away_and_come_back",
    ),
    Bug(
        "moments come back one off",
        "fast/offload.py",
        "zip(storages, starts)",
        "zip(storages, starts[:1] * len(storages))",
        "test_offload.py::test_a_run_with_moments_that_come_and_go_is_the_same",
    ),
    Bug(
        "checkpoint between two names is lost",
        "host/disk.py",
        "    name_again(folder)\n",
        "",
        "test_checkpoint.py::test_kill_at_any_moment_leaves_a_complete_checkpoint[True]",
    ),
    Bug(
        "doctor: a finding is said every step",
        "look/doctor.py",
        "begins or self.count",
        "True or self.count",
        "test_doctor.py::test_a_finding_that_lasts_is_said_when_it_begins_and_every_20th_step",
    ),
    Bug(
        "slope of a capped logit dropped",
        "model.py",
        "logits = (logits * slope).to(h.dtype)",
        "logits = logits.to(h.dtype)",
        "test_models.py::test_gradients_of_a_capped_head_are_autograds[1.5]",
    ),
    Bug(
        "logits scaled the other way",
        "model.py",
        '"granite": ("logits_scaling", lambda value: 1 / value)',
        '"granite": ("logits_scaling", lambda value: value)',
        "test_models.py::test_packed_log_probs_are_those_of_one_forward_a_sequence[Granite 3]",
    ),
    Bug(
        "what a model asks of its attention is swallowed",
        "model.py",
        "    if asked:\n",
        "    if False:\n",
        "test_models.py::test_attention_that_is_asked_for_more_says_so",
    ),
    Bug(
        "exports lack the scale of their logits",
        "checkpoint.py",
        ', **getattr(model, "published", {})',
        "",
        "test_models.py::test_an_export_has_the_published_logits",
    ),
    Bug(
        "vLLM's marks stay on the actor's class",
        "model.py",
        "    cls.__bases__ = bases\n",
        "",
        "test_models.py::test_vllm_gets_a_class_of_its_own",
    ),
]


def copy_repository(folder: Path) -> None:
    for path in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
        shutil.copy(path, folder)
    for name in ("tests", "configs", "fast", "look", "tasks", "host"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def place(test: str) -> str:
    """`test_x.py::test_y` with its folder, from the repository's root."""
    file, _, name = test.partition("::")
    [path] = (ROOT / "tests").rglob(file)
    return f"{path.relative_to(ROOT)}::{name}"


def pytest_in(folder: Path, log: Path, tests: list[str]) -> None:
    """In a fork: run tests of the copy and exit with pytest's status."""
    os.chdir(folder)
    sys.path[0] = str(folder)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    status = pytest.main(
        [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={log.with_suffix('.xml')}",
            *(place(test) for test in tests),
        ]
    )
    sys.stdout.flush()
    os._exit(int(status))


def run_tests(folder: Path, log: Path, tests: list[str], seconds: float) -> int | None:
    """pytest's status (0 all passed, 1 some failed), or None when it did not end in time."""
    process, shared = (
        multiprocessing.get_context("fork").Process(target=pytest_in, args=(folder, log, tests)),
        set(SHARED_MEMORY.glob("*-cpushm_*")),
    )
    process.start()
    process.join(seconds)
    hangs = process.is_alive()
    left = psutil.Process().children(recursive=True)  # also runs that the test has started and left
    for p in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            p.kill()
    process.join()
    psutil.wait_procs(left, 10)
    for path in (
        set(SHARED_MEMORY.glob("*-cpushm_*")) - shared
    ):  # of a vLLM that was killed: the next one that ranks share could not have this name
        path.unlink()
    return None if hangs else process.exitcode


def durations(report: Path) -> dict[str, float]:
    """Seconds of each test function, over its parameters, in pytest's report."""
    seconds = collections.Counter()
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        seconds[case.get("name").partition("[")[0]] += float(case.get("time"))
    return seconds


def main() -> None:
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = (
        True,
        "1",
    )  # two mutants of one second and one size would share a .pyc
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans of a test become children of this process
    only = sys.argv[1:]  # words of bugs to run, for working on this file
    bugs = [bug for bug in BUGS if not only or any(word in bug.what or word == bug.file for word in only)]
    assert bugs, f"no bug has {', '.join(only)} in its name, or is in a file of this name"
    with tempfile.TemporaryDirectory() as name:
        folder, log, start = Path(name) / "copy", Path(name) / "log", time.time()
        folder.mkdir()
        copy_repository(folder)
        for bug in bugs:
            count = (folder / bug.file).read_text().count(bug.old)
            assert count == 1, f"{bug.what}: {bug.old!r} occurs {count} times in {bug.file}"
        tests = sorted({bug.test for bug in bugs})
        status = run_tests(folder, log, tests, 3600)
        assert status == 0, f"without a bug the tests do not pass:\n{log.read_text()[-3000:]}"
        print(
            f"{len(tests)} tests pass without a bug ({time.time() - start:.0f} s)\n\n{'bug':41} | {'file':15} | {'caught by':90} | caught",
            flush=True,
        )
        usual, survivors = durations(log.with_suffix(".xml")), []
        for bug in bugs:
            path = folder / bug.file
            text = path.read_text()
            path.write_text(text.replace(bug.old, bug.new))
            log.write_text("")
            status = run_tests(
                folder, log, [bug.test], STARTS_S + SLOWER * usual[bug.test.partition("::")[2].partition("[")[0]]
            )
            caught = status in (1, None)
            path.write_text(text)
            survivors += [] if caught else [bug.what]
            print(
                f"{bug.what:41} | {bug.file:15} | {bug.test:90} | {'it hangs' if status is None else 'yes' if caught else 'NO'}",
                flush=True,
            )
            if not caught:
                print(log.read_text()[-1000:], file=sys.stderr)
        print(f"\n{len(bugs) - len(survivors)} of {len(bugs)} bugs caught in {time.time() - start:.0f} s")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
