"""vLLM's scheduler with less Python a token, which is what bounds the sampling of small models.

Stock vLLM makes an output object for each token of each request, adds it to the request's log-probs, and asks the KV
cache for room for every token. Here a step goes one of three ways, the first that applies:

    the cohort       the same requests have decoded together for some steps: cohort.py keeps their counters and tokens
                     in arrays, and no loop goes over them
    the short loop   all requests decode: one loop, which asks for a block when one is full
    vLLM's own       everything else: prompts, preemption, requests that wait

A request makes its one output when it ends. What is sampled is the same, token for token
(tests/engine/test_scheduler.py), and so is what is scheduled while there are blocks; where they run out, whom vLLM
preempts and how much of a later prompt is still in the prefix cache may differ.

Written against the vLLM versions of engine.VLLM_VERSIONS. To be imported after engine.import_vllm.
"""

from dataclasses import fields, replace
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from fast.cohort import Cohort, CohortScheduler

OUTCOME = "lockstep"  # key of kv_transfer_params, which pass from the scheduler to a request's output untouched
STEADY = 2  # steps after one of the same requests until they are a cohort: to make one and give it up takes as long

# What only some versions of vLLM want in a SchedulerOutput.
BY_VERSION = {}
if any(field.name == "num_common_prefix_blocks" for field in fields(SchedulerOutput)):
    BY_VERSION["num_common_prefix_blocks"] = [0]


def lean_scheduler(asynchronous: bool) -> type:
    """The class for vLLM's `scheduler_cls`: LeanScheduler on top of vLLM's own.

    asynchronous: vLLM schedules a step before the last one's tokens are there, as it does on a GPU.
    """
    theirs = AsyncScheduler if asynchronous else Scheduler
    return type("LeanScheduler", (LeanScheduler, theirs), {"asynchronous": asynchronous})


