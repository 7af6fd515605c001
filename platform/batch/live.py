"""A batch in progress, in memory: which lines wait, which are with engines, how fast it gets on."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from loomserve.platform.batch.policy.admission import BatchCandidate, LineWork, Queue
from loomserve.platform.batch.policy.fairness import TokenCounters
from loomserve.platform.batch.policy.lengths import Length, LineLengths
from loomserve.platform.batch.policy.lines import BatchLine
from loomserve.platform.batch.policy.objects import BatchRecord
from loomserve.platform.batch.policy.progress import BatchPace, is_late

# What a model may generate that no engine has told of yet.
_SOME_CONTEXT = 4096
# The order of lines is looked at again once this many have finished, then twice as many, …
_FIRST_SORT = 8


@dataclass(eq=False)
class Running:
    """A line with an engine, or just answered by it; times are Unix seconds."""

    line: BatchLine
    engine: str | None
    length: Length
    started_s: float
    ended_s: float | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def work(self, now: float, step_s: float) -> LineWork:
        """What it holds and may hold yet; a step gives each sequence one token."""
        until = now if self.ended_s is None else min(now, self.ended_s)
        elapsed = max(0.0, until - self.started_s)
        generated = min(self.length.high, elapsed / step_s if step_s > 0 else 0.0)
        # Who is longer than predicted goes on for a while.
        left = max(1.0, self.length.high - generated)
        return LineWork(self.length.prompt + generated, left, self.line.sequences)


class LiveBatch:
    """The lines of one batch that have no answer yet; ``now`` is Unix seconds."""

    def __init__(self, record: BatchRecord, lines: Iterable[BatchLine], now: float) -> None:
        self.record = record
        self.running: dict[int, Running] = {}
        self.late = False
        self.eta_s: float | None = None
        self._lengths = LineLengths()
        self._longest: dict[str, int] = {}
        self._waiting: dict[str, list[BatchLine]] = {}
        self._delayed: list[tuple[float, BatchLine]] = []
        self._pace = BatchPace(now)
        self._finished, self._next_sort = 0, _FIRST_SORT
        for line in lines:
            self._waiting.setdefault(line.model, []).append(line)
        self.sort()

    @property
    def models(self) -> list[str]:
        """The models that lines wait for."""
        return [model for model, lines in self._waiting.items() if lines]

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values())) + len(self._delayed)

    def lines(self, model: str) -> list[BatchLine]:
        """Those that wait for a model, as they are to start."""
        return list(self._waiting.get(model, ()))

    def set_estimates(self, found: Mapping[int, Length]) -> None:
        """Predictions from lines' texts; they count at once, and order after :meth:`sort`."""
        self._lengths.set_estimates(found)

    def sort(self) -> None:
        """Put waiting lines in the order of what is known of their lengths now."""
        for lines in self._waiting.values():
            lines.sort(key=self._rank)

    def learn(self, model: str, max_model_len: int | None) -> None:
        """The model's bound of prompt and answer."""
        if max_model_len is not None and self._longest.get(model) != max_model_len:
            self._longest[model] = max_model_len
            self.sort()

    def wake(self, now: float) -> None:
        """Lines that were put off until now wait again."""
        due = [line for until, line in self._delayed if until <= now]
        self._delayed = [(until, line) for until, line in self._delayed if until > now]
        for line in due:
            insort(self._waiting[line.model], line, key=self._rank)

    def queue(self, model: str, most: int, counters: TokenCounters) -> Queue:
        """Its next lines for a model, as the policy sees them."""
        owner, batch = self.record.owner, self.record.id
        return Queue(
            owner=owner,
            batch=batch,
            owner_served=counters.of(("owner", owner)),
            served=counters.of(batch),
            deadline_s=self.record.expires_at,
            late=self.late,
            lines=[self._candidate(line) for line in self._waiting.get(model, ())[:most]],
        )

    def start(self, model: str, number: int, engine: str | None, now: float) -> Running:
        """The line leaves the queue for an engine."""
        lines = self._waiting[model]
        at = next(at for at, line in enumerate(lines) if line.number == number)
        line = lines.pop(at)
        running = self.running[number] = Running(line, engine, self.length(line), now)
        return running

    def put_off(self, running: Running, line: BatchLine, until: float) -> None:
        """The line, perhaps with one failed attempt more, waits again."""
        del self.running[running.line.number]
        self._delayed.append((until, line))

    def finished(self, running: Running, prompt_tokens: int, tokens: float, now: float) -> None:
        """The line has its answer; ``tokens`` are those of one sequence on average."""
        del self.running[running.line.number]
        if prompt_tokens:
            self._lengths.finished(running.line, prompt_tokens, tokens)
        self._pace.finished(self.expected(running), now)
        self._finished += 1
        if self._finished >= self._next_sort:
            self._next_sort = 2 * self._finished
            self.sort()

    def look_ahead(self, now: float) -> None:
        """Predict when it will be done."""
        left = sum(self.expected(running) for running in self.running.values())
        lines = [line for lines in self._waiting.values() for line in lines]
        for line in (*lines, *(line for _, line in self._delayed)):
            length = self.length(line)
            left += length.prompt + length.tokens * line.sequences
        self.eta_s = self._pace.eta_s(left, now)
        self.late = is_late(self.eta_s, self.record.expires_at, now)

    def length(self, line: BatchLine) -> Length:
        return self._lengths.predict(line, self._longest.get(line.model, _SOME_CONTEXT))

    def expected(self, running: Running) -> float:
        return running.length.prompt + running.length.tokens * running.line.sequences

    def _candidate(self, line: BatchLine) -> BatchCandidate:
        length = self.length(line)
        return BatchCandidate(
            number=line.number,
            expected=length.prompt + length.tokens * line.sequences,
            work=LineWork(length.prompt, length.high, line.sequences),
        )

    def _rank(self, line: BatchLine) -> tuple[float, int]:
        return self._candidate(line).expected, line.number
