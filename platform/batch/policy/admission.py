"""Admission of lines to engines.

Online requests come first. An engine gets no line while anything waits in its queue; it keeps some
places and memory for requests to come; and the most KV that its lines are predicted to hold at once
fits into what is free, so that no line is preempted for another.

The next line is one of the key that has had the least (the virtual token counter of Sheng et al.,
Fairness in Serving Large Language Models, OSDI 2024); of that key's batches, of the one that is
about to miss its deadline, else of the one that has had the least; of that batch, the shortest.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

# Shares of an engine's places and KV memory that lines leave to online requests to come.
_PLACES_LEFT = 0.25
_MEMORY_LEFT = 0.1


@dataclass(frozen=True, slots=True)
class LineWork:
    """Tokens of KV that each sequence of a line holds, of its prompt and of what has been
    generated, and those that it is predicted to generate yet, at most."""

    held: float
    left: float
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class InFlightLine:
    """A line that an engine has, or had when it measured its load.

    Attributes:
        measured: The engine had it at the measurement.
        ended: It has ended since.
        alone: No other line may be beside it.
    """

    work: LineWork
    measured: bool
    ended: bool = False
    batch: str = ""
    alone: bool = False


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """An engine's own measurement of its load, and the lines that it has.

    Attributes:
        places: Most sequences that it computes at once.
        capacity: Its KV memory, tokens, of which ``used`` are in use.
        running: Requests that it computed at the measurement, lines among them.
    """

    id: str
    places: int
    capacity: int
    running: int
    waiting: int
    used: float
    lines: tuple[InFlightLine, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchCandidate:
    """A line that may start; ``expected`` is its tokens of prompt and answers, for the order."""

    number: int
    expected: float
    work: LineWork


@dataclass(frozen=True, slots=True)
class LineQueue:
    """A batch's lines for one model, the shortest expected first.

    Attributes:
        owner_served, served: Tokens that lines of the key, and of the batch, have had.
        deadline_s: The end of its window, Unix seconds.
        late: The batch is about to miss its deadline.
        alone: Its lines share no engine with each other or with others.
        most_engines: Most engines that may have lines of it at once; None: any number.
    """

    owner: str
    batch: str
    owner_served: float
    served: float
    deadline_s: float
    late: bool
    lines: Sequence[BatchCandidate]
    alone: bool = False
    most_engines: int | None = None


@dataclass(frozen=True, slots=True)
class LineStart:
    """Decision to send a line to an engine."""

    batch: str
    number: int
    engine: str


def admit(
    engines: Sequence[EngineCapacity], queues: Sequence[LineQueue], most: int
) -> list[LineStart]:
    """Choose at most ``most`` lines of one model to start now, and their engines. No line overtakes
    one that fits nowhere, which else would wait as long as shorter ones come. A batch that is on as
    many engines as it may be holds nobody up."""
    everywhere = [_Room(engine) for engine in engines]
    rooms = [room for room in everywhere if room.engine.waiting == 0]
    known = {queue.batch: queue for queue in queues}
    starts: list[LineStart] = []
    for batch, line in in_turn(queues):
        queue = known[batch]
        allowed = rooms
        if queue.most_engines is not None:
            there = [room for room in everywhere if room.has(batch)]
            if len(there) >= queue.most_engines:
                allowed = [] if queue.alone else [room for room in rooms if room.has(batch)]
        fitting = [room for room in allowed if room.fits(line.work, alone=queue.alone)]
        if len(starts) == most or (not fitting and allowed is rooms):
            break
        if fitting:
            room = max(fitting, key=lambda r: (r.free_share, r.engine.id))
            room.take(line.work, batch, alone=queue.alone)
            starts.append(LineStart(batch, line.number, room.engine.id))
    return starts


def in_turn(queues: Sequence[LineQueue]) -> Iterator[tuple[str, BatchCandidate]]:
    """Lines of one model with their batches, in the order in which they may start."""
    turns = {queue.batch: 0 for queue in queues}
    served = {queue.batch: queue.served for queue in queues}
    owners = {queue.owner: queue.owner_served for queue in queues}
    while waiting := [queue for queue in queues if turns[queue.batch] < len(queue.lines)]:
        queue = min(waiting, key=lambda q: _turn(q, owners[q.owner], served[q.batch]))
        line = queue.lines[turns[queue.batch]]
        yield queue.batch, line
        turns[queue.batch] += 1
        served[queue.batch] += line.expected
        owners[queue.owner] += line.expected


def peak(works: Sequence[LineWork]) -> float:
    """The most KV, in tokens, that sequences hold at once while each generates a token a step. A
    sequence that ends frees what it held, so the worst moment is just before one ends: with the
    sequences ordered by what is left, the longest first, that of the k-th is the sum of what the
    first k hold, and k times what is left of the k-th (Gong et al., Past-Future Scheduler for LLM
    Serving under SLA Guarantees, ASPLOS 2025)."""
    most = held = 0.0
    count = 0
    for work in sorted(works, key=lambda work: -work.left):
        held += work.held * work.sequences
        count += work.sequences
        most = max(most, held + count * work.left)
    return most


class _Room:
    """Places and memory that an engine has free for lines, while lines are chosen."""

    def __init__(self, engine: EngineCapacity) -> None:
        self.engine = engine
        here = [line for line in engine.lines if not line.ended]
        self._works = [line.work for line in here]
        self._batches = {line.batch for line in here}
        self._taken = any(line.alone for line in here)
        known = [line.work for line in engine.lines if line.measured]
        online = max(0, engine.running - sum(work.sequences for work in known))
        used = max(0.0, engine.used - sum(work.held * work.sequences for work in known))
        self._alone = not online and not self._works
        self._places = engine.places - int(engine.places * _PLACES_LEFT) - online
        # Online requests are taken to need as much again as they hold: their lengths are not known.
        self._memory = engine.capacity * (1 - _MEMORY_LEFT) - 2 * used

    def has(self, batch: str) -> bool:
        return batch in self._batches

    def fits(self, work: LineWork, *, alone: bool) -> bool:
        if self._taken or (alone and self._works):
            return False
        if self._alone:
            # The engine itself refuses what it can never hold.
            return True
        places = sum(one.sequences for one in self._works) + work.sequences
        return places <= self._places and peak([*self._works, work]) <= self._memory

    def take(self, work: LineWork, batch: str, *, alone: bool) -> None:
        self._alone, self._taken = False, alone
        self._works.append(work)
        self._batches.add(batch)

    @property
    def free_share(self) -> float:
        return (self._memory - peak(self._works)) / max(1, self.engine.capacity)


def _turn(queue: LineQueue, owner_served: float, served: float) -> tuple[object, ...]:
    urgency = queue.deadline_s if queue.late else 0.0
    return owner_served, queue.owner, not queue.late, urgency, served, queue.batch


class TokenCounters:
    """Counters of tokens served, by key and by batch. The counter of a newcomer is lifted to the
    least of those that wait already. At zero it would get everything until it had caught up with a
    past in which it asked for nothing (Sheng et al., OSDI 2024, algorithm 2)."""

    def __init__(self) -> None:
        self._served: dict[Hashable, float] = {}

    def join(self, who: Hashable, waiting: Iterable[Hashable]) -> None:
        """Let ``who`` wait for its turn, beside others that wait already."""
        least = min((self.of(other) for other in waiting if other != who), default=0.0)
        self._served[who] = max(self.of(who), least)

    def add(self, who: Hashable, tokens: float) -> None:
        self._served[who] = self.of(who) + tokens

    def of(self, who: Hashable) -> float:
        return self._served.get(who, 0.0)

    def forget(self, who: Hashable) -> None:
        self._served.pop(who, None)
