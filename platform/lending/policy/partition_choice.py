"""In which partition a request's KV starts, and whether it moves: pure policies, chosen by name.

Each of a borrower's requests is in one partition: 0 is its own memory, the others are lenders'. A
policy returns the partition in which a request that holds no KV starts, or None if it must wait. A
step attends in all partitions at once, so its attention takes as long as that of the slowest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A memory for requests' KV, in the borrower's blocks, and what attending there costs."""

    blocks: int  # that it has for the borrower's requests
    free_blocks: int  # of these, with cached prefixes that may be evicted
    needed_blocks: int  # that the arriving request needs there, beyond its prefix cached there
    requests: int  # that run there
    tokens: int  # of context to which a step attends there
    token_s: float
    """Seconds of a step for each of these tokens: measured in the own partition; in a lender's its
    service and the wait for it, with the hand-off of the request's rows."""
    handoff_s: float = 0.0  # of a step, for using this partition at all; 0 for the own one
    allowed: bool = True
    """False while a lender drains, is slow, or holds as much as it may."""
    growth_blocks: float | None = None
    """Mean number of blocks that a request running there will still need; None: not known."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that holds no KV, and where it could start: own memory first."""

    partitions: Sequence[Partition]
    tokens: int  # of context to which the request will attend
    rest_s: float  # of the borrower's step beside attention


Placement = Callable[[Arrival, float], int | None]
"""Maps an arrival and the share of requests to lend, which only ``ratio`` reads, to a partition."""


def local(arrival: Arrival, lent_share: float) -> int | None:
    """Never lend: as in stock vLLM, a request starts as soon as its blocks are free."""
    return 0 if _fits(arrival.partitions[0], arrival.partitions[0].needed_blocks) else None


def ratio(arrival: Arrival, lent_share: float) -> int | None:
    """Lend ``lent_share`` of the running requests, in [0, 1]: Weaver's fixed share. In the paper
    each sequence is put in a partition at random and left there; here a request goes where the
    share is missed, which meets it without the noise. The emptiest lender takes it. A request for
    which its kind of partition has no room starts in the other."""
    partitions = arrival.partitions
    running = sum(partition.requests for partition in partitions)
    lent = running - partitions[0].requests
    lend = lent + 0.5 < lent_share * (running + 1)
    fitting = [
        at for at, partition in enumerate(partitions) if _fits(partition, partition.needed_blocks)
    ]
    wanted = [at for at in fitting if (at > 0) is lend]
    return max(wanted or fitting, key=lambda at: partitions[at].free_blocks, default=None)


def adaptive(arrival: Arrival, lent_share: float) -> int | None:
    """Prefer own memory while it has room and attention is not most of a step; else balance work.
    Of the partitions that keep headroom for running requests to grow, the one with which attention
    takes least takes the request, if the borrower then generates more tokens a second than without
    it. A request that no lender takes starts as with ``local``, without headroom: lending never
    makes a request wait that would not have waited otherwise."""
    partitions = arrival.partitions
    roomy = [
        at
        for at, partition in enumerate(partitions)
        if _has_room(partition, partition.needed_blocks)
    ]
    if (
        0 in roomy
        and _partition_s(partitions[0], partitions[0].tokens + arrival.tokens) <= arrival.rest_s
    ):
        return 0
    by_work = sorted(roomy, key=lambda at: (_attention_s(partitions, arrival.tokens, to=at), at))
    if by_work and _speeds_up(arrival, by_work[0]):
        return by_work[0]
    return local(arrival, lent_share)


PLACEMENTS: Mapping[str, Placement] = {"local": local, "ratio": ratio, "adaptive": adaptive}


@dataclass(frozen=True, slots=True)
class Resident:
    """A request that runs in a partition with too few free blocks for its next step."""

    blocks: int  # that it holds there
    tokens: int  # of its context
    copy_s: float  # predicted, to copy its KV to another partition
    recompute_s: float  # predicted, to compute it again


@dataclass(frozen=True, slots=True)
class RequestMove:
    """The move of a request, by its index among those given, to a partition."""

    request: int
    partition: int


def move(
    partitions: Sequence[Partition],
    requests: Sequence[Resident],
    exhausted: int,
    missing_blocks: int,
) -> RequestMove | None:
    """Return the cheapest move that makes an exhausted partition's preemptions unnecessary, if any.
    ``requests`` are those in the partition ``exhausted``, in the order in which they would be
    preempted and computed again; its next step lacks ``missing_blocks``. The move is of the request
    whose blocks suffice and that is copied in the shortest time, to the partition with headroom for
    it where attention then takes least. None, too, if computing again what would be preempted takes
    no longer than the copy."""
    victims = takewhile(
        lambda at: sum(each.blocks for each in requests[:at]) < missing_blocks, range(len(requests))
    )
    recompute_s = sum(requests[at].recompute_s for at in victims)
    moves = [
        (
            request.copy_s,
            _attention_s(partitions, request.tokens, to=to, leaves=exhausted),
            RequestMove(at, to),
        )
        for at, request in enumerate(requests)
        for to, partition in enumerate(partitions)
        if to != exhausted
        and request.blocks >= missing_blocks
        and request.copy_s < recompute_s
        and _has_room(partition, request.blocks)
    ]
    return min(moves, key=lambda each: each[:2])[2] if moves else None


