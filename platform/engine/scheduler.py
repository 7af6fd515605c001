"""vLLM's scheduler with our order of requests, and two ways to preempt them.

vLLM's own loops stay as they are: they serve ``running`` from its head, admit from the head of
``waiting``, and preempt the tail of ``running`` when a block is missing. Here both are put in order
before each step, and what is preempted may leave its KV in the KV store. The decisions are those of
:mod:`loomserve.platform.scheduling`; the options come as ``SchedulerOptions`` in vLLM's
``additional_config``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from loomserve.kvstore.engine.connector import StoreConnector
from loomserve.platform.costs import profile
from loomserve.platform.engine.profiling.profile_key import profile_key, weights_digest
from loomserve.platform.engine.profiling.step_timing import StepClock
from loomserve.platform.engine.resumption.scheduling import ResumedRequests
from loomserve.platform.engine.scheduler_calls import SchedulerCalls
from loomserve.platform.engine.scheduling.admission import Admission
from loomserve.platform.engine.scheduling.costs import EngineCosts, block_bytes
from loomserve.platform.engine.scheduling.device_time import DeviceTime
from loomserve.platform.engine.scheduling.gated_queue import GatedQueue, WaitingScheduler
from loomserve.platform.engine.scheduling.order import QueueOrder
from loomserve.platform.engine.scheduling.step_hooks import StepHooks
from loomserve.platform.engine.scheduling.swap_space import SwapSpace
from loomserve.platform.run.fate import end_with_parent
from loomserve.platform.scheduling.options import ADDITIONAL_CONFIG, SchedulerOptions


def make_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> AdaptiveScheduler:
    """What ``scheduler_cls`` names: as asynchronous as vLLM's own would be."""
    # vLLM's own executors have not asked for it.
    end_with_parent()
    asynchronous = vllm_config.scheduler_config.async_scheduling
    kind = AsyncAdaptiveScheduler if asynchronous else AdaptiveScheduler
    return kind(vllm_config=vllm_config, **kwargs)


