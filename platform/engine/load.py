"""An engine's own measurement of its load, taken from vLLM's statistics after every step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from loomserve.platform.engine.scheduling_stats import SCHEDULING
from loomserve.platform.engine.turnaround import Turnaround
from loomserve.platform.state import ReplicaLoad, SchedulingState

# Weight of the newest step in the moving mean: about the last twenty steps count.
_NEWEST = 0.1
# Two statistics further apart than this do not frame one step: the engine was idle between them.
_LONGEST_STEP_S = 5.0


class LoadMeter:
    """The latest load of one engine; ``read`` may be called at any time, from the same loop."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._running = 0
        self._waiting = 0
        self._kv_cache_usage = 0.0
        self._step_time_s = 0.0
        self._last_step_at: float | None = None
        self._scheduling: dict[str, Any] | None = None

    def step(self, running: int, waiting: int, kv_cache_usage: float, now: float) -> None:
        """Take in one step's statistics; ``now`` is monotonic seconds."""
        last, self._last_step_at = self._last_step_at, now if running else None
        if last is not None and 0 < now - last < _LONGEST_STEP_S:
            took = now - last
            mean = self._step_time_s
            self._step_time_s = took if mean == 0 else mean + _NEWEST * (took - mean)
        self._running, self._waiting, self._kv_cache_usage = running, waiting, kv_cache_usage

    def scheduled(self, figures: dict[str, Any]) -> None:
        """Take in what the engine's own scheduler says of itself: a :class:`SchedulingState`."""
        self._scheduling = figures

    def read(self, turnaround: Turnaround) -> ReplicaLoad:
        scheduling = self._scheduling
        return ReplicaLoad(
            running=self._running,
            waiting=self._waiting,
            kv_cache_usage=self._kv_cache_usage,
            step_time_s=self._step_time_s,
            oldest_waiting_s=turnaround.oldest_waiting_s(time.monotonic()),
            weighted_turnaround=turnaround.mean_weighted_turnaround,
            scheduling=SchedulingState.model_validate(scheduling) if scheduling else None,
            measured_at=self._wall_clock(),
        )

    def stat_logger(self, vllm_config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """The factory that vLLM calls once for each engine core."""
        return _LoadLogger(self, vllm_config, engine_index)


class _LoadLogger(StatLoggerBase):  # type: ignore[misc]
    def __init__(self, meter: LoadMeter, vllm_config: VllmConfig, engine_index: int) -> None:
        self._meter = meter

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._meter.step(
                scheduler_stats.num_running_reqs,
                scheduler_stats.num_waiting_reqs,
                scheduler_stats.kv_cache_usage,
                time.monotonic(),
            )
            figures = (scheduler_stats.kv_connector_stats or {}).get(SCHEDULING)
            if figures is not None:
                self._meter.scheduled(figures)

    def log_engine_initialized(self) -> None:
        pass
