"""vLLM's scheduler with less Python a token, which is what bounds the sampling of small models.

Stock vLLM makes an output object for each token of each request, adds it to the request's log-probs, and asks the KV cache for room
for every token. Here a step in which all requests decode takes one short loop, blocks are asked for when one is full, and a request
makes its one output when it ends. Requests that go on decoding together take no loop at all: a `Cohort` keeps their counters and tokens
in arrays. What is sampled is the same, token for token (tests/test_scheduler.py), and so is what is scheduled while there are blocks; where
they run out, whom vLLM preempts and how much of a later prompt is still in the prefix cache may differ.

It is written against the vLLM versions of engine.VLLM_VERSIONS, and leaves to vLLM what it does not know: prompts, preemption.
"""

from dataclasses import fields, replace
from itertools import chain

import numpy as np

OUTCOME = "lockstep"  # key of kv_transfer_params, which pass from the scheduler to a request's output untouched
AHEAD = (
    4  # blocks that a request of a cohort is given at a time; some at every step, that no step has all of them to give
)
STEADY = 2  # steps after one of the same requests, from which on they are a cohort: to make one and give it up takes as long as that


class Cohort:
    """Requests that decode together, a token a step, step after step; some leave, none joins. What vLLM keeps in a request is in arrays here, a row a request,
    and goes into the request (LeanScheduler.settle) where it gets blocks, ends, or is scheduled in another way."""

    def __init__(self, requests: list, every: int, longest: int):
        read = lambda value: np.fromiter(map(value, requests), np.int64, len(requests))  # noqa: E731
        self.requests, self.rows = (
            requests,
            {r.request_id: row for row, r in enumerate(requests)},
        )  # rows: of those that are left
        self.left, self.names = np.arange(len(requests)), list(self.rows)  # the same, in the order of the batch
        self.computed = read(lambda r: r.num_computed_tokens)
        self.outputs = read(lambda r: len(r._output_token_ids) + r.num_output_placeholders)
        self.steps = np.minimum(
            read(lambda r: r.max_tokens) - self.outputs, longest - 1 - self.computed
        )  # that each can take
        self.room = -(-self.computed // every) * every  # tokens that its blocks hold
        self.stops = np.array(
            sorted(
                {
                    token
                    for r in requests
                    for token in (r.sampling_params.eos_token_id, *(r.sampling_params.stop_token_ids or ()))
                    if token is not None
                }
            )
        )
        self.width = (AHEAD + 1) * every + 4  # sampled tokens that a request may not have been given yet
        self.tokens, self.logprobs = (
            np.zeros((len(requests), self.width), np.int64),
            np.zeros((len(requests), self.width)),
        )
        self.scheduled, self.done = 0, 0  # steps
        self.known = [(0, 0)] * len(requests)  # of these, what the request itself knows of
        self.last = 0, 0  # vLLM's numbers of the last scheduled step
        self.counts = dict.fromkeys(self.names, 1)

    def taken(self, ring, since: int) -> list:
        """What a request's ring holds of the steps from `since` on."""
        begin, end = since % self.width, self.done % self.width
        return ring[begin:end].tolist() if begin < end else ring[begin:].tolist() + ring[:end].tolist()

    def remove(self, rows) -> None:
        for row in rows:
            del self.rows[self.requests[row].request_id]
        self.left = np.fromiter(self.rows.values(), np.int64, len(self.rows))
        self.names, self.counts = list(self.rows), dict.fromkeys(self.rows, 1)


def lean_scheduler(asynchronous: bool) -> type:
    """The class for vLLM's `scheduler_cls`. vLLM is imported here and not before."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    by_version = (
        {"num_common_prefix_blocks": [0]}
        if any(f.name == "num_common_prefix_blocks" for f in fields(SchedulerOutput))
        else {}
    )

    class LeanScheduler(AsyncScheduler if asynchronous else Scheduler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            assert self.scheduler_config.async_scheduling == asynchronous, (
                f"vLLM schedules {'a' if not asynchronous else ''}synchronously, which was not foreseen"
            )
            unknown = self.connector, self.lora_config, self.num_spec_tokens or None, self.ec_connector
            assert unknown == (None,) * 4, f"no lean scheduling with {unknown}"
            groups = self.kv_cache_config.kv_cache_groups
            same = len(groups) == 1 and groups[0].kv_cache_spec.block_size == self.block_size == getattr(
                self, "hash_block_size", self.block_size
            )
            self.every = self.block_size if same else 1  # tokens between two looks at the KV cache

            self.cohort, self.steady, self.num_steady = (
                None,
                [],
                0,
            )  # steady: the requests of the last step, if all decoded, and of so many before

        def schedule(self, *args, **kwargs):
            if self.cohort and (output := self.schedule_cohort()):
                return output
            self.dissolve()
            requests = self.decoding()
            self.num_steady = self.num_steady + 1 if requests == self.steady else 0
            self.steady = requests or []
            if requests and self.every > 1 and self.num_steady >= STEADY and self.has_blocks(3 * AHEAD * len(requests)):
                self.cohort = Cohort(requests, self.every, self.max_model_len)
                if output := self.schedule_cohort():
                    return output
                self.dissolve()
            return self.schedule_decode(requests) if requests else super().schedule(*args, **kwargs)

        def has_blocks(self, number: int) -> bool:
            return self.kv_cache_manager.block_pool.get_num_free_blocks() >= number

        def schedule_cohort(self) -> "SchedulerOutput | None":
            """A step of the cohort; None when others wait, or blocks are few."""
            c = self.cohort
            if len(self.requests) != len(self.running):
                return None
            if len(over := c.left[c.steps[c.left] <= c.scheduled]):  # their last tokens are on the way
                self.leave(over)
            if (
                not len(c.left)
                or len(c.left) > self.max_num_scheduled_tokens
                or not self.has_blocks(2 * AHEAD * len(c.left))
            ):
                return None
            self.kv_cache_manager.new_step_starts()
            now, blocks = c.computed[c.left] + c.scheduled, [None] * len(c.left)
            slack = c.room[c.left] - now
            some = max(-(-len(slack) // self.every), int((slack <= 0).sum()))
            for place in slack.argsort(kind="stable")[:some]:
                if slack[place] >= self.every:
                    break
                row, ahead = c.left[place], AHEAD * self.every - 1
                self.settle(row)
                room = self.kv_cache_manager.allocate_slots(c.requests[row], 1, num_lookahead_tokens=ahead)
                assert room is not None, "the KV cache had room for fewer blocks than it said"
                blocks[place] = room.get_block_ids(allow_none=True)
                c.room[row] = -(-(now[place] + 1 + ahead) // self.every) * self.every
            output = self.decode_output(
                c.names, blocks, now.tolist(), (c.outputs[c.left] + c.scheduled).tolist(), c.counts, {}
            )
            c.scheduled += 1
            c.last, output.cohort = (getattr(self, "sched_step_seq", 0), self.current_step), (c, c.left, c.names)
            return output

        def settle(self, row: int) -> None:
            """Put into a request of the cohort what it does not know of."""
            c, r = self.cohort, self.cohort.requests[row]
            (scheduled, done), c.known[row] = c.known[row], (c.scheduled, c.done)
            if c.scheduled > scheduled:
                coming = c.scheduled - scheduled - (c.done - done)
                r.num_computed_tokens += c.scheduled - scheduled
                r.num_in_flight_tokens += coming
                if self.defer_block_free:
                    r.last_sched_seq = c.last[0]
                if asynchronous:
                    r.num_output_placeholders += coming
                    r.next_decode_eligible_step = c.last[1] + 1
            if c.done > done:
                tokens = c.taken(c.tokens[row], done)
                r._output_token_ids.extend(tokens)
                r._all_token_ids.extend(tokens)
                r.logprobs.extend(c.taken(c.logprobs[row], done))
                r.update_block_hashes()
                self.kv_cache_manager.cache_blocks(r, r.num_computed_tokens - r.num_output_placeholders)

        def leave(self, rows) -> None:
            for row in rows:
                self.settle(row)
            self.cohort.remove(rows)

        def dissolve(self) -> None:
            """Let vLLM, or the loop over requests, see all of the cohort's."""
            if self.cohort:
                for row in self.cohort.left:
                    self.settle(row)
                self.cohort, self.steady = None, []

        def finish_requests(self, *args, **kwargs):
            self.dissolve()
            return super().finish_requests(*args, **kwargs)

        def reset_prefix_cache(self, *args, **kwargs):
            self.dissolve()
            return super().reset_prefix_cache(*args, **kwargs)

        def decoding(self) -> list | None:
            """The requests of a step in which every one takes one token and the KV cache has room; None for any other step."""
            if len(self.requests) != len(self.running):  # some wait
                return None
            requests, num_full = [], 0
            for r in self.running:
                computed, ahead = r.num_computed_tokens, r.num_output_placeholders
                if ahead and computed + 2 - ahead >= r.num_prompt_tokens + r.max_tokens:
                    continue  # its last token is on the way
                if (
                    len(r._all_token_ids) + ahead - computed != 1
                    or r.is_prefill_chunk
                    or r.spec_token_ids
                    or r.num_preemptions
                ):
                    return None
                if computed + 1 >= self.max_model_len:
                    continue
                num_full += computed % self.every == 0
                requests.append(r)
            room = min(
                self.max_num_scheduled_tokens - len(requests),
                self.kv_cache_manager.block_pool.get_num_free_blocks()
                - num_full * len(self.kv_cache_config.kv_cache_groups),
            )
            return requests if room >= 0 else None

        def schedule_decode(self, requests: list) -> "SchedulerOutput":
            self.kv_cache_manager.new_step_starts()
            names, blocks, computed_tokens, output_tokens = [r.request_id for r in requests], [], [], []
            whole = (
                {}
                if self.use_v2_model_runner
                else {
                    r.request_id: r.all_token_ids.copy()
                    for r in requests
                    if r.request_id not in self.prev_step_scheduled_req_ids
                }
            )
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
            output = self.decode_output(names, blocks, computed_tokens, output_tokens, dict.fromkeys(names, 1), whole)
            for r in requests:
                r.num_computed_tokens += 1
                r.num_in_flight_tokens += 1
                if self.defer_block_free:
                    r.last_sched_seq = self.sched_step_seq
                if asynchronous:
                    r.num_output_placeholders += 1
                    r.next_decode_eligible_step = self.current_step + 1
            return output

        def decode_output(
            self,
            names: list[str],
            blocks: list,
            computed_tokens: list[int],
            output_tokens: list[int],
            counts: dict[str, int],
            whole: dict,
        ) -> "SchedulerOutput":
            self.current_step += 1
            if self.defer_block_free:
                self.sched_step_seq += 1
            if not self.use_v2_model_runner:
                self.prev_step_scheduled_req_ids.clear()
                self.prev_step_scheduled_req_ids.update(names)
            output = SchedulerOutput(
                scheduled_new_reqs=[],
                scheduled_cached_reqs=CachedRequestData(
                    req_ids=names,
                    resumed_req_ids=set(),
                    new_token_ids=[],
                    all_token_ids=whole,
                    new_block_ids=blocks,
                    num_computed_tokens=computed_tokens,
                    num_output_tokens=output_tokens,
                ),
                num_scheduled_tokens=counts,
                total_num_scheduled_tokens=len(names),
                scheduled_spec_decode_tokens={},
                scheduled_encoder_inputs={},
                finished_req_ids=self.finished_req_ids,
                free_encoder_mm_hashes=[],
                preempted_req_ids=self.reset_preempted_req_ids,
                new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
                **by_version,
            )
            self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
            return output

        def update_from_output(self, scheduled, results) -> dict:
            """Take a step's tokens. Only requests that ended are in what is returned, each with all its tokens and log-probs."""
            counts, together = scheduled.num_scheduled_tokens, self.take_together(scheduled, results)
            if together is not None:
                counts = together
            known = {name: r for name in counts if (r := self.requests.get(name))}
            odd = {
                name: n
                for name, n in counts.items()
                if name in known and (results.logprobs is None or known[name].num_preemptions)
            }
            answer = super().update_from_output(replace(scheduled, num_scheduled_tokens=odd), results)
            ended = [
                output
                for of in answer.values()
                for output in of.outputs
                if self.collect(known[output.request_id], output)
            ]
            rows = results.logprobs and results.logprobs.cu_num_generated_tokens
            values, stopped = results.logprobs.logprobs[:, 0] if results.logprobs else [], []
            values = values.tolist() if len(known) > 8 else values
            for name, r in known.items():
                if name in odd:
                    continue
                r.num_in_flight_tokens -= counts[name]
                if r.is_finished():
                    continue
                place = results.req_id_to_index[name]
                if self.append(r, results.sampled_token_ids[place], float(values[rows[place] if rows else place])):
                    stopped.append(r)
            if together and len(stopped) < len(known):
                self.dissolve()  # one that did not end, left to itself, would be scheduled no more
            if self.cohort and (
                leaving := [row for r in stopped if (row := self.cohort.rows.get(r.request_id)) is not None]
            ):
                self.leave(leaving)
            for r in stopped:
                reason = r.get_finished_reason()
                self._free_request(r)
                ended.append(
                    EngineCoreOutput(
                        request_id=r.request_id,
                        new_token_ids=list(r._output_token_ids),
                        finish_reason=reason,
                        stop_reason=r.stop_reason,
                        kv_transfer_params={OUTCOME: r.logprobs},
                    )
                )
            if stopped:
                gone = set(stopped)
                self.running = [r for r in self.running if r not in gone]
            for of in answer.values():
                of.outputs = []
            answer.setdefault(0, EngineCoreOutputs()).outputs = ended
            return answer

        def take_together(self, scheduled, results) -> dict[str, int] | None:
            """Take a cohort's tokens of a step, but those that may end a request: returned are the counts of these and of what has left the cohort since. None when it is no cohort's step."""
            c, rows, names = getattr(scheduled, "cohort", (None, None, None))
            if c is None or c is not self.cohort:
                return None
            tokens = list(chain.from_iterable(results.sampled_token_ids))
            if (
                results.logprobs is None
                or results.logprobs.cu_num_generated_tokens
                or not len(tokens) == len(results.sampled_token_ids) == len(rows)
            ):
                self.dissolve()
                return None
            places = slice(None) if results.req_ids == names else [results.req_id_to_index[name] for name in names]
            tokens, logprobs = np.array(tokens)[places], results.logprobs.logprobs[:, 0][places]
            ends = np.isin(tokens, c.stops) | (c.steps[rows] <= c.done + 1)
            gone = np.zeros(len(rows), bool) if rows is c.left else ~np.isin(rows, c.left)
            if (leaving := ends & ~gone).any():
                self.leave(rows[leaving])
            stay = ~(ends | gone)
            place = c.done % c.width
            c.tokens[rows[stay], place], c.logprobs[rows[stay], place] = tokens[stay], logprobs[stay]
            c.done += 1
            return {names[i]: 1 for i in np.flatnonzero(~stay)}

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
            ends = (
                token == params.eos_token_id
                or token in (params.stop_token_ids or ())
                or len(r._output_token_ids) >= r.max_tokens
                or total >= self.max_model_len
            )
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
