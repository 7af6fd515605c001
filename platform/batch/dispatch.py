"""Which lines leave for engines now, of all batches in progress, and what each has had of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice

from loomserve.platform.batch.executor import QueuedModel, ServedModel
from loomserve.platform.batch.live import LiveBatch, Running
from loomserve.platform.batch.policy.admission import LineStart, Queue, admit, in_turn
from loomserve.platform.batch.policy.fairness import TokenCounters
from loomserve.platform.batch.policy.objects import BatchRecord
from loomserve.platform.batch.snapshot import STALE_S, engines

Started = tuple[LiveBatch, Running]


class Dispatch:
    """Batches in progress by id; ``now`` is Unix seconds."""

    def __init__(self, concurrency: int) -> None:
        """``concurrency``: lines that engines have at once; executors' own queues count apart."""
        self.live: dict[str, LiveBatch] = {}
        self._concurrency = concurrency
        self._counters = TokenCounters()
        self._just_ended: list[Running] = []
        self._known_models: set[str] = set()

    def join(self, batch: LiveBatch) -> None:
        """The batch takes part from now on, with as much as those have had that had the least."""
        record = batch.record
        others = [other.record for other in self.live.values()]
        owners = [_owner(other) for other in others]
        if _owner(record) not in owners:
            self._counters.join(_owner(record), owners)
        self._counters.join(record.id, [o.id for o in others if o.owner == record.owner])
        self.live[record.id] = batch

    def leave(self, batch_id: str) -> LiveBatch | None:
        """The batch takes no part any more."""
        self._counters.forget(batch_id)
        return self.live.pop(batch_id, None)

    def ended(self, running: Running) -> None:
        """An engine has done with the line; its next report may not say so yet."""
        self._just_ended.append(running)

    def took(self, batch: LiveBatch, tokens: float) -> None:
        """Lines of the batch had so many tokens more of the platform, or fewer."""
        self._counters.add(_owner(batch.record), tokens)
        self._counters.add(batch.record.id, tokens)

    def wanted(self, now: float) -> list[str]:
        """Models that lines wait for."""
        for batch in self.live.values():
            batch.wake(now)
        return sorted({model for batch in self.live.values() for model in batch.models})

    def waiting_for(self, model: str) -> list[LiveBatch]:
        """Batches with lines that wait for the model."""
        return [batch for batch in self.live.values() if model in batch.models]

    def starts(
        self, models: Mapping[str, ServedModel | QueuedModel], now: float
    ) -> Iterator[Started]:
        """Lines to send to their engines at once; they have left their batches' queues."""
        self._known_models |= models.keys()
        taken = Counter(run.line.model for run in self._running())
        queued = {name for name, model in models.items() if isinstance(model, QueuedModel)}
        free = self._concurrency - sum(n for model, n in taken.items() if model not in queued)
        for model in self.wanted(now):
            served = models.get(model)
            if isinstance(served, QueuedModel):
                yield from self._to_queue(model, served, served.places - taken[model], now)
            elif free > 0:
                started = list(self._to_engines(model, served, free, now))
                free -= len(started)
                yield from started

    def _to_queue(
        self, model: str, served: QueuedModel, most: int, now: float
    ) -> Iterator[Started]:
        if most > 0:
            queues = self._queues(model, served, most)
            for batch, line in list(islice(in_turn(queues), most)):
                yield self._start(model, LineStart(batch, line.number, served.engine), now)

    def _to_engines(
        self, model: str, served: ServedModel | None, most: int, now: float
    ) -> Iterator[Started]:
        if served is not None:
            queues = self._queues(model, served, most)
            known = engines(served.engines, self._with_engines(now), now)
            for start in admit(known, queues, most):
                yield self._start(model, start, now)
        elif model not in self._known_models:
            # The gateway says so, in each line's answer. One that is known may come back.
            batch = self.waiting_for(model)[0]
            for line in batch.queue(model, most, self._counters).lines:
                yield batch, batch.start(model, line.number, None, now)

    def _queues(self, model: str, served: ServedModel | QueuedModel, most: int) -> list[Queue]:
        batches = self.waiting_for(model)
        for batch in batches:
            batch.learn(model, served.max_model_len)
        return [batch.queue(model, most, self._counters) for batch in batches]

    def _start(self, model: str, start: LineStart, now: float) -> Started:
        batch = self.live[start.batch]
        running = batch.start(model, start.number, start.engine, now)
        self.took(batch, batch.expected(running))
        return batch, running

    def _running(self) -> list[Running]:
        return [run for batch in self.live.values() for run in batch.running.values()]

    def _with_engines(self, now: float) -> list[Running]:
        """Lines that engines have, and those that they may have had at their measurement."""
        self._just_ended = [run for run in self._just_ended if now - (run.ended_s or now) < STALE_S]
        return [run for run in self._running() if run.ended_s is None] + self._just_ended


def _owner(record: BatchRecord) -> tuple[str, str]:
    return "owner", record.owner
