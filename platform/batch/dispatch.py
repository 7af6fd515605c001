"""Chooses the lines that leave for engines, and counts what each batch and key had of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from loomserve.platform.aliases.policy.choice import present
from loomserve.platform.batch.executor import AliasedModels, KnownModels, Models, QueuedModel
from loomserve.platform.batch.live import LiveBatch, RunningLine
from loomserve.platform.batch.policy.admission import (
    EngineCapacity,
    InFlightLine,
    LineQueue,
    LineStart,
    TokenCounters,
    admit,
    in_turn,
)
from loomserve.platform.batch.policy.objects import BatchRecord
from loomserve.platform.fleet.messages import ServedModel
from loomserve.platform.state.roles import Role
from loomserve.routers.snapshot import RoutingStats

Started = tuple[LiveBatch, RunningLine]

STALE_S = 10.0
"""An engine whose last heartbeat is older gets no lines."""


class Dispatcher:
    """Batches in progress, whose lines take turns. ``now`` is seconds of the lane's clock,
    ``load_now`` of the clock of engines' load reports."""

    def __init__(self, concurrency: int) -> None:
        """``concurrency``: most lines with engines at once, not counting executors' own queues."""
        self.live: dict[str, LiveBatch] = {}
        self._concurrency = concurrency
        self._counters = TokenCounters()
        self._just_ended: list[RunningLine] = []
        self._known_models: set[str] = set()
        self._aliases: dict[str, dict[str, int]] = {}

    def join(self, batch: LiveBatch) -> None:
        """Add a batch; its counters start at the least that another batch or key has had."""
        record = batch.record
        others = [other.record for other in self.live.values()]
        owners = [_owner(other) for other in others]
        if _owner(record) not in owners:
            self._counters.join(_owner(record), owners)
        self._counters.join(record.id, [o.id for o in others if o.owner == record.owner])
        self.live[record.id] = batch
        batch.assign(self._aliases)

    def leave(self, batch_id: str) -> LiveBatch | None:
        """Remove a batch, if it is here."""
        self._counters.forget(batch_id)
        return self.live.pop(batch_id, None)

    def ended(self, running: RunningLine) -> None:
        """Note that an engine has finished a line; its next heartbeat may still count it."""
        self._just_ended.append(running)

    def took(self, batch: LiveBatch, tokens: float) -> None:
        """Correct what lines of the batch had of the platform by so many tokens."""
        self._counters.add(_owner(batch.record), tokens)
        self._counters.add(batch.record.id, tokens)

    def resolve(self, known: KnownModels) -> Models:
        """Have lines that name an alias wait for one of its models; returns the models alone."""
        models: dict[str, ServedModel | QueuedModel] = {}
        aliases: dict[str, Mapping[str, int]] = {}
        for name, one in known.items():
            if isinstance(one, AliasedModels):
                aliases[name] = one.weights
            else:
                models[name] = one
        answering = {
            name
            for name, model in models.items()
            if not isinstance(model, ServedModel) or model.engines or model.on_demand
        }
        standings = (answering.__contains__, models.__contains__, lambda _: True)
        meant = {name: present(weights, standings) for name, weights in aliases.items()}
        if meant != self._aliases:
            self._aliases = meant
            for batch in self.live.values():
                batch.assign(meant)
        return models

    def wanted(self, now: float) -> list[str]:
        """Models that lines wait for, after delayed lines have come back."""
        for batch in self.live.values():
            batch.wake(now)
        return sorted({model for batch in self.live.values() for model in batch.models})

    def waiting_for(self, model: str) -> list[LiveBatch]:
        """Batches with lines that wait for a model."""
        return [batch for batch in self.live.values() if model in batch.models]

    def starts(self, models: Models, now: float, load_now: float) -> Iterator[Started]:
        """Take lines from their batches' queues, to be sent to their engines at once."""
        self._known_models |= models.keys()
        taken = Counter(run.line.model for run in self._running())
        queued = {name for name, model in models.items() if isinstance(model, QueuedModel)}
        free = self._concurrency - sum(n for model, n in taken.items() if model not in queued)
        for model in self.wanted(now):
            served = models.get(model)
            if isinstance(served, QueuedModel):
                yield from self._to_queue(model, served, served.places - taken[model], load_now)
            elif served is not None and served.on_demand and not served.engines:
                # One has the model come; there is room for others once its engine says so.
                yield from self._unplaced(model, min(free, 1 - taken[model]), load_now)
            elif free > 0:
                started = list(self._to_engines(model, served, free, load_now))
                free -= len(started)
                yield from started

    def _to_queue(
        self, model: str, served: QueuedModel, most: int, load_now: float
    ) -> Iterator[Started]:
        if most > 0:
            queues = self._queues(model, served, most)
            for batch, line in list(islice(in_turn(queues), most)):
                yield self._start(model, LineStart(batch, line.number, served.engine), load_now)

    def _to_engines(
        self, model: str, served: ServedModel | None, most: int, load_now: float
    ) -> Iterator[Started]:
        if served is not None:
            queues = self._queues(model, served, most)
            known = engines(served.engines, self._with_engines(load_now), load_now)
            for start in admit(known, queues, most):
                yield self._start(model, start, load_now)
        elif model not in self._known_models:
            # The gateway answers each line that there is no such model; a known one may come back.
            yield from self._unplaced(model, most, load_now)

    def _unplaced(self, model: str, most: int, load_now: float) -> Iterator[Started]:
        """Lines of one batch that a gateway finds an engine for."""
        if most > 0:
            batch = self.waiting_for(model)[0]
            for line in batch.queue(model, most, self._counters).lines:
                yield batch, batch.start(model, line.number, None, load_now)

    def _queues(self, model: str, served: ServedModel | QueuedModel, most: int) -> list[LineQueue]:
        batches = self.waiting_for(model)
        for batch in batches:
            batch.learn(model, served.max_model_len)
        return [batch.queue(model, most, self._counters) for batch in batches]

    def _start(self, model: str, start: LineStart, load_now: float) -> Started:
        batch = self.live[start.batch]
        running = batch.start(model, start.number, start.engine, load_now)
        self.took(batch, batch.expected(running))
        return batch, running

    def _running(self) -> list[RunningLine]:
        return [run for batch in self.live.values() for run in batch.running.values()]

    def _with_engines(self, load_now: float) -> list[RunningLine]:
        """Lines that engines have, or may have had when they measured their load."""
        self._just_ended = [
            run for run in self._just_ended if load_now - (run.ended_s or load_now) < STALE_S
        ]
        return [run for run in self._running() if run.ended_s is None] + self._just_ended


def _owner(record: BatchRecord) -> tuple[str, str]:
    return "owner", record.owner


def engines(
    known: Mapping[str, RoutingStats], running: Iterable[RunningLine], now: float
) -> list[EngineCapacity]:
    """The engines of a model that may get lines; those that only prefill count if there is no
    other. ``running``: lines with engines of any model, and lines that ended a moment ago. ``now``
    is monotonic seconds of this process, as are the times of ``known``, the last heartbeats by
    id."""
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
