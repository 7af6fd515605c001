"""vLLM's scheduler with our order of requests and our ways out of memory.

vLLM's own loops stay as they are: they serve ``running`` from its head, admit from the head of
``waiting``, and preempt the tail of ``running`` when a block is missing. Here both are put in
order before each step, and what is preempted may leave its KV in the KV store. The decisions are
those of :mod:`loomserve.platform.scheduling`; the options come as ``SchedulerOptions`` in vLLM's
``additional_config``.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from loomserve.kvstore.engine.connector import StoreConnector
from loomserve.kvstore.engine.connector_scheduler import StoreConnectorScheduler
from loomserve.kvstore.engine.messages import Transferred
from loomserve.kvstore.engine.scheduling_stats import SchedulingStats
from loomserve.platform.costs import profile
from loomserve.platform.engine.kv_blocks import block_bytes
from loomserve.platform.engine.profiling.profile_key import profile_key, weights_digest
from loomserve.platform.engine.profiling.step_timing import StepClock
from loomserve.platform.scheduling.options import ADDITIONAL_CONFIG, SchedulerOptions
from loomserve.platform.scheduling.policy.admission import Candidate, never_computed_twice, start
from loomserve.platform.scheduling.policy.background import is_background
from loomserve.platform.scheduling.policy.deadline import deadline_of
from loomserve.platform.scheduling.policy.expected import Expected, expected_of
from loomserve.platform.scheduling.policy.peak import Growing, PastAnswers, fitting
from loomserve.platform.scheduling.policy.preemption import PREEMPTIONS, Victim, Way
from loomserve.platform.scheduling.policy.queue import QUEUES, QueuedRequest

# vLLM's placeholder in block tables, where a sliding window has passed.
_NULL_BLOCK = 0
# Of a longer queue only so many are put in order in each step, beside those that are new; all of
# them so often that it takes this share of the time.
_HEAD, _ORDERING_SHARE = 32, 0.001
# Weight of the newest step in the mean; and by what share the mean must move to be told again.
_NEWEST, _MOVED = 0.1, 0.1
# Of a step's time, for saving blocks beside it; what is waited for lengthens the mean step.
_HIDING = 0.8
# A link that was too slow for that is tried again after so long.
_LOOK_AGAIN_S = 10.0
_TOTALS = (
    "swapped_out", "swapped_in", "recomputed", "lost_tokens", "decision_s", "step_s",
    "step_predicted_s", "out_s", "out_predicted_s", "in_s", "in_predicted_s",
)  # fmt: skip


def make_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> AdaptiveScheduler:
    """What ``scheduler_cls`` names: as asynchronous as vLLM's own would be."""
    asynchronous = vllm_config.scheduler_config.async_scheduling
    kind = AsyncAdaptiveScheduler if asynchronous else AdaptiveScheduler
    return kind(vllm_config=vllm_config, **kwargs)


class Told(NamedTuple):
    """What a request says of itself."""

    expected: Expected | None
    deadline_s: float | None
    background: bool


class Swapped(NamedTuple):
    """What a preempted request left in swap space."""

    tokens: int
    size: int