def headroom_blocks(partition: Partition, blocks: int) -> float:
    """Return how many blocks a partition's requests need to grow, once one more holds ``blocks``.
    Of n requests that hold h blocks each and will grow by g each, in the mean, the first to end
    give their blocks back before the last have grown. If what is left to grow is uniform on [0,
    2g], n (1 - t/2g) of them still run when they have grown by t blocks, and hold h + t each: at
    most n (2g - h)² / 8g more than now, and never more than now if h >= 2g. A request that is alone
    pushes no other out, so it needs none; where the growth is not known, it is one block."""
    if not partition.requests:
        return 0.0
    requests = partition.requests + 1
    if partition.growth_blocks is None:
        return float(requests)
    if partition.growth_blocks <= 0:
        return 0.0
    held = (partition.blocks - partition.free_blocks + blocks) / requests
    lacking = max(2 * partition.growth_blocks - held, 0.0)
    return requests * lacking**2 / (8 * partition.growth_blocks)


def _fits(partition: Partition, blocks: int) -> bool:
    return partition.allowed and blocks <= partition.free_blocks


def _has_room(partition: Partition, blocks: int) -> bool:
    return (
        _fits(partition, blocks)
        and headroom_blocks(partition, blocks) <= partition.free_blocks - blocks
    )


def _partition_s(partition: Partition, tokens: int) -> float:
    return partition.handoff_s + tokens * partition.token_s if tokens else 0.0


def _attention_s(
    partitions: Sequence[Partition],
    tokens: int,
    *,
    to: int | None = None,
    leaves: int | None = None,
) -> float:
    """Return a step's attention in seconds, with ``tokens`` more in ``to``, fewer in ``leaves``."""
    return max(
        _partition_s(partition, partition.tokens + tokens * ((at == to) - (at == leaves)))
        for at, partition in enumerate(partitions)
    )


def _speeds_up(arrival: Arrival, at: int) -> bool:
    """Return whether a step yields more tokens a second with the request there."""
    running = sum(partition.requests for partition in arrival.partitions)
    without_s = arrival.rest_s + _attention_s(arrival.partitions, 0)
    with_s = arrival.rest_s + _attention_s(arrival.partitions, arrival.tokens, to=at)
    return running * with_s < (running + 1) * without_s or not running


_SMOOTHING = 0.1
# Before the first lent step: about the time of reading a small model's KV from a CPU's memory.
_FIRST_TOKEN_S = 1e-5
_FIRST_STEP_S = 0.03
# Before the first copy: about the time in which a computing lender looks for tasks some times.
_FIRST_BLOCK_COPY_S = 0.01


class PartitionCosts:
    """Moving averages of seconds a step, and a copied block. A token of context costs its reading
    wherever it lies, so the cost seen in lenders' service is taken for the own partition too, whose
    attention runs within operators that nobody times."""

    def __init__(self) -> None:
        self.token_s = _FIRST_TOKEN_S
        self.step_s = _FIRST_STEP_S
        self._block_copy_s = _FIRST_BLOCK_COPY_S
        self._handoff_s: defaultdict[int, float] = defaultdict(float)

    def handoff_s(self, partition: int) -> float:
        """Seconds that a step waits until this lender serves."""
        return self._handoff_s[partition]

    def copy_s(self, blocks: int) -> float:
        return blocks * self._block_copy_s

    def saw_copy(self, blocks: int, seconds: float) -> None:
        if blocks:
            self._block_copy_s += _SMOOTHING * (seconds / blocks - self._block_copy_s)

    def rest_s(self, own_tokens: int) -> float:
        """Return the seconds of a step beside attention to ``own_tokens``."""
        return max(0.0, self.step_s - own_tokens * self.token_s)

    def saw_step(self, seconds: float) -> None:
        self.step_s += _SMOOTHING * (seconds - self.step_s)

    def saw_lender(self, partition: int, tokens: int, service_s: float, delay_s: float) -> None:
        """Learn from a step in which a lender attended to ``tokens`` of context in all layers, in
        ``service_s`` seconds, after ``delay_s`` seconds of waits in all."""
        if tokens:
            self.token_s += _SMOOTHING * (service_s / tokens - self.token_s)
            self._handoff_s[partition] += _SMOOTHING * (delay_s - self._handoff_s[partition])

    def forget(self, partition: int) -> None:
        """Forget a lender, whose partition another may get."""
        self._handoff_s.pop(partition, None)
