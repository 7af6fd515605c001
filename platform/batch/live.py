"""Batches in progress, in memory."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

from loomserve.platform.aliases.policy.choice import by_client
from loomserve.platform.batch.policy.admission import (
    BatchCandidate,
    LineQueue,
    LineWork,
    TokenCounters,
)
from loomserve.platform.batch.policy.breaker import CircuitBreaker
from loomserve.platform.batch.policy.lengths import LineLength, LineLengths
from loomserve.platform.batch.policy.lines import BatchLine
from loomserve.platform.batch.policy.objects import BatchRecord, LineError
from loomserve.platform.batch.policy.progress import BatchPace, is_late

# Bound of prompt and answer of a model whose engines have not reported theirs yet.
_SOME_CONTEXT = 4096
# Lines are sorted again once this many have finished, then twice as many, …
_FIRST_SORT = 8


@dataclass(eq=False)
class RunningLine:
    """A line that an engine has, or has just answered; times are of the clock of load reports."""

    line: BatchLine
    engine: str | None
    length: LineLength
    started_s: float
    ended_s: float | None = None
    batch: str = ""
    alone: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def work(self, now: float, step_s: float) -> LineWork:
        """KV that it holds and may still need; a step gives each sequence one token."""
        until = now if self.ended_s is None else min(now, self.ended_s)
        elapsed = max(0.0, until - self.started_s)
        generated = min(self.length.high, elapsed / step_s if step_s > 0 else 0.0)
        # A line that is longer than predicted goes on for a while.
        left = max(1.0, self.length.high - generated)
        return LineWork(self.length.prompt + generated, left, self.line.sequences)


class LiveBatch:
    """A batch's lines that wait or are with engines, and its pace. ``now`` is seconds of the lane's
    clock, ``load_now`` of the clock of engines' load reports."""

    def __init__(self, record: BatchRecord, lines: Iterable[BatchLine], now: float) -> None:
        self.record = record
        self.running: dict[int, RunningLine] = {}
        self.breaker = CircuitBreaker()
        self.problem: LineError | None = None
        """Why the batch cannot go on, if it cannot."""
        self.late = False
        self.eta_s: float | None = None
        self._lengths = LineLengths()
        self._longest: dict[str, int] = {}
        self._aliases: Mapping[str, Mapping[str, int]] = {}
        self._waiting: dict[str, list[BatchLine]] = {}
        self._delayed: list[tuple[float, BatchLine]] = []
        self._pace = BatchPace(now)
        self._finished, self._next_sort = 0, _FIRST_SORT
        for line in lines:
            self._waiting.setdefault(line.model, []).append(line)
        self.sort()

    @property
    def models(self) -> list[str]:
        """The models that lines wait for which may leave."""
        if self.problem is not None:
            return []
        return [model for model in self._waiting if any(self._may_leave(model))]

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values())) + len(self._delayed)

    def lines(self, model: str) -> list[BatchLine]:
        """Lines that wait for a model, in the order in which they start."""
        return list(self._waiting.get(model, ()))

    def assign(self, aliases: Mapping[str, Mapping[str, int]]) -> None:
        """Have each line that names an alias wait for one of its models by weight. A line keeps its
        model as long as the weights, by alias, stay as they are."""
        self._aliases = aliases
        lines = [self._assigned(line) for queue in self._waiting.values() for line in queue]
        self._delayed = [(until, self._assigned(line)) for until, line in self._delayed]
        self._waiting = {}
        for line in lines:
            self._waiting.setdefault(line.model, []).append(line)
        self.sort()

    def _assigned(self, line: BatchLine) -> BatchLine:
        name = line.alias or line.model
        if weights := self._aliases.get(name):
            model = by_client(weights, name, f"{self.record.id} {line.number}")
            return replace(line, model=model, alias=name)
        # The gateway answers that an alias is gone.
        return replace(line, model=name, alias="") if line.alias else line

    def set_estimates(self, found: Mapping[int, LineLength]) -> None:
        """Use predictions from lines' texts, by line number; :meth:`sort` orders lines by them."""
        self._lengths.set_estimates(found)

    def sort(self) -> None:
        """Order waiting lines by their expected tokens, the shortest first, after suspects."""
        for lines in self._waiting.values():
            lines.sort(key=self._rank)

    def learn(self, model: str, max_model_len: int | None) -> None:
        """Note a model's bound of prompt and answer together."""
        if max_model_len is not None and self._longest.get(model) != max_model_len:
            self._longest[model] = max_model_len
            self.sort()

    def wake(self, now: float) -> None:
        """Put lines back into the queue whose delay has ended."""
        due = [line for until, line in self._delayed if until <= now]
        self._delayed = [(until, line) for until, line in self._delayed if until > now]
        for line in due:
            insort(self._waiting.setdefault(line.model, []), line, key=self._rank)

    def queue(self, model: str, most: int, counters: TokenCounters) -> LineQueue:
        """The batch's next lines for a model, for the policy."""
        owner, batch = self.record.owner, self.record.id
        most_engines = self.breaker.most_engines(model)
        if most_engines is not None:
            others = {run.engine for run in self.running.values() if run.line.model != model}
            most_engines = max(0, most_engines - len(others))
        return LineQueue(
            owner=owner,
            batch=batch,
            owner_served=counters.of(("owner", owner)),
            served=counters.of(batch),
            deadline_s=self.record.expires_at,
            late=self.late,
            lines=[self._candidate(line) for line in islice(self._may_leave(model), most)],
            alone=self.breaker.is_testing(model),
            most_engines=most_engines,
        )

    def start(self, model: str, number: int, engine: str | None, load_now: float) -> RunningLine:
        """Take a line from the queue, for an engine."""
        lines = self._waiting[model]
        at = next(at for at, line in enumerate(lines) if line.number == number)
        line = lines.pop(at)
        running = self.running[number] = RunningLine(
            line,
            engine,
            self.length(line),
            load_now,
            batch=self.record.id,
            alone=self.breaker.is_testing(model),
        )
        return running

    def put_off(self, running: RunningLine, line: BatchLine, until: float) -> None:
        """Let a line, which may have one failed attempt more, wait again after a delay."""
        del self.running[running.line.number]
        # What its alias means may have changed meanwhile.
        self._delayed.append((until, self._assigned(line)))

    def finished(self, running: RunningLine, prompt_tokens: int, tokens: float, now: float) -> None:
        """Note that a line has its answer, of so many tokens a sequence on average."""
        del self.running[running.line.number]
        if prompt_tokens:
            self._lengths.finished(running.line, prompt_tokens, tokens)
        self._pace.finished(self.expected(running), now)
        self._finished += 1
        if self._finished >= self._next_sort:
            self._next_sort = 2 * self._finished
            self.sort()

    def look_ahead(self, now: float) -> None:
        """Predict when the batch will be done, and whether that is late."""
        left = sum(self.expected(running) for running in self.running.values())
        lines = [line for lines in self._waiting.values() for line in lines]
        for line in (*lines, *(line for _, line in self._delayed)):
            length = self.length(line)
            left += length.prompt + length.tokens * line.sequences
        self.eta_s = self._pace.eta_s(left, now)
        self.late = is_late(self.eta_s, self.record.expires_at, now)

    def length(self, line: BatchLine) -> LineLength:
        return self._lengths.predict(line, self._longest.get(line.model, _SOME_CONTEXT))

    def expected(self, running: RunningLine) -> float:
        return running.length.prompt + running.length.tokens * running.line.sequences

    def _may_leave(self, model: str) -> Iterator[BatchLine]:
        lines = iter(self._waiting.get(model, ()))
        if self.breaker.is_testing(model):
            return takewhile(lambda line: self.breaker.is_suspect(line.number), lines)
        return lines

    def _candidate(self, line: BatchLine) -> BatchCandidate:
        length = self.length(line)
        return BatchCandidate(
            number=line.number,
            expected=length.prompt + length.tokens * line.sequences,
            work=LineWork(length.prompt, length.high, line.sequences),
        )

    def _rank(self, line: BatchLine) -> tuple[bool, float, int]:
        # Suspects go first: the others wait until they are cleared.
        suspect = self.breaker.is_suspect(line.number)
        return not suspect, self._candidate(line).expected, line.number