class LeanScheduler(CohortScheduler):
    """The ways of this module; super() is vLLM's scheduler."""

    asynchronous: bool

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        assert self.scheduler_config.async_scheduling == self.asynchronous, (
            f"vLLM schedules ahead: {not self.asynchronous}, which was not foreseen"
        )
        unknown = [self.connector, self.lora_config, self.num_spec_tokens or None, self.ec_connector]
        assert unknown == [None] * 4, f"no lean scheduling with {unknown}"
        # Tokens between two looks at the KV cache: a block's, or each token where there are blocks of several sizes.
        groups = self.kv_cache_config.kv_cache_groups
        hash_size = getattr(self, "hash_block_size", self.block_size)
        one_size = len(groups) == 1 and groups[0].kv_cache_spec.block_size == self.block_size == hash_size
        self.every = self.block_size if one_size else 1

        self.cohort: Cohort | None = None
        self.steady: list = []  # the requests of the last step, if all of them decoded
        self.num_steady = 0  # steps before the last one that had the same requests

    # Scheduling

    def schedule(self, *args, **kwargs) -> SchedulerOutput:
        """What the model computes in the next step."""
        if self.cohort:
            output = self.schedule_cohort()
            if output:
                return output
            self.dissolve()
        requests = self.decoding()
        if not requests:
            self.steady = []
            return super().schedule(*args, **kwargs)
        self.num_steady = self.num_steady + 1 if requests == self.steady else 0
        self.steady = requests
        if self.every > 1 and self.num_steady >= STEADY and self.has_blocks(3 * Cohort.AHEAD * len(requests)):
            self.cohort = Cohort(requests, self.every, self.max_model_len)
            output = self.schedule_cohort()
            if output:
                return output
            self.dissolve()
        return self.schedule_decode(requests)

    def has_blocks(self, number: int) -> bool:
        """Whether so many blocks of the KV cache are free."""
        return self.kv_cache_manager.block_pool.get_num_free_blocks() >= number

    def decoding(self) -> list | None:
        """The requests of a step in which each takes one token and the KV cache has room; None for any other step."""
        if len(self.requests) != len(self.running):  # some wait
            return None
        requests = []
        num_full = 0  # requests whose blocks are full
        for r in self.running:
            computed = r.num_computed_tokens
            ahead = r.num_output_placeholders  # tokens that are on the way
            if ahead and computed + 2 - ahead >= r.num_prompt_tokens + r.max_tokens:
                continue  # its last token is on the way
            if (
                len(r._all_token_ids) + ahead - computed != 1  # it has more, or fewer, than one token to compute
                or r.is_prefill_chunk
                or r.spec_token_ids
                or r.num_preemptions  # vLLM's own code takes its tokens
            ):
                return None
            if computed + 1 >= self.max_model_len:
                continue
            num_full += computed % self.every == 0
            requests.append(r)
        num_blocks = num_full * len(self.kv_cache_config.kv_cache_groups)
        fits = len(requests) <= self.max_num_scheduled_tokens and self.has_blocks(num_blocks)
        return requests if fits else None

    def schedule_decode(self, requests: list) -> SchedulerOutput:
        """A step in which these requests take a token each."""
        self.kv_cache_manager.new_step_starts()
        names = [r.request_id for r in requests]
        blocks = []
        computed_tokens = []
        output_tokens = []
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
        whole = self.whole_tokens(requests)
        output = self.decode_output(names, blocks, computed_tokens, output_tokens, dict.fromkeys(names, 1), whole)
        asynchronous = self.asynchronous
        for r in requests:
            r.num_computed_tokens += 1
            r.num_in_flight_tokens += 1
            if self.defer_block_free:
                r.last_sched_seq = self.sched_step_seq
            if asynchronous:
                r.num_output_placeholders += 1
                r.next_decode_eligible_step = self.current_step + 1
        return output

    def whole_tokens(self, requests: list) -> dict[str, list[int]]:
        """All tokens of requests that were not in the last step, for the older of vLLM's two model runners."""
        if self.use_v2_model_runner:
            return {}
        last = self.prev_step_scheduled_req_ids
        return {r.request_id: r.all_token_ids.copy() for r in requests if r.request_id not in last}

    def decode_output(
        self,
        names: list[str],
        blocks: list[tuple | None],
        computed_tokens: list[int],
        output_tokens: list[int],
        counts: dict[str, int],
        whole: dict[str, list[int]],
    ) -> SchedulerOutput:
        """vLLM's object of a step in which these requests take a token each, and vLLM's counters of steps moved on."""
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
            **BY_VERSION,
        )
        self.finished_req_ids = set()
        self.reset_preempted_req_ids = set()
        return output

    def finish_requests(self, *args, **kwargs) -> Any:
        """vLLM's way to abort requests."""
        self.dissolve()
        return super().finish_requests(*args, **kwargs)

    def reset_prefix_cache(self, *args, **kwargs) -> bool:
        """vLLM's."""
        self.dissolve()
        return super().reset_prefix_cache(*args, **kwargs)

    # Taking a step's tokens

    def update_from_output(self, scheduled: SchedulerOutput, results) -> dict[int, EngineCoreOutputs]:
        """Take a step's tokens. Only requests that ended are returned, each with all its tokens and log-probs."""
        counts = scheduled.num_scheduled_tokens
        together = self.take_together(scheduled, results)
        if together is not None:
            counts = together
        known = {name: r for name in counts if (r := self.requests.get(name))}  # others were aborted meanwhile
        # vLLM's own code takes steps without log-probs (prompts that are not done), and requests that were preempted.
        no_logprobs = results.logprobs is None
        odd = {name: counts[name] for name, r in known.items() if no_logprobs or r.num_preemptions}
        answer = super().update_from_output(replace(scheduled, num_scheduled_tokens=odd), results)
        ended = self.collect(answer, known)
        stopped = [] if no_logprobs else self.take_tokens(known, odd, counts, results)
        if together and len(stopped) < len(known):
            self.dissolve()  # one that did not end, left to itself, would be scheduled no more
        if stopped:
            ended += self.finish(stopped)
        for outputs in answer.values():
            outputs.outputs = []
        answer.setdefault(0, EngineCoreOutputs()).outputs = ended
        return answer

    def take_tokens(self, known: dict, odd: dict[str, int], counts: dict[str, int], results) -> list:
        """Give each known request that is not odd its sampled token. Returns those that end with it."""
        logprobs = results.logprobs.logprobs[:, 0]
        if len(known) > 8:
            logprobs = logprobs.tolist()  # quicker than so many looks into the array
        rows = results.logprobs.cu_num_generated_tokens  # where each request's log-probs begin, unless all have one
        stopped = []
        for name, r in known.items():
            if name in odd:
                continue
            r.num_in_flight_tokens -= counts[name]
            if r.is_finished():
                continue
            place = results.req_id_to_index[name]
            logprob = float(logprobs[rows[place] if rows else place])
            if self.append(r, results.sampled_token_ids[place], logprob):
                stopped.append(r)
        return stopped

    def append(self, r, tokens: list[int], logprob: float) -> bool:
        """Give a request its sampled token, if there is one. Returns whether it is its last."""
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
        if self.asynchronous:
            r.num_output_placeholders -= 1
            computed = r.num_computed_tokens - r.num_output_placeholders
            if computed % self.every == 0:
                self.kv_cache_manager.cache_blocks(r, computed)
        params = r.sampling_params
        may_end = (
            token == params.eos_token_id
            or token in (params.stop_token_ids or ())
            or len(r._output_token_ids) >= r.max_tokens
            or total >= self.max_model_len
        )
        return may_end and check_stop(r, self.max_model_len)

    def finish(self, requests: list) -> list[EngineCoreOutput]:
        """Let vLLM forget requests that ended. Returns their outputs."""
        if self.cohort:
            rows = [self.cohort.rows.get(r.request_id) for r in requests]
            leaving = [row for row in rows if row is not None]
            if leaving:
                self.leave(leaving)
        outputs = []
        for r in requests:
            reason = r.get_finished_reason()
            self._free_request(r)
            outputs.append(
                EngineCoreOutput(
                    request_id=r.request_id,
                    new_token_ids=list(r._output_token_ids),
                    finish_reason=reason,
                    stop_reason=r.stop_reason,
                    kv_transfer_params={OUTCOME: r.logprobs},
                )
            )
        gone = set(requests)
        self.running = [r for r in self.running if r not in gone]
        return outputs

    def collect(self, answer: dict[int, EngineCoreOutputs], known: dict) -> list[EngineCoreOutput]:
        """Keep the tokens in vLLM's own answer. Returns the outputs of requests that ended, with all their tokens."""
        ended = []
        for outputs in answer.values():
            for output in outputs.outputs:
                r = known[output.request_id]
                if not hasattr(r, "logprobs"):
                    r.logprobs = []
                if output.new_logprobs is not None:
                    r.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
                output.new_token_ids = list(r._output_token_ids)
                output.new_logprobs = None
                output.kv_transfer_params = {OUTCOME: r.logprobs}
                if output.finish_reason is not None:
                    ended.append(output)
        return ended
