"""vLLM's scheduler with less Python a token, which is what bounds the sampling of small models.

Stock vLLM makes an output object for each token of each request, adds it to the request's log-probs, and asks the KV cache for room
for every token. Here a step in which all requests decode takes one short loop, blocks are asked for when one is full, and a request
makes its one output when it ends. What is scheduled, sampled and cached is the same, token for token (tests/test_scheduler.py).

It is written against the vLLM versions of engine.VLLM_VERSIONS, and leaves to vLLM what it does not know: prompts, preemption.
"""
from dataclasses import fields, replace

OUTCOME = "lockstep"  # key of kv_transfer_params, which pass from the scheduler to a request's output untouched


def lean_scheduler(asynchronous: bool) -> type:
    """The class for vLLM's `scheduler_cls`. vLLM is imported here and not before."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    by_version = {"num_common_prefix_blocks": [0]} if any(f.name == "num_common_prefix_blocks" for f in fields(SchedulerOutput)) else {}

    class LeanScheduler(AsyncScheduler if asynchronous else Scheduler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            assert self.scheduler_config.async_scheduling == asynchronous, f"vLLM schedules {'a' if not asynchronous else ''}synchronously, which was not foreseen"
            unknown = self.connector, self.lora_config, self.num_spec_tokens or None, self.ec_connector
            assert unknown == (None,) * 4, f"no lean scheduling with {unknown}"
            groups = self.kv_cache_config.kv_cache_groups
            same = len(groups) == 1 and groups[0].kv_cache_spec.block_size == self.block_size == getattr(self, "hash_block_size", self.block_size)
            self.every = self.block_size if same else 1  # tokens between two looks at the KV cache

        def schedule(self, *args, **kwargs):
            requests = self.decoding()
            return self.schedule_decode(requests) if requests else super().schedule(*args, **kwargs)

        def decoding(self) -> list | None:
            """The requests of a step in which every one takes one token and the KV cache has room; None for any other step."""
            if len(self.requests) != len(self.running):  # some wait
                return None
            requests, num_full = [], 0
            for r in self.running:
                computed, ahead = r.num_computed_tokens, r.num_output_placeholders
                if ahead and computed + 2 - ahead >= r.num_prompt_tokens + r.max_tokens:
                    continue  # its last token is on the way
                if len(r._all_token_ids) + ahead - computed != 1 or r.is_prefill_chunk or r.spec_token_ids or r.num_preemptions:
                    return None
                if computed + 1 >= self.max_model_len:
                    continue
                num_full += computed % self.every == 0
                requests.append(r)
            room = min(self.max_num_scheduled_tokens - len(requests), self.kv_cache_manager.block_pool.get_num_free_blocks() - num_full * len(self.kv_cache_config.kv_cache_groups))
            return requests if room >= 0 else None

        def schedule_decode(self, requests: list) -> "SchedulerOutput":
            self.current_step += 1
            self.kv_cache_manager.new_step_starts()
            if self.defer_block_free:
                self.sched_step_seq += 1
            names, blocks, computed_tokens, output_tokens = [r.request_id for r in requests], [], [], []
            whole = {} if self.use_v2_model_runner else {r.request_id: r.all_token_ids.copy() for r in requests if r.request_id not in self.prev_step_scheduled_req_ids}
            for r in requests:
                computed = r.num_computed_tokens
                if computed % self.every:
                    blocks.append(None)
                else:
                    room = self.kv_cache_manager.allocate_slots(r, 1)
                    assert room is not None, "the KV cache had room for fewer blocks than it said"
                    blocks.append(room.get_block_ids(allow_none=True))
                computed_tokens.append(computed)
                output_tokens.append(len(r._output_token_ids) + r.num_output_placeholders)
                r.num_computed_tokens = computed + 1
                r.num_in_flight_tokens += 1
                if self.defer_block_free:
                    r.last_sched_seq = self.sched_step_seq
                if asynchronous:
                    r.num_output_placeholders += 1
                    r.next_decode_eligible_step = self.current_step + 1
            if not self.use_v2_model_runner:
                self.prev_step_scheduled_req_ids.clear()
                self.prev_step_scheduled_req_ids.update(names)
            output = SchedulerOutput(
                scheduled_new_reqs=[],
                scheduled_cached_reqs=CachedRequestData(
                    req_ids=names, resumed_req_ids=set(), new_token_ids=[], all_token_ids=whole, new_block_ids=blocks, num_computed_tokens=computed_tokens, num_output_tokens=output_tokens
                ),
                num_scheduled_tokens=dict.fromkeys(names, 1), total_num_scheduled_tokens=len(names), scheduled_spec_decode_tokens={}, scheduled_encoder_inputs={},
                finished_req_ids=self.finished_req_ids, free_encoder_mm_hashes=[], preempted_req_ids=self.reset_preempted_req_ids, new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
                **by_version,
            )  # fmt: skip
            self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
            return output

        def update_from_output(self, scheduled, results) -> dict:
            """Take a step's tokens. Only requests that ended are in what is returned, each with all its tokens and log-probs."""
            known = {name: r for name in scheduled.num_scheduled_tokens if (r := self.requests.get(name))}
            odd = {name: n for name, n in scheduled.num_scheduled_tokens.items() if name in known and (results.logprobs is None or known[name].num_preemptions)}
            answer = super().update_from_output(replace(scheduled, num_scheduled_tokens=odd), results)
            ended = [output for of in answer.values() for output in of.outputs if self.collect(known[output.request_id], output)]
            rows = results.logprobs and results.logprobs.cu_num_generated_tokens
            values, stopped = results.logprobs.logprobs[:, 0].tolist() if results.logprobs else [], []
            for name, r in known.items():
                if name in odd:
                    continue
                r.num_in_flight_tokens -= scheduled.num_scheduled_tokens[name]
                if r.is_finished():
                    continue
                place = results.req_id_to_index[name]
                if self.append(r, results.sampled_token_ids[place], values[rows[place] if rows else place]):
                    stopped.append(r)
            for r in stopped:
                reason = r.get_finished_reason()
                self._free_request(r)
                ended.append(EngineCoreOutput(request_id=r.request_id, new_token_ids=list(r._output_token_ids), finish_reason=reason, stop_reason=r.stop_reason, kv_transfer_params={OUTCOME: r.logprobs}))
            if stopped:
                gone = set(stopped)
                self.running = [r for r in self.running if r not in gone]
            for of in answer.values():
                of.outputs = []
            answer.setdefault(0, EngineCoreOutputs()).outputs = ended
            return answer

        def append(self, r, tokens: list[int], logprob: float) -> bool:
            """One sampled token to a request; whether it is its last."""
            if not tokens:
                return False
            [token] = tokens
            r._output_token_ids.append(token)
            r._all_token_ids.append(token)
            total = len(r._all_token_ids)
            if total % self.every == 0:
                r.update_block_hashes()
            if not hasattr(r, "logprobs"):
                r.logprobs = []
            r.logprobs.append(logprob)
            if asynchronous:
                r.num_output_placeholders -= 1
                if (done := r.num_computed_tokens - r.num_output_placeholders) % self.every == 0:
                    self.kv_cache_manager.cache_blocks(r, done)
            params = r.sampling_params
            ends = token == params.eos_token_id or token in (params.stop_token_ids or ()) or len(r._output_token_ids) >= r.max_tokens or total >= self.max_model_len
            return ends and check_stop(r, self.max_model_len)

        def collect(self, r, output) -> bool:
            """What vLLM's own code made of a request's step; whether it ended, and the output then holds all of it."""
            if not hasattr(r, "logprobs"):
                r.logprobs = []
            if output.new_logprobs is not None:
                r.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            output.new_token_ids, output.new_logprobs = list(r._output_token_ids), None
            output.kv_transfer_params = {OUTCOME: r.logprobs}
            return output.finish_reason is not None

    return LeanScheduler