class AdaptiveScheduler(WaitingScheduler):
    """AdaptiveLLM's scheduling of memory and requests (sections 3.4 and 3.5) in vLLM's steps.

    It overrides vLLM's steps, and leaves decisions to its parts: :class:`QueueOrder` sorts,
    :class:`Admission` lets start, :class:`SwapSpace` takes what is preempted. Others take part in
    its steps as ``hooks``.
    """

    running: list[Request]
    waiting: GatedQueue
    max_model_len: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waiting = GatedQueue()
        self.hooks: tuple[StepHooks, ...] = ()
        self.calls: SchedulerCalls | None = None
        """Calls from outside that the hooks answer."""
        self.step_began = 0.0
        step_times, transfer_times = profile.load(
            weights_digest(self.vllm_config), profile_key(self.vllm_config)
        )
        self.costs = EngineCosts(
            step_times,
            transfer_times,
            block_size=self.block_size,
            # In the KV store a block is that of all ranks.
            block_bytes=block_bytes(self.kv_cache_config) * int(self.parallel_config.world_size),
            step_tokens=self.max_num_scheduled_tokens,
        )
        stored = isinstance(self.connector, StoreConnector)
        half = self.connector.connector_scheduler if stored else None
        self.swap = SwapSpace(half, self.costs, self._in_own_memory)
        if half is not None:
            half.policy = self.swap
        self.order = QueueOrder(self.costs, self.swap)
        self.admission = Admission(self, self.order, self.swap, self.costs)
        self._resumed = ResumedRequests(self.structured_output_manager)
        self._clock = StepClock()
        self._device_time = DeviceTime()
        self._made_way: set[Request] = set()
        given = self.vllm_config.additional_config.get(ADDITIONAL_CONFIG, {})
        self.use(SchedulerOptions.model_validate(given))

    def use(self, options: SchedulerOptions) -> None:
        """Decide by these options from now on; requests that are swapped out stay so."""
        foresees = (
            options.preemption == "adaptive" and options.peak_admission and self._holds_all_tokens
        )
        self.swap.use(options)
        self.order.use(options, foresees=foresees)
        self.admission.use(options, foresees=foresees)

    @property
    def _holds_all_tokens(self) -> bool:
        """Whether a request's KV grows with each of its tokens, which no window limits."""
        groups = self.kv_cache_config.kv_cache_groups
        return len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)

    # One step

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        may_start = True
        for hooks in self.hooks:
            may_start &= hooks.before_schedule()
        self.step_began = time.perf_counter()
        if not (self.waiting or self.admission.restricts):
            # There is nobody to decide about.
            self.admission.nothing_started = False
            self.sort_running()
            return self._timed(throttle_prefills)
        # As in a step in which vLLM itself preempts: who left would take the room it made.
        with nullcontext() if may_start else self.waiting.only([]):
            return self._schedule(throttle_prefills)

    def _schedule(self, throttle_prefills: bool) -> SchedulerOutput:
        begin = time.perf_counter()
        now = time.monotonic()
        self._put_in_order(now)
        if self._make_way():
            self._put_in_order(now)
        with self._starting(now, begin):
            return self._timed(throttle_prefills)

    def _timed(self, throttle_prefills: bool) -> SchedulerOutput:
        scheduled = super().schedule(throttle_prefills)
        self._resumed.started(scheduled)
        self.swap.note_swap_ins(self.requests, scheduled)
        self._clock.began(scheduled, time.perf_counter())
        return scheduled

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        tokens = scheduler_output.total_num_scheduled_tokens
        for hooks in self.hooks:
            hooks.before_update(tokens)
        self._learn(scheduler_output)
        outputs = super().update_from_output(scheduler_output, *args)
        self._device_time.tell(outputs.values())
        for hooks in self.hooks:
            hooks.after_update(tokens)
        return outputs

    def _learn(self, scheduled: SchedulerOutput) -> None:
        now = time.perf_counter()
        timed = self._clock.ended(scheduled, now)
        if scheduled.total_num_scheduled_tokens:
            tokens = scheduled.num_scheduled_tokens
            self._device_time.step(tokens, self._clock.last_s, self.requests)
        if timed is not None:
            step, seconds = timed
            totals = self.swap.totals
            totals["step_s"] += seconds
            self.costs.step_times.observe(step, seconds)
            self.swap.on_step(seconds)
            self.order.on_step(self.swap.mean_step_s)
            totals["decision_s"] += time.perf_counter() - now

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            self.admission.on_answer(request.num_output_tokens)
        self.order.forget(request)
        self.swap.forget(request)
        self._resumed.forget(request)
        self._device_time.ended(request.request_id)
        for hooks in self.hooks:
            hooks.on_free(request)
        return super()._free_request(request, *args, **kwargs)

    def add_request(self, request: Request) -> None:
        resumed = request.request_id not in self.requests and self._resumed.enter(request)
        super().add_request(request)
        # The next step asks whether any is in the background.
        self.order.hints(request)
        if not resumed:
            self.order.on_arrival(request)
            return
        # Its front end knows that it was queued, by another engine.
        request.events.clear()
        if request not in self.deferred:
            # Before all others, as what is preempted here.
            self.waiting.put_first(self.waiting.take_last(1))

    def may_start(self, request: Request, unblocked: Callable[[Request], bool]) -> bool:
        waited_for = request.status
        if not unblocked(request):
            return False
        if self._resumed.promoted(request, waited_for):
            return True
        self.grammar_compile_error_reqs.add(request.request_id)
        return False

    def _put_in_order(self, now: float) -> None:
        self.order.sort_running(self.running, now)
        if self.waiting and len(self.running) < self.most_running:
            self.order.sort_waiting(self.waiting, now)

    def _make_way(self) -> bool:
        """Preempt background requests for others that wait; returns whether any was."""
        self._made_way.clear()
        if not (self.waiting and self._background_runs()):
            return False
        blocked = self.blocked
        others = [
            each
            for each in self.waiting
            if each not in blocked and not self.order.is_background(each)
        ]
        while others and self._background_runs():
            places = self.most_running - len(self.running)
            needed = self.costs.blocks(others[0].num_tokens + 1)
            if places >= len(others) and self.admission.free_blocks() >= needed:
                break
            request = self.running.pop()
            self._made_way.add(request)
            self._preempt_request(request, time.monotonic())
        return bool(self._made_way)

    def _background_runs(self) -> bool:
        return bool(self.running) and self.order.is_background(self.running[-1])

    @contextmanager
    def _starting(self, now: float, begin: float) -> Iterator[None]:
        """Let vLLM see what may run in this step; all else is back afterwards."""
        most, sit_out = self.most_running, list[Request]()
        gate: Any = nullcontext()
        if self.admission.restricts or self._made_way:
            may_start, sit_out = self.admission.chosen(now, self._made_way)
            gate = self.waiting.only(may_start)
        if sit_out:
            self.running = [each for each in self.running if each not in sit_out]
            self.most_running -= len(sit_out)
        with gate:
            self.swap.totals["decision_s"] += time.perf_counter() - begin
            yield
            begin = time.perf_counter()
        self.most_running = most
        self.admission.nothing_started = bool(sit_out) and not self.running
        self.running = sit_out + self.running
        self.swap.totals["decision_s"] += time.perf_counter() - begin

    # Who leaves, and how

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        begin = time.perf_counter()
        # Whoever resets the prefix cache does not want its KV kept.
        if drop_stale_output or not self._kept(request):
            self.swap.totals["recomputed"] += 1
        self.swap.totals["decision_s"] += time.perf_counter() - begin
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _kept(self, request: Request) -> bool:
        if any(hooks.keeps_kv(request) for hooks in self.hooks):
            return True
        table = self.kv_cache_manager.get_block_ids(request.request_id)[0]
        return self._in_own_memory(request) and self.swap.swap_out(request, table)

    def _in_own_memory(self, request: Request) -> bool:
        return all(hooks.in_own_memory(request) for hooks in self.hooks)

    # What hooks ask for

    def preempt(self, request: Request, *, drop_output: bool = False) -> None:
        self.running.remove(request)
        self._preempt_request(request, time.monotonic(), drop_stale_output=drop_output)
        # It may start again in this very step.
        self.prev_step_scheduled_req_ids.discard(request.request_id)

    def sort_running(self) -> None:
        self.order.sort_running(self.running, time.monotonic())

    def most_blocks(self, request: Request) -> int:
        return self.admission.most_blocks(request)

    def is_swapped_out(self, request: Request) -> bool:
        return request.request_id in self.swap


class AsyncAdaptiveScheduler(AdaptiveScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same with a step in flight while the next is scheduled."""
