"""Joins engines' last heartbeats with the lane's lines, for the admission of lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from loomserve.platform.batch.live import RunningLine
from loomserve.platform.batch.policy.admission import EngineCapacity, InFlightLine
from loomserve.platform.state.roles import Role
from loomserve.routers.snapshot import RoutingStats

STALE_S = 10.0
"""An engine whose last heartbeat is older gets no lines."""


def engines(
    known: Mapping[str, RoutingStats], running: Iterable[RunningLine], now: float
) -> list[EngineCapacity]:
    """The engines of a model that may get lines.

    Args:
        known: Last heartbeats by id. Engines that only prefill count if there is no other.
        running: Lines with engines of any model, and lines that ended a moment ago.
        now: monotonic seconds of this process, as are the times of the heartbeats.
    """
    decoding = {name: stats for name, stats in known.items() if stats.role is not Role.PREFILL}
    lines = list(running)
    return [
        engine
        for name, stats in (decoding or known).items()
        if (engine := _engine(name, stats, lines, now)) is not None
    ]


def _engine(
    name: str, stats: RoutingStats, lines: list[RunningLine], now: float
) -> EngineCapacity | None:
    load, capacity = stats.load, stats.kv_capacity_tokens
    if stats.draining or load is None or not capacity or now - load.measured_at > STALE_S:
        return None
    measured_at = load.measured_at
    return EngineCapacity(
        id=name,
        places=stats.max_running,
        capacity=capacity,
        running=load.running,
        waiting=load.waiting,
        used=load.kv_cache_usage * capacity,
        lines=tuple(
            InFlightLine(
                run.work(now, load.step_time_s),
                measured=run.started_s <= measured_at,
                ended=run.ended_s is not None,
                batch=run.batch,
                alone=run.alone,
            )
            for run in lines
            if run.engine == name and (run.ended_s is None or run.ended_s > measured_at)
        ),
    )
