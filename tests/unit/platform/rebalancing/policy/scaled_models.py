"""Models that scaling is tested with, and a made-up platform that serves their requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loomserve.platform.config import Scaling
from loomserve.platform.fleet.snapshot import Drains, FleetModel, ModelRecord, ReplicaRecord
from loomserve.platform.rebalancing.policy.scaling import (
    ScalingReason,
    ScalingWatch,
    carried_out,
    leaves,
    look,
)
from loomserve.platform.state import ReplicaLoad
from tests.unit.platform.fleet.heartbeats import MODEL, footprint, report


def replica(
    number: int = 0, *, kv_share: float = 0.0, ready_at_s: float | None = None,
    leaving: bool = False, **load: Any,
) -> ReplicaRecord:  # fmt: skip
    """One that runs at most ten requests at once; started when its number says, or then."""
    measured = {"running": 0, "waiting": 0, "step_time_s": 0.0, "measured_at": 0.0, **load}
    ready_at = float(number) if ready_at_s is None else ready_at_s
    told = report(
        f"r{number}", f"d{number}", max_running=10,
        load=ReplicaLoad.model_validate({**measured, "kv_cache_usage": kv_share}),
        footprint=footprint(ready_at=ready_at),
    )  # fmt: skip
    return ReplicaRecord(told, 0.0, Drains(leaving={f"r{number}"} if leaving else set()))


def scaled(
    *replicas: ReplicaRecord,
    rules: dict[str, Any] | None = None,
    target: int | None = None,
    arrived_per_s: float | None = None,
    start_s: float = 5.0,
) -> FleetModel:
    """So many devices as it may have replicas."""
    given = Scaling.model_validate({"min": 1, "max": 4, **(rules or {})})
    devices = tuple(f"d{number}" for number in range(given.max))
    model = MODEL.model_copy(update={"name": "m", "devices": devices, "replicas": given})
    rates = None if arrived_per_s is None else {"requests": arrived_per_s / len(replicas)}
    return FleetModel(
        ModelRecord(model, len(replicas) if target is None else target),
        tuple(_started_in(each, start_s, rates) for each in replicas),
    )


def _started_in(
    replica: ReplicaRecord, start_s: float, rates: dict[str, float] | None
) -> ReplicaRecord:
    assert replica.footprint is not None
    size = replica.footprint.model_copy(update={"start_s": start_s})
    told = replica.heartbeat.model_copy(update={"footprint": size})
    return ReplicaRecord(told, replica.seen_at, replica.drains, rates)


@dataclass
class MadeUpService:
    """Replicas that serve so many requests a second each, and start and end when they are told.

    Requests that no replica has begun wait in the queue, which is spread evenly.
    """

    rules: Scaling
    per_s: float = 1.0
    start_s: float = 5.0
    at_s: float = 0.0
    queue: float = 0.0
    target: int = 1
    ready_at_s: list[float] = field(default_factory=lambda: [0.0])
    watch: ScalingWatch = field(default_factory=ScalingWatch)
    changes: list[tuple[float, int, ScalingReason]] = field(default_factory=list)
    wanted_more: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def second(self, arriving: float) -> None:
        serving = sum(at <= self.at_s for at in self.ready_at_s)
        self.queue = max(0.0, self.queue + arriving - self.per_s * serving)
        model = self._model(serving, arriving)
        seen = look(self.watch, model, self.at_s)
        self.watch = seen.watch
        if seen.watch.short_since_s is not None:
            self.wanted_more.append(self.at_s)
        if seen.wish is not None:
            self._carry_out(model, seen.wish.replicas, seen.wish.reason)
        self.targets.append(self.target)
        self.at_s += 1.0

    def run(self, seconds: int, arriving: Callable[[float], float]) -> None:
        for _ in range(seconds):
            self.second(arriving(self.at_s))

    def follow(self, trace: Sequence[float], seconds_each: int) -> None:
        for rate in trace:
            self.run(seconds_each, lambda _, rate=rate: rate)  # type: ignore[misc]

    def _model(self, serving: int, arriving: float) -> FleetModel:
        ongoing = self.queue + min(arriving, self.per_s * serving)
        each = math.ceil(ongoing / max(serving, 1))
        replicas = [
            replica(n, running=min(each, 10), waiting=max(0, each - 10), ready_at_s=at)
            for n, at in enumerate(self.ready_at_s)
            if at <= self.at_s
        ]
        return scaled(
            *replicas, rules=self.rules.model_dump(), target=self.target,
            arrived_per_s=arriving, start_s=self.start_s,
        )  # fmt: skip

    def _carry_out(self, model: FleetModel, replicas: int, reason: ScalingReason) -> None:
        self.changes.append((self.at_s, replicas, reason))
        more = replicas > model.kept
        self.watch = carried_out(self.watch, model, self.at_s, more=more)
        if more:
            self.ready_at_s += [self.at_s + self.start_s] * (replicas - self.target)
        else:
            assert len(leaves(model, replicas)) == self.target - replicas
            self.ready_at_s = sorted(self.ready_at_s)[:replicas]
        self.target = replicas
