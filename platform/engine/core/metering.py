"""Measures an engine's load in its own process, without a client's help."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from loomserve.platform.costs.engine_work import EngineWork
from loomserve.platform.engine.turnaround import Turnaround
from loomserve.platform.scheduling.metrics import SCHEDULING, ScheduledRequestMetrics
from loomserve.platform.state import Pace, ReplicaLoad, SchedulingState, WorkState

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

# vLLM's numbers, so that an engine which only simulates need not import it.
SCHEDULED_EVENT, PREEMPTED_EVENT = 2, 3
ABORT_REASON, ERROR_REASON = 2, 3

# Weight of the newest step or request in the moving means: about the last twenty count.
_NEWEST = 0.1
# Two statistics further apart than this do not frame one step: the engine was idle between them.
_LONGEST_STEP_S = 5.0


@dataclass(slots=True)
class _Stay:
    """A request's stay in this engine; monotonic seconds."""

    arrived_at: float
    resumed_tokens: int
    """All its tokens as it came, if it has been answered in part elsewhere; else 0."""
    request: Any
    """vLLM's, which knows what has been generated."""
    answered_before: int
    """Tokens of its answer from elsewhere."""
    scheduled_at: float | None = None
    first_token_at: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0


class CoreMeter:
    """Fed by EngineCore's thread with each request and each step; any thread may ``read``."""

    def __init__(self, most_running: int | None = None) -> None:
        """``most_running``: requests that a step of a GPU may have; None: this is no GPU."""
        self.asleep = False
        """Whether the engine sleeps."""
        self.waiting_tokens = 0
        """Tokens of requests for which they have no KV memory yet; whoever steps counts."""
        self._lock = threading.Lock()
        self._turnaround = Turnaround()
        self._metrics = ScheduledRequestMetrics()
        self._work = EngineWork(most_running)
        self._served = _Means()
        self._stays: dict[str, _Stay] = {}
        self._unanswered: set[str] = set()
        """Requests without a first token."""
        self._arrived = 0
        self._idle_since: float | None = time.monotonic()
        self._running = self._waiting = 0
        self._kv_cache_usage = self._step_time_s = 0.0
        self._last_step_at: float | None = None
        self._scheduling: dict[str, Any] | None = None

    @classmethod
    def of(cls, config: VllmConfig) -> Self:
        on_gpu = config.device_config.device_type == "cuda"
        return cls(config.scheduler_config.max_num_seqs if on_gpu else None)

    def arrived(self, request: Any, now: float) -> None:
        """One of vLLM's requests has come; what it was answered elsewhere is among its tokens."""
        with self._lock:
            self._turnaround.arrived(request.request_id, now)
            before = request.num_output_tokens
            resumed = request.num_tokens if before else 0
            self._stays[request.request_id] = _Stay(now, resumed, request, before)
            self._unanswered.add(request.request_id)
            self._arrived += 1
            self._idle_since = None

    def left(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._turnaround.left(request_id)
                self._stays.pop(request_id, None)
                self._unanswered.discard(request_id)
            self._note_idle(time.monotonic())

    def step(self, outputs: Mapping[int, EngineCoreOutputs], now: float) -> None:
        """A step's outputs, by client. Of most it is enough to sum their tokens up: only first and
        last ones, and those that tell of events, are looked at."""
        with self._lock:
            each = [output for of_one in outputs.values() for output in of_one.outputs]
            told = [of.scheduler_stats for of in outputs.values() if of.scheduler_stats is not None]
            if not told or any(_waiting(stats) for stats in told):
                self._turnaround.answered([output.request_id for output in each])
            generated = sum(map(len, [output.new_token_ids for output in each]))
            computed, first_s = self._note_firsts(each, now) if self._unanswered else (0, 0.0)
            for output in each:
                if output.events:
                    self._note_events(output)
                if output.finish_reason is not None:
                    self._finish(output.request_id, output.finish_reason, now)
            for stats in told:
                self._ended(stats, generated, computed, first_s, now)
            self._note_idle(now)

    def read(self) -> ReplicaLoad:
        with self._lock:
            now, work, figures = time.monotonic(), self._work, self._scheduling
            return ReplicaLoad(
                running=self._running,
                waiting=self._waiting,
                waiting_tokens=self.waiting_tokens,
                kv_cache_usage=self._kv_cache_usage,
                step_time_s=self._step_time_s,
                oldest_waiting_s=self._turnaround.oldest_waiting_s(now),
                weighted_turnaround=self._turnaround.mean_weighted_turnaround,
                pace=self._served.pace,
                scheduling=SchedulingState.model_validate(figures) if figures else None,
                work=WorkState(
                    prefill_s=work.prefill_s,
                    attention_s=work.attention_s,
                    linear_s=work.linear_s,
                    tokens=work.tokens,
                ),
                measured_at=now,
                asleep=self.asleep,
                requests=self._arrived,
                idle_s=0.0 if self._idle_since is None else max(0.0, now - self._idle_since),
            )

    def page(self) -> str:
        """The engine's metrics that its clients cannot know, as Prometheus reads them."""
        with self._lock:
            return self._metrics.page(self._turnaround.oldest_waiting_s(time.monotonic()))

    def _note_idle(self, now: float) -> None:
        if self._idle_since is None and not self._stays:
            self._idle_since = now

    def _ended(
        self, stats: SchedulerStats, generated: int, computed: int, first_s: float, now: float
    ) -> None:
        """Take in a step that generated so many tokens and computed so many of prompts.
        ``first_s``: the longest that one of its first tokens has let wait; 0 for none."""
        self._turnaround.step(_waiting(stats))
        self._running, self._waiting = stats.num_running_reqs, stats.num_waiting_reqs
        self._kv_cache_usage = stats.kv_cache_usage
        last, self._last_step_at = self._last_step_at, now if self._running else None
        # After an idle while, the first answers waited for nothing but this step.
        took_s = first_s if last is None else now - last
        self._work.step(
            min(took_s, _LONGEST_STEP_S),
            running=self._running,
            generated=generated,
            computed=computed,
            kv_usage=self._kv_cache_usage,
        )
        if last is not None and 0 < took_s < _LONGEST_STEP_S:
            mean = self._step_time_s
            self._step_time_s = took_s if mean == 0 else mean + _NEWEST * (took_s - mean)
        figures = (stats.kv_connector_stats or {}).get(SCHEDULING)
        if figures is not None:
            self._scheduling = figures

    def _note_firsts(self, outputs: Iterable[EngineCoreOutput], now: float) -> tuple[int, float]:
        """Take in first tokens; returns what was computed of their prompts, but for cached tokens,
        and the longest that one has let wait."""
        computed, longest_s = 0, 0.0
        for output in outputs:
            if output.request_id not in self._unanswered:
                continue
            self._unanswered.discard(output.request_id)
            stay = self._stays[output.request_id]
            stay.first_token_at = now
            longest_s = max(longest_s, now - stay.arrived_at)
            if (prefill := output.prefill_stats) is None:
                computed += stay.resumed_tokens
                continue
            # Also of one whose prompt was computed elsewhere for this engine.
            stay.resumed_tokens = 0
            computed += prefill.num_computed_tokens
            stay.prompt_tokens = prefill.num_prompt_tokens
            stay.cached_tokens = prefill.num_cached_tokens
        return computed, longest_s

    def _note_events(self, output: EngineCoreOutput) -> None:
        stay = self._stays.get(output.request_id)
        if stay is None:
            return
        for event in output.events or ():
            if event.type == SCHEDULED_EVENT:
                self._turnaround.scheduled(output.request_id, event.timestamp)
                if stay.scheduled_at is None:
                    stay.scheduled_at = event.timestamp
            elif event.type == PREEMPTED_EVENT:
                self._turnaround.preempted(output.request_id)

    def _finish(self, request_id: str, reason: int, now: float) -> None:
        stay = self._stays.pop(request_id, None)
        if stay is None:
            return
        if reason in (ABORT_REASON, ERROR_REASON):
            self._turnaround.left(request_id)
            return
        if (ended := self._turnaround.finished(request_id, now)) is not None:
            self._metrics.finished(ended.weighted_turnaround, ended.preemptions)
        # Of a request that went on here, the prefill is not that of a prompt.
        if stay.scheduled_at is not None and stay.first_token_at and not stay.resumed_tokens:
            generated = stay.request.num_output_tokens - stay.answered_before
            self._served.take(
                prefill_s=stay.first_token_at - stay.scheduled_at,
                computed=max(1, stay.prompt_tokens - stay.cached_tokens),
                decode_s=now - stay.first_token_at,
                # The first token comes with the prefill.
                decoded=max(0, generated - 1),
                request_s=now - stay.scheduled_at,
            )


def _waiting(stats: SchedulerStats) -> int:
    return int(stats.num_waiting_reqs + stats.num_skipped_waiting_reqs)


class _Means:
    """Moving means of requests that have ended; their ratios weigh long ones as they count."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def take(self, **measured: float) -> None:
        for name, value in measured.items():
            mean = self._means.setdefault(name, value)
            self._means[name] = mean + _NEWEST * (value - mean)

    @property
    def pace(self) -> Pace | None:
        means = self._means
        if not means.get("decoded"):
            return None
        return Pace(
            prefill_token_s=means["prefill_s"] / means["computed"],
            output_token_s=means["decode_s"] / means["decoded"],
            request_s=means["request_s"],
        )
