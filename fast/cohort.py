"""Requests that decode together, step after step: counters and tokens are in arrays, no loop goes over the requests.

`Cohort` is the arrays, `CohortScheduler` the part of scheduler.LeanScheduler that takes a cohort through a step.
"""

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from batch import ceil_div

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Cohort:
    """Requests that take a token a step, step after step. Some leave; none joins.

    What vLLM keeps in a request is in arrays here, one row a request. It goes into the request (CohortScheduler.settle)
    when that gets blocks, ends, or is scheduled in another way.
    """

    # Blocks that a request is given at a time. Some requests get theirs at each step, so that no step has to serve all.
    AHEAD = 4

    def __init__(self, requests: list, block_size: int, longest: int):
        """block_size: tokens of a block of the KV cache. longest: tokens that a sequence may have."""
        num = len(requests)
        self.requests = requests
        self.block_size = block_size
        # Rows of the requests that have not left: by name, and as the batch has them in order.
        self.rows = {r.request_id: row for row, r in enumerate(requests)}
        self.left = np.arange(num)
        self.names = list(self.rows)
        self.counts = dict.fromkeys(self.names, 1)  # tokens of a step by name, as vLLM wants them

        # At the first step: tokens that are computed, tokens that were sampled, and steps that each request can take.
        self.computed = column(r.num_computed_tokens for r in requests)  # [num]
        self.outputs = column(len(r._output_token_ids) + r.num_output_placeholders for r in requests)  # [num]
        most_outputs = column(r.max_tokens for r in requests)
        self.steps = np.minimum(most_outputs - self.outputs, longest - 1 - self.computed)  # [num]
        self.room = ceil_div(self.computed, block_size) * block_size  # [num] tokens that a request's blocks hold
        self.stops = np.array(sorted(stop_tokens(requests)))  # tokens that may end one of the requests

        # Steps that were scheduled, steps whose tokens have come, and of both those that a request itself knows of.
        self.scheduled = 0
        self.done = 0
        self.known = [(0, 0)] * num
        # vLLM's numbers of the last step that was scheduled.
        self.last_sequence = 0
        self.last_step = 0

        # Sampled tokens that requests do not know of yet, as rings: those of step i are at i % width.
        self.width = (self.AHEAD + 1) * block_size + 4
        self.tokens = np.zeros((num, self.width), np.int64)
        self.logprobs = np.zeros((num, self.width))

    def at_their_end(self) -> np.ndarray:
        """Rows of requests that have no step left to be scheduled: their last token is on the way."""
        return self.left[self.steps[self.left] <= self.scheduled]

    def short_of_room(self, computed: np.ndarray) -> list[int]:
        """Places in `left` of the requests to be given blocks at this step, those with the least room first.

        All that have no room for a token; and, so that few are in that state at once, every one has its turn within a
        block's worth of steps, unless it has a whole block to spare. computed: tokens of each request in `left`.
        """
        slack = self.room[self.left] - computed
        num = max(ceil_div(len(slack), self.block_size), int((slack <= 0).sum()))
        places = slack.argsort(kind="stable")[:num]
        return places[slack[places] < self.block_size].tolist()

    def put(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """The next step's tokens of these rows."""
        place = self.done % self.width
        self.tokens[rows, place] = tokens
        self.logprobs[rows, place] = logprobs
        self.done += 1

    def taken(self, ring: np.ndarray, since: int) -> list:
        """What a request's ring holds of the steps from `since` on."""
        begin = since % self.width
        end = self.done % self.width
        if begin < end:
            return ring[begin:end].tolist()
        return ring[begin:].tolist() + ring[:end].tolist()

    def remove(self, rows) -> None:
        """Requests leave. Lists are made anew: steps that are on the way still hold the old ones."""
        for row in rows:
            del self.rows[self.requests[row].request_id]
        self.left = column(self.rows.values())
        self.names = list(self.rows)
        self.counts = dict.fromkeys(self.rows, 1)


def column(numbers) -> np.ndarray:
    """Whole numbers as an array."""
    return np.fromiter(numbers, np.int64)


def stop_tokens(requests: list) -> set[int]:
    """Tokens that may end one of the requests."""
    tokens = set()
    for r in requests:
        tokens.add(r.sampling_params.eos_token_id)
        tokens.update(r.sampling_params.stop_token_ids or ())
    return tokens - {None}


class CohortScheduler:
    """What a scheduler does with its cohort. All else that it uses is scheduler.LeanScheduler's, or vLLM's."""

    cohort: Cohort | None

    def schedule_cohort(self) -> "SchedulerOutput | None":
        """A step of the cohort; None when other requests wait, or blocks are few."""
        c = self.cohort
        if len(self.requests) != len(self.running):
            return None
        ending = c.at_their_end()
        if len(ending):
            self.leave(ending)
        num = len(c.left)
        if num == 0 or num > self.max_num_scheduled_tokens or not self.has_blocks(2 * Cohort.AHEAD * num):
            return None
        self.kv_cache_manager.new_step_starts()
        computed = c.computed[c.left] + c.scheduled
        blocks = [None] * num
        for place in c.short_of_room(computed):
            blocks[place] = self.give_blocks(c.left[place], computed[place])
        outputs = c.outputs[c.left] + c.scheduled
        output = self.decode_output(c.names, blocks, computed.tolist(), outputs.tolist(), c.counts, {})
        c.scheduled += 1
        c.last_sequence = getattr(self, "sched_step_seq", 0)
        c.last_step = self.current_step
        output.cohort = c, c.left, c.names  # for take_together, when the tokens are there
        return output

    def give_blocks(self, row: int, computed: int) -> tuple:
        """Blocks for the next token of a request of the cohort and for those after it: their ids."""
        c = self.cohort
        self.settle(row)
        ahead = Cohort.AHEAD * self.every - 1  # tokens beyond the next one
        room = self.kv_cache_manager.allocate_slots(c.requests[row], 1, num_lookahead_tokens=ahead)
        assert room is not None, "the KV cache had room for fewer blocks than it said"
        c.room[row] = ceil_div(computed + 1 + ahead, self.every) * self.every
        return room.get_block_ids(allow_none=True)

    def take_together(self, scheduled: "SchedulerOutput", results) -> dict[str, int] | None:
        """Take a cohort's tokens of a step, but for those that may end a request.

        Returns token counts of the requests that remain for the loop over requests: these, and those that have left the
        cohort since the step was scheduled. None when the step is not this cohort's.
        """
        c, rows, names = getattr(scheduled, "cohort", (None, None, None))
        if c is None or c is not self.cohort:
            return None
        tokens = list(chain.from_iterable(results.sampled_token_ids))
        one_each = len(tokens) == len(results.sampled_token_ids) == len(rows)
        if not one_each or results.logprobs is None or results.logprobs.cu_num_generated_tokens:
            self.dissolve()
            return None
        # The model may have put the requests in another order.
        order = slice(None)
        if results.req_ids != names:
            order = [results.req_id_to_index[name] for name in names]
        tokens = np.array(tokens)[order]
        logprobs = results.logprobs.logprobs[:, 0][order]
        ends = np.isin(tokens, c.stops) | (c.steps[rows] <= c.done + 1)
        gone = np.zeros(len(rows), bool) if rows is c.left else ~np.isin(rows, c.left)  # they have left meanwhile
        leaving = ends & ~gone
        if leaving.any():
            self.leave(rows[leaving])
        stay = ~(ends | gone)
        c.put(rows[stay], tokens[stay], logprobs[stay])
        return {names[i]: 1 for i in np.flatnonzero(~stay)}

    def settle(self, row: int) -> None:
        """Tell a request of the cohort which steps were scheduled and which tokens came since it was told last."""
        c = self.cohort
        r = c.requests[row]
        known_scheduled, known_done = c.known[row]
        c.known[row] = c.scheduled, c.done
        num_scheduled = c.scheduled - known_scheduled
        num_done = c.done - known_done
        if num_scheduled:
            coming = num_scheduled - num_done
            r.num_computed_tokens += num_scheduled
            r.num_in_flight_tokens += coming
            if self.defer_block_free:
                r.last_sched_seq = c.last_sequence
            if self.asynchronous:
                r.num_output_placeholders += coming
                r.next_decode_eligible_step = c.last_step + 1
        if num_done:
            tokens = c.taken(c.tokens[row], known_done)
            r._output_token_ids.extend(tokens)
            r._all_token_ids.extend(tokens)
            r.logprobs.extend(c.taken(c.logprobs[row], known_done))
            r.update_block_hashes()
            self.kv_cache_manager.cache_blocks(r, r.num_computed_tokens - r.num_output_placeholders)

    def leave(self, rows: Iterable[int]) -> None:
        """Requests leave the cohort, knowing all that it knows of them."""
        for row in rows:
            self.settle(row)
        self.cohort.remove(rows)

    def dissolve(self) -> None:
        """End the cohort: vLLM and the short loop see in the requests all that was in its arrays."""
        if self.cohort:
            for row in self.cohort.left:
                self.settle(row)
            self.cohort = None
            self.steady = []
