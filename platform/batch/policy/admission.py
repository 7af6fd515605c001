"""Which lines of which batches go to which engine now: a pure policy.

Online requests come first. An engine gets no line while anything waits in its queue, some of its
places and of its memory are left for requests to come, and what its lines are predicted to hold at
their worst moment fits into what is free, so that none is preempted for another.

Whose line is next: of the key that has had the least (the virtual token counter of Sheng et al.,
Fairness in Serving Large Language Models, OSDI 2024), of that key's batches the one that is about
to miss its deadline, else the one that has had the least, and of that batch the shortest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Of an engine's places and KV memory, what lines leave to online requests that come.
_PLACES_LEFT = 0.25
_MEMORY_LEFT = 0.1


@dataclass(frozen=True, slots=True)
class LineWork:
    """A line's sequences, in tokens each; of one that runs, what is predicted to be still to come.

    Attributes:
        held: KV that a sequence holds: its prompt, and what has been generated.
        left: The tokens that it may generate yet.
        sequences: How many the engine computes at once for it.
    """

    held: float
    left: float
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class InFlightLine:
    """A line that an engine has, or had when it measured its load.

    Attributes:
        measured: It was there at the measurement.
        ended: It has ended since.
    """

    work: LineWork
    measured: bool
    ended: bool = False


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """An engine as it measured itself, and the lines that it has.

    Attributes:
        places: Sequences that it computes at once.
        capacity: Its KV memory, tokens.
        running: Requests that it computed, lines among them.
        waiting: Requests in its queue.
        used: KV in use, tokens.
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
    """A line that may start. ``expected`` orders; ``work`` is what it needs at most."""

    number: int
    expected: float
    work: LineWork


@dataclass(frozen=True, slots=True)
class Queue:
    """A batch's lines for one model, the shortest expected first.

    Attributes:
        owner: The API key.
        owner_served: Tokens that lines of the key had of the platform.
        served: Tokens that lines of the batch had.
        deadline_s: When its window ends, Unix time.
        late: It is about to miss that.
    """

    owner: str
    batch: str
    owner_served: float
    served: float
    deadline_s: float
    late: bool
    lines: Sequence[BatchCandidate]


@dataclass(frozen=True, slots=True)
class LineStart:
    batch: str
    number: int
    engine: str


def admit(engines: Sequence[EngineCapacity], queues: Sequence[Queue], most: int) -> list[LineStart]:
    """At most ``most`` lines of one model to start now, and where.

    A line that fits nowhere is not overtaken: its turn would never come while shorter ones do.
    """
    rooms = [_Room(engine) for engine in engines if engine.waiting == 0]
    starts: list[LineStart] = []
    for batch, line in in_turn(queues):
        fitting = [room for room in rooms if room.fits(line.work)]
        if not fitting or len(starts) == most:
            break
        room = max(fitting, key=lambda r: (r.free_share, r.engine.id))
        room.take(line.work)
        starts.append(LineStart(batch, line.number, room.engine.id))
    return starts


def in_turn(queues: Sequence[Queue]) -> Iterator[tuple[str, BatchCandidate]]:
    """Lines and their batches in the order in which they may start, all of one model."""
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
    """The most KV, in tokens, that sequences hold at once while each generates a token a step.

    A sequence that ends frees what it held, so the worst moment is just before one ends: with the
    sequences ordered by what is left, the longest first, that of the k-th is the sum of what the
    first k hold, and k times what is left of the k-th (Gong et al., Past-Future Scheduler for LLM
    Serving under SLA Guarantees, ASPLOS 2025).
    """
    most = held = 0.0
    count = 0
    for work in sorted(works, key=lambda work: -work.left):
        held += work.held * work.sequences
        count += work.sequences
        most = max(most, held + count * work.left)
    return most


class _Room:
    """What an engine has free for lines, while they are chosen."""

    def __init__(self, engine: EngineCapacity) -> None:
        self.engine = engine
        self._works = [line.work for line in engine.lines if not line.ended]
        known = [line.work for line in engine.lines if line.measured]
        online = max(0, engine.running - sum(work.sequences for work in known))
        used = max(0.0, engine.used - sum(work.held * work.sequences for work in known))
        self._alone = not online and not self._works
        self._places = engine.places - int(engine.places * _PLACES_LEFT) - online
        # What online requests have yet to generate is not known: as much again as they hold.
        self._memory = engine.capacity * (1 - _MEMORY_LEFT) - 2 * used

    def fits(self, work: LineWork) -> bool:
        if self._alone:
            # The engine itself refuses what it can never hold.
            return True
        places = sum(one.sequences for one in self._works) + work.sequences
        return places <= self._places and peak([*self._works, work]) <= self._memory

    def take(self, work: LineWork) -> None:
        self._alone = False
        self._works.append(work)

    @property
    def free_share(self) -> float:
        return (self._memory - peak(self._works)) / max(1, self.engine.capacity)


def _turn(queue: Queue, owner_served: float, served: float) -> tuple[object, ...]:
    urgency = queue.deadline_s if queue.late else 0.0
    return owner_served, queue.owner, not queue.late, urgency, served, queue.batch
