"""An engine's load as its own process can tell it, without a front end's help."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from loomserve.platform.engine.load import LoadMeter, ServedRequest, StepTokens
from loomserve.platform.engine.turnaround import Turnaround
from loomserve.platform.scheduling.metrics import ScheduledRequestMetrics
from loomserve.platform.scheduling.preemption_metrics import SCHEDULING
from loomserve.platform.state import ReplicaLoad

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

# vLLM's numbers, so that an engine which only simulates need not import it.
SCHEDULED_EVENT, PREEMPTED_EVENT = 2, 3
ABORT_REASON, ERROR_REASON = 2, 3


class ArrivedRequest(Protocol):
    """vLLM's request of the scheduler, as the meter sees it."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...


@dataclass(slots=True)
class _Stay:
    """A request's stay in this engine; monotonic seconds."""

    arrived_at: float
    resumed_tokens: int
    """All its tokens as it came, if it has been answered in part elsewhere; else 0."""
    scheduled_at: float | None = None
    first_token_at: float | None = None
    generated: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class CoreMeter:
    """Fed by EngineCore's thread with each request and each step; any thread may ``read``."""

    def __init__(self, most_running: int | None = None) -> None:
        """``most_running``: requests that a step of a GPU may have; None: this is no GPU."""
        self._load = LoadMeter(most_running=most_running)
        self._turnaround = Turnaround()
        self._metrics = ScheduledRequestMetrics()
        self.asleep = False
        """Whether the engine sleeps."""
        self._stays: dict[str, _Stay] = {}
        self._arrived = 0
        self._idle_since: float | None = time.monotonic()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, config: VllmConfig) -> Self:
        """That of an engine with this configuration."""
        on_gpu = config.device_config.device_type == "cuda"
        return cls(config.scheduler_config.max_num_seqs if on_gpu else None)

    def arrived(self, request: ArrivedRequest, now: float) -> None:
        """A request has come; what it was answered elsewhere is among its tokens."""
        with self._lock:
            self._turnaround.arrived(request.request_id, now)
            resumed = request.num_tokens if request.num_output_tokens else 0
            self._stays[request.request_id] = _Stay(now, resumed)
            self._arrived += 1
            self._idle_since = None

    def left(self, request_ids: Iterable[str]) -> None:
        """Nobody waits for these any more."""
        with self._lock:
            for request_id in request_ids:
                self._turnaround.left(request_id)
                self._stays.pop(request_id, None)
            self._note_idle(time.monotonic())

    def step(self, outputs: Mapping[int, EngineCoreOutputs], now: float) -> None:
        """A step's outputs, by front end."""
        with self._lock:
            tokens = StepTokens()
            for of_one in outputs.values():
                for output in of_one.outputs:
                    tokens = self._take(output, tokens, now)
            for of_one in outputs.values():
                if of_one.scheduler_stats is not None:
                    self._ended(of_one.scheduler_stats, tokens, now)
            self._note_idle(now)

    def read(self) -> ReplicaLoad:
        with self._lock:
            since = self._idle_since
            return self._load.read(self._turnaround).model_copy(
                update={
                    "asleep": self.asleep,
                    "requests": self._arrived,
                    "idle_s": 0.0 if since is None else max(0.0, time.monotonic() - since),
                }
            )

    def _note_idle(self, now: float) -> None:
        if self._idle_since is None and not self._stays:
            self._idle_since = now

    def page(self) -> str:
        """The engine's metrics that its front ends cannot know, as Prometheus reads them."""
        with self._lock:
            return self._metrics.page(self._turnaround.oldest_waiting_s(time.monotonic()))

    def _ended(self, stats: SchedulerStats, tokens: StepTokens, now: float) -> None:
        waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self._turnaround.step(waiting)
        self._load.step(
            stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage, now, tokens
        )
        figures = (stats.kv_connector_stats or {}).get(SCHEDULING)
        if figures is not None:
            self._load.scheduled(figures)

    def _take(self, output: EngineCoreOutput, tokens: StepTokens, now: float) -> StepTokens:
        """Take in one request's output; returns the step's tokens with those."""
        request_id = output.request_id
        stay = self._stays.get(request_id)
        if stay is None:
            return tokens
        self._note_events(output, stay)
        generated, computed, first_s = len(output.new_token_ids), 0, 0.0
        if stay.first_token_at is None:
            stay.first_token_at, first_s = now, now - stay.arrived_at
            computed = stay.resumed_tokens
            if (prefill := output.prefill_stats) is not None:
                # Also of one whose prompt was computed elsewhere for this engine.
                stay.resumed_tokens = 0
                computed = prefill.num_computed_tokens
                stay.prompt_tokens = prefill.num_prompt_tokens
                stay.cached_tokens = prefill.num_cached_tokens
        stay.generated += generated
        if output.finish_reason is not None:
            self._finish(request_id, output.finish_reason, stay, now)
        return StepTokens(
            tokens.generated + generated,
            tokens.computed + computed,
            max(tokens.first_token_s, first_s),
        )

    def _note_events(self, output: EngineCoreOutput, stay: _Stay) -> None:
        self._turnaround.answered(output.request_id)
        for event in output.events or ():
            if event.type == SCHEDULED_EVENT:
                self._turnaround.scheduled(output.request_id, event.timestamp)
                if stay.scheduled_at is None:
                    stay.scheduled_at = event.timestamp
            elif event.type == PREEMPTED_EVENT:
                self._turnaround.preempted(output.request_id)

    def _finish(self, request_id: str, reason: int, stay: _Stay, now: float) -> None:
        del self._stays[request_id]
        if reason in (ABORT_REASON, ERROR_REASON):
            self._turnaround.left(request_id)
            return
        if (ended := self._turnaround.finished(request_id, now)) is not None:
            self._metrics.finished(ended.weighted_turnaround, ended.preemptions)
        # Of a request that went on here, the prefill is not that of a prompt.
        if stay.scheduled_at is not None and stay.first_token_at and not stay.resumed_tokens:
            self._load.finished(
                ServedRequest(
                    prompt_tokens=stay.prompt_tokens,
                    cached_tokens=stay.cached_tokens,
                    generated=stay.generated,
                    prefill_s=stay.first_token_at - stay.scheduled_at,
                    decode_s=now - stay.first_token_at,
                    inference_s=now - stay.scheduled_at,
                )
            )
