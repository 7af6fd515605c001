"""The order in which an engine serves its requests."""

from __future__ import annotations

import math
import time

from vllm.v1.request import Request

from loomserve.platform.engine.scheduling.costs import EngineCosts
from loomserve.platform.engine.scheduling.gated_queue import GatedQueue
from loomserve.platform.engine.scheduling.swap_space import SwapSpace
from loomserve.platform.scheduling.options import SchedulerOptions
from loomserve.platform.scheduling.policy.hints import RequestHints
from loomserve.platform.scheduling.policy.queue import QueuedRequest, QueuePolicy

# Per step, sort only the first so many waiting requests and new arrivals; sort the whole queue so
# seldom that it takes this share of the time.
_HEAD, _ORDERING_SHARE = 32, 0.001
# Nothing is on its way from the front end for so long, unless the time of day has stepped.
_LONGEST_WAY_S = 10.0
# By what share the mean step must change until predictions made with it are made anew.
_CHANGED = 0.1


class QueueOrder:
    """Sorts running and waiting requests by the queue's policy. What it finds out about a request
    is kept until the request's tokens change."""

    def __init__(self, costs: EngineCosts, swap: SwapSpace) -> None:
        self._costs = costs
        self._swap = swap
        self._queued: dict[str, tuple[int, int, QueuedRequest]] = {}
        self._hints: dict[str, RequestHints] = {}
        self._out_of_turn: set[str] = set()
        """Requests that do not stand where they arrived."""
        self._token_s = 0.0
        self._arrived: dict[str, float] = {}
        self._newcomers = 0
        self._sort_all_at = -math.inf

    def use(self, options: SchedulerOptions, *, foresees: bool) -> None:
        self._options = options
        self._foresees = foresees
        self._policy = options.queue_policy()
        self._priority = self._policy.priority
        self._tells_ends = type(self._policy).ended is not QueuePolicy.ended
        # Some were looked at without their deadlines.
        self._queued.clear()

    def on_arrival(self, request: Request) -> None:
        """Note that a request was added to the end of the waiting queue."""
        self._newcomers += 1
        self._arrived.setdefault(request.request_id, _arrived_s(request))

    def forget(self, request: Request) -> None:
        if self._tells_ends:
            self._policy.ended(self.seen(request))
        self._queued.pop(request.request_id, None)
        self._hints.pop(request.request_id, None)
        self._out_of_turn.discard(request.request_id)
        self._arrived.pop(request.request_id, None)

    def on_step(self, mean_step_s: float) -> None:
        """Learn the mean step, in which each running request generates a token."""
        if abs(mean_step_s - self._token_s) > _CHANGED * self._token_s:
            self._token_s = mean_step_s
            # They hold predictions made with the old mean.
            self._queued.clear()

    @property
    def _stays_as_it_is(self) -> bool:
        """Whether vLLM's own order is kept, of requests that are all alike."""
        return self._policy.as_they_came and not self._out_of_turn

    def sort_running(self, running: list[Request], now: float) -> None:
        if self._stays_as_it_is:
            return
        running.sort(key=lambda request: self.rank(request, now))

    def sort_waiting(self, waiting: GatedQueue, now: float) -> None:
        """Sort the queue's head, where preempted requests are, and its new arrivals into it.
        Priorities of the others change slowly, and a long queue is all that there is to decide."""
        # vLLM's own order is not found again from a part of it.
        if self._stays_as_it_is:
            self._newcomers = 0
            return
        begin = time.perf_counter()
        whole = begin >= self._sort_all_at or self._policy.as_they_came
        new = waiting.take_last(min(self._newcomers, len(waiting)))
        head = waiting.take_first(len(waiting) if whole else min(_HEAD, len(waiting)))
        waiting.put_first(sorted([*head, *new], key=lambda request: self.rank(request, now)))
        self._newcomers = 0
        if whole:
            end = time.perf_counter()
            self._sort_all_at = end + (end - begin) / _ORDERING_SHARE

    def rank(self, request: Request, now: float) -> tuple[object, ...]:
        """Sort key: the least is served first and preempted last."""
        if self._policy.as_they_came:
            # Else the order is that of vLLM: what was preempted comes first.
            return (self.hints(request).background, request.priority)
        seen = self.seen(request)
        # What is swapped out comes back first, or swap space would stay full behind newer ones.
        later = self._foresees and request.request_id not in self._swap
        priority = self._priority(seen, now)
        # What its client said comes before what is found out here.
        asked = (seen.background, request.priority)
        return *asked, later, -priority, seen.arrived_s, request.request_id

    def priority(self, request: Request, now: float) -> float:
        return self._priority(self.seen(request), now)

    def is_background(self, request: Request) -> bool:
        return self.hints(request).background

    def seen(self, request: Request) -> QueuedRequest:
        tokens, computed = request.num_tokens, request.num_computed_tokens
        known = self._queued.get(request.request_id)
        if known is None or known[0] != tokens or known[1] != computed:
            known = tokens, computed, self._look_at(request)
            self._queued[request.request_id] = known
        return known[2]

    def hints(self, request: Request) -> RequestHints:
        hints = self._hints.get(request.request_id)
        if hints is None:
            parameters = request.sampling_params
            hints = RequestHints.of(parameters.extra_args if parameters else None)
            self._hints[request.request_id] = hints
            if hints.background or request.priority:
                self._out_of_turn.add(request.request_id)
        return hints

    def _look_at(self, request: Request) -> QueuedRequest:
        swapped = self._swap.tokens_of(request.request_id)
        done = request.num_computed_tokens if swapped is None else swapped
        expected, deadline_s, background = self.hints(request)
        answer, tokens = request.max_tokens, request.num_tokens
        if expected is not None:
            answer = expected.answer(request.num_output_tokens, answer)
            tokens = request.num_prompt_tokens + answer
        return QueuedRequest(
            arrived_s=self._arrived.setdefault(request.request_id, _arrived_s(request)),
            tokens=tokens,
            left=request.num_prompt_tokens + answer - done,
            left_s=0.0 if expected is None else self._left_s(request, done, answer),
            deadline_s=deadline_s if self._options.deadlines else None,
            background=background,
        )

    def _left_s(self, request: Request, done: int, answer: int) -> float:
        """Predicted seconds until the request ends once it runs: its prefill, then its steps."""
        if not self._policy.asks_left_s:
            return 0.0
        to_compute = request.num_tokens - done
        prefill_s = self._costs.prefill_s(to_compute) if to_compute > 1 else 0.0
        to_generate: int = answer - request.num_output_tokens
        return prefill_s + to_generate * self._token_s


def _arrived_s(request: Request) -> float:
    """When the request came, in monotonic seconds; vLLM's front end notes the time of day."""
    under_way_s: float = time.time() - request.arrival_time
    return time.monotonic() - min(max(under_way_s, 0.0), _LONGEST_WAY_S)