class AdaptiveScheduler(Scheduler):  # type: ignore[misc]
    """AdaptiveLLM's scheduling of memory and requests (sections 3.4 and 3.5) in vLLM's steps."""

    running: list[Request]
    waiting: RequestQueue
    max_num_running_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._queued: dict[str, tuple[int, int, QueuedRequest]] = {}
        self._told: dict[str, Told] = {}
        self._mean_step_s = self._token_s = 0.0
        self._swapped: dict[str, Swapped] = {}
        self._block_bytes = self._bytes_of_a_block()
        self.step_times, self.transfer_times = profile.load(
            weights_digest(self.vllm_config), profile_key(self.vllm_config)
        )
        self._copied_out_at = -math.inf
        self._clock = StepClock()
        self._nothing_started = False
        self._made_way: set[Request] = set()
        self._newcomers = 0
        self._whole_order_due = -math.inf
        self._totals = dict.fromkeys(_TOTALS, 0.0)
        self._reader = self._connected()
        given = self.vllm_config.additional_config.get(ADDITIONAL_CONFIG, {})
        self.use(SchedulerOptions.model_validate(given))

    def use(self, options: SchedulerOptions) -> None:
        """Decide by these options from now on; requests that are swapped out stay so."""
        self.options = options
        self._priority = QUEUES[options.queue]
        self._way_out = PREEMPTIONS[options.preemption]
        self._foresees = (
            options.preemption == "adaptive" and options.peak_admission and self._holds_all_tokens
        )
        self._past_answers = PastAnswers()
        # What was said of deadlines may have been left out.
        self._queued.clear()

    def _bytes_of_a_block(self) -> int:
        """In the KV store: of all layers, on all ranks."""
        return block_bytes(self.kv_cache_config) * int(self.parallel_config.world_size)

    @property
    def _holds_all_tokens(self) -> bool:
        """Whether a request's KV grows with each of its tokens, which no window limits."""
        groups = self.kv_cache_config.kv_cache_groups
        return len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)

    def _connected(self) -> StoreConnectorScheduler | None:
        """The KV store connector's half in EngineCore, if this engine has one."""
        if not isinstance(self.connector, StoreConnector):
            return None
        half = self.connector.connector_scheduler
        half.policy = AdaptiveTransfers(self)
        return half

    # One step

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        begin = time.perf_counter()
        now = time.time()
        self._put_in_order(now)
        if self._make_way():
            self._put_in_order(now)
        with self._starting(now, begin):
            scheduled = super().schedule(throttle_prefills)
        self._note_swap_ins(scheduled)
        self._clock.began(scheduled, time.perf_counter())
        return scheduled

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        now = time.perf_counter()
        timed = self._clock.ended(scheduler_output, now)
        if timed is not None:
            step, seconds = timed
            self._totals["step_s"] += seconds
            self._totals["step_predicted_s"] += self.step_times.observe(step, seconds)
            self._note_pace(seconds)
            self._totals["decision_s"] += time.perf_counter() - now
        return super().update_from_output(scheduler_output, *args)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            self._past_answers.note(request.num_output_tokens)
        self._queued.pop(request.request_id, None)
        self._told.pop(request.request_id, None)
        self._swapped.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    # The queues

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._newcomers += 1

    def _put_in_order(self, now: float) -> None:
        self._put_running_in_order(now)
        if self.waiting and len(self.running) < self.max_num_running_reqs:
            self._put_waiting_in_order(now)

    def _put_running_in_order(self, now: float) -> None:
        self.running.sort(key=lambda request: self._place(request, now))

    def _put_waiting_in_order(self, now: float) -> None:
        """Its head, where what has left memory is too, and its tail, where what is new is.

        Priorities of the others change slowly, and a long queue is all that there is to decide.
        """
        begin = time.perf_counter()
        waiting = self.waiting
        # vLLM's own order is not found again from a part of it.
        whole = begin >= self._whole_order_due or self.options.queue == "fcfs"
        new = [waiting.pop() for _ in range(min(self._newcomers, len(waiting)))]
        looked_at = len(waiting) if whole else min(_HEAD, len(waiting))
        head = [waiting.popleft() for _ in range(looked_at)]
        in_order = sorted([*head, *reversed(new)], key=lambda request: self._place(request, now))
        waiting.extendleft(reversed(in_order))
        self._newcomers = 0
        if whole:
            end = time.perf_counter()
            self._whole_order_due = end + (end - begin) / _ORDERING_SHARE

    def _make_way(self) -> bool:
        """Whether background requests have left their places and memory to others that wait."""
        self._made_way.clear()
        if not (self.waiting and self.running and self._seen(self.running[-1]).background):
            return False
        others = [r for r in self.waiting if not self._seen(r).background]
        while others and self.running and self._seen(self.running[-1]).background:
            places = self.max_num_running_reqs - len(self.running)
            free = self.kv_cache_manager.block_pool.get_num_free_blocks()
            if places >= len(others) and free >= self._blocks_for(others[0].num_tokens + 1):
                break
            request = self.running.pop()
            self._made_way.add(request)
            self._preempt_request(request, time.monotonic())
        return bool(self._made_way)

    def _place(self, request: Request, now: float) -> tuple[object, ...]:
        if self.options.queue == "fcfs":
            # Else the order is that of vLLM: what was preempted comes first.
            return (self._told_by(request).background,)
        seen = self._seen(request)
        # What is swapped out comes back first, or swap space would stay full behind newer ones.
        later = self._foresees and request.request_id not in self._swapped
        priority = self._priority(seen, now)
        return seen.background, later, -priority, request.arrival_time, request.request_id

    def _seen(self, request: Request) -> QueuedRequest:
        tokens, computed = request.num_tokens, request.num_computed_tokens
        known = self._queued.get(request.request_id)
        if known is None or known[0] != tokens or known[1] != computed:
            known = tokens, computed, self._look_at(request)
            self._queued[request.request_id] = known
        return known[2]

    def _look_at(self, request: Request) -> QueuedRequest:
        swapped = self._swapped.get(request.request_id)
        done = swapped.tokens if swapped else request.num_computed_tokens
        expected, deadline_s, background = self._told_by(request)
        answer, tokens = request.max_tokens, request.num_tokens
        if expected is not None:
            answer = expected.answer(request.num_output_tokens, answer)
            tokens = request.num_prompt_tokens + answer
        return QueuedRequest(
            arrived_s=request.arrival_time,
            tokens=tokens,
            left=request.num_prompt_tokens + answer - done,
            left_s=0.0 if expected is None else self._left_s(request, done, answer),
            deadline_s=deadline_s if self.options.deadlines else None,
            background=background,
        )

    def _told_by(self, request: Request) -> Told:
        told = self._told.get(request.request_id)
        if told is None:
            parameters = request.sampling_params
            extra = parameters.extra_args if parameters else None
            told = Told(expected_of(extra), deadline_of(extra), is_background(extra))
            self._told[request.request_id] = told
        return told

    def _left_s(self, request: Request, done: int, answer: int) -> float:
        """Predicted time to its end once it runs: what is to be computed, and then a step each."""
        if self.options.queue != "deadline":
            return 0.0
        to_compute = request.num_tokens - done
        prefill_s = self._prefill_s(to_compute) if to_compute > 1 else 0.0
        to_generate: int = answer - request.num_output_tokens
        return prefill_s + to_generate * self._token_s

    def _note_pace(self, seconds: float) -> None:
        mean = self._mean_step_s
        self._mean_step_s = mean = mean + _NEWEST * (seconds - mean) if mean else seconds
        if abs(mean - self._token_s) > _MOVED * self._token_s:
            self._token_s = mean
            # What was predicted at the old pace.
            self._queued.clear()

    # Who starts

    @contextmanager
    def _starting(self, now: float, begin: float) -> Iterator[None]:
        """Let vLLM see what may run in this step; all else is back afterwards."""
        queue, most, sit_out = self.waiting, self.max_num_running_reqs, list[Request]()
        if self._restricted:
            may_start = self._admissible(now)
            if not self.options.chunked_recompute:
                may_start, sit_out = self._prompts_apart(may_start, now)
            self.waiting = create_request_queue(self.policy)
            for request in may_start:
                queue.remove_request(request)
                self.waiting.add_request(request)
        self._totals["decision_s"] += time.perf_counter() - begin
        yield
        begin = time.perf_counter()
        self.max_num_running_reqs = most
        self._nothing_started = bool(sit_out) and not self.running
        self.running = sit_out + self.running
        if self.waiting is not queue:
            # Who has left memory, and who may have started next.
            queue.extendleft(reversed(self.waiting))
            self.waiting = queue
        self._totals["decision_s"] += time.perf_counter() - begin

    @property
    def _restricted(self) -> bool:
        """Whether some requests may not start though a place is free."""
        options = self.options
        return bool(
            self._foresees
            or self._made_way
            or options.preemption == "swap"
            or not options.chunked_recompute
        )

    def _admissible(self, now: float) -> list[Request]:
        """Waiting requests that may start, in their order."""
        most, places = len(self.waiting), max(0, self.max_num_running_reqs - len(self.running))
        if self._foresees and self.options.chunked_recompute:
            # The first ones do, and each takes a block at least.
            most = min(places, self.kv_cache_manager.block_pool.get_num_free_blocks())
        # Who resumes in the step that preempts it may be given its tokens out of order.
        waiting = [each for each in islice(self.waiting, most) if each not in self._made_way]
        if self.options.preemption == "swap":
            chosen = never_computed_twice(
                (self._candidate(request, now) for request in waiting),
                sum(request.request_id in self._swapped for request in waiting),
                [self._most_blocks(request) for request in self._started()],
                self._blocks,
                self.options.swap_bytes // self._block_bytes,
            )
            return [waiting[at] for at in chosen]
        return waiting[: self._fitting(waiting[:places])] if self._foresees else waiting

    def _prompts_apart(
        self, waiting: list[Request], now: float
    ) -> tuple[list[Request], list[Request]]:
        """Who starts where prompts have steps of their own; and who of the running sits it out."""
        if prefilling := [request for request in self.running if request.is_prefill_chunk]:
            return [], self._only(prefilling)
        starting = start(
            [self._candidate(request, now) for request in waiting],
            self.kv_cache_manager.block_pool.get_num_free_blocks(),
            self.max_num_running_reqs - len(self.running),
        )
        if starting.prefill and self._nothing_started:
            # It did not fit after all.
            return [], []
        chosen = [waiting[at] for at in starting.chosen]
        return chosen, self._only([]) if starting.prefill else []

    def _fitting(self, waiting: Sequence[Request]) -> int:
        """How many of them memory is expected to have room for until all have ended."""
        if not waiting:
            return 0
        loading = [request for request in self.skipped_waiting if request.num_computed_tokens]
        started = [*self.running, *loading]
        held = sum(self._blocks_for(request.num_computed_tokens) for request in started)
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return fitting(
            (self._growing(each, self._shared_tokens(each)) for each in waiting),
            [self._growing(request, 0) for request in started],
            (free + held + self._swap_room(held, len(started))) * self.block_size,
            self.block_size,
        )

    def _swap_room(self, held: int, requests: int) -> int:
        """Blocks that swap space takes instead, where that is quicker than to compute them again.

        Then memory may stay full: what leaves costs two copies. Of requests that hold ``held``
        blocks together.
        """
        if not requests or self._reader is None:
            return 0
        if not self._worth_swapping(held * self.block_size // requests):
            return 0
        return (self.options.swap_bytes - self._swap_used()) // self._block_bytes

    def _growing(self, request: Request, shared: int) -> Growing:
        generated, longest = request.num_output_tokens, request.max_tokens
        expected, _, background = self._told_by(request)
        if expected is None:
            left = self._past_answers.left(generated, longest)
        else:
            left = expected.answer(generated, longest) - generated
        return Growing(request.num_tokens - shared, left, background)

    def _shared_tokens(self, request: Request) -> int:
        """At its beginning, whose KV running requests hold anyway."""
        blocks, _, _ = self.kv_cache_manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        shared: int = sum(block.ref_cnt > 0 for block in blocks[0]) * self.block_size
        return shared

    def _only(self, running: list[Request]) -> list[Request]:
        hidden = [request for request in self.running if request not in running]
        self.running = running
        self.max_num_running_reqs -= len(hidden)
        return hidden

    def _candidate(self, request: Request, now: float) -> Candidate:
        swapped = self._swapped.get(request.request_id)
        tokens = swapped.tokens + 1 if swapped else request.num_tokens
        return Candidate(
            priority=self._priority(self._seen(request), now),
            blocks=self._blocks_for(tokens),
            most_blocks=self._most_blocks(request),
            swapped=swapped is not None,
        )

    def _started(self) -> Iterator[Request]:
        """Requests whose KV is in the engine's memory, or in swap space, or between the two."""
        yield from self.running
        yield from (request for request in self.skipped_waiting if request.num_computed_tokens)
        yield from (self.requests[name] for name in self._swapped)

    def _most_blocks(self, request: Request) -> int:
        tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        return self._blocks_for(tokens)

    def _blocks_for(self, tokens: int) -> int:
        size: int = self.block_size
        return -(-tokens // size)

    @property
    def _blocks(self) -> int:
        """Of the engine's memory, but for vLLM's placeholder."""
        return int(self.kv_cache_manager.block_pool.num_gpu_blocks) - 1

    # Who leaves, and how

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        begin = time.perf_counter()
        # Whoever resets the prefix cache does not want its KV kept.
        if drop_stale_output or not self._swap_out(request):
            self._totals["recomputed"] += 1
        self._totals["decision_s"] += time.perf_counter() - begin
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _swap_out(self, request: Request) -> bool:
        """Whether the request's KV goes to swap space; else it is computed again."""
        # What a step in flight computes is not known here.
        tokens = request.num_computed_tokens - request.num_in_flight_tokens
        if self._reader is None or tokens <= 0 or request.skip_reading_prefix_cache:
            return False
        table: Sequence[int] = self.kv_cache_manager.get_block_ids(request.request_id)[0]
        blocks = list(table[: self._blocks_for(tokens)])
        if _NULL_BLOCK in blocks:
            return False
        size = len(blocks) * self._block_bytes
        unsaved = self._reader.unsaved_blocks(request, tokens) * self._block_bytes
        recompute_s = self._prefill_s(tokens)
        swap_s = self.transfer_times.out_s(unsaved) + self.transfer_times.in_s(size)
        free = self.options.swap_bytes - self._swap_used()
        if self._way_out(Victim(size, swap_s, recompute_s), free) is not Way.SWAP:
            return False
        self._reader.swap_out(request, tokens, blocks, recompute_s, time.monotonic())
        self._swapped[request.request_id] = Swapped(tokens, size)
        self._totals["swapped_out"] += 1
        return True

    def _note_swap_ins(self, scheduled: SchedulerOutput) -> None:
        for name in list(self._swapped):
            request = self.requests[name]
            if request.status in (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS):
                tokens, _ = self._swapped.pop(name)
                found = request.num_computed_tokens - scheduled.num_scheduled_tokens.get(name, 0)
                self._totals["swapped_in"] += 1
                self._totals["lost_tokens"] += max(0, tokens - found)

    def _swap_used(self) -> int:
        return sum(swapped.size for swapped in self._swapped.values())

    # What it costs

    def _prefill_s(self, tokens: int) -> float:
        return self.step_times.prefill_s(tokens, self.max_num_scheduled_tokens)

    def _worth_swapping(self, tokens: int) -> bool:
        """Out and in again; of a request that holds so many."""
        size = self._blocks_for(tokens) * self._block_bytes
        times = self.transfer_times
        return times.out_s(size) + times.in_s(size) < self._prefill_s(tokens)

    def in_own_memory(self, request: Request) -> bool:
        """Whether the request's blocks are in this engine's memory."""
        return True

    def worth_loading(self, tokens: int) -> bool:
        size = self._blocks_for(tokens) * self._block_bytes
        return self.transfer_times.in_s(size) < self._prefill_s(tokens)

    def early_blocks(self, tokens: int) -> int:
        """As many as are copied while a step of so many tokens is computed."""
        if not self.options.overlap_swap:
            return 0
        if not self._mean_step_s:
            return sys.maxsize
        step_s = _HIDING * max(self._mean_step_s, self._prefill_s(tokens))
        hidden = int(step_s / self.transfer_times.out_s(self._block_bytes))
        # Now and then one, or nobody would see that the link has become faster.
        return max(hidden, int(time.monotonic() - self._copied_out_at > _LOOK_AGAIN_S))

    def on_transfer(self, done: Transferred) -> None:
        times = self.transfer_times
        if done.out_bytes:
            self._copied_out_at = time.monotonic()
            self._totals["out_s"] += done.out_s
            self._totals["out_predicted_s"] += times.out_s(done.out_bytes)
            times.observe_out(done.out_bytes, done.out_s)
        if done.in_bytes:
            self._totals["in_s"] += done.in_s
            self._totals["in_predicted_s"] += times.in_s(done.in_bytes)
            times.observe_in(done.in_bytes, done.in_s)

    def stats(self) -> SchedulingStats:
        times = self.transfer_times
        return SchedulingStats.of(
            {
                **self._totals,
                "preemption": self.options.preemption,
                "queue": self.options.queue,
                "swap_used_bytes": self._swap_used(),
                "swap_capacity_bytes": self.options.swap_bytes,
                "step_time_error": self.step_times.error or None,
                "swap_time_error": max(times.out_error, times.in_error) or None,
            }
        )


class AdaptiveTransfers:
    """The connector's policy under an adaptive scheduler."""

    def __init__(self, scheduler: AdaptiveScheduler) -> None:
        self.early_blocks = scheduler.early_blocks
        self.in_own_memory = scheduler.in_own_memory
        self.worth_loading = scheduler.worth_loading
        self.on_transfer = scheduler.on_transfer
        self.stats = scheduler.stats
        self._scheduler = scheduler

    @property
    def prefetches(self) -> bool:
        return self._scheduler.options.prefetch_swap_in


class AsyncAdaptiveScheduler(AdaptiveScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same with a step in flight while the next is scheduled."""
