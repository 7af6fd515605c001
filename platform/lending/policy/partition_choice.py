"""On which side a request's KV starts, and whether it moves: pure policies, chosen by name.

A borrower's requests live on sides: side 0 is its own memory, the others are lenders'. A policy
answers the side on which a request that holds no KV starts, or None if it shall wait. A step
attends on all sides at once, so its attention takes as long as that of its slowest side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A memory that may hold requests' KV, in the borrower's blocks, with what it costs to attend.

    Attributes:
        blocks: It has for the borrower's requests.
        free_blocks: Of them, cached prefixes that may be evicted included.
        needed_blocks: The arriving request needs there, beyond the prefix that is cached there.
        requests: Of the borrower, running there.
        tokens: Of context that a step attends to there.
        token_s: Seconds a step for attending to one of them: measured on the own side; on a
            lender's its service, and waiting for it, with the hand-off of the request's rows.
        handoff_s: Seconds that a step takes for using this side at all; 0 for the own one.
        allowed: Whether requests may start there; False while a lender drains, is slow, or has as
            many guests as it may.
        growth_blocks: What a request running there will still come to need, in the mean; None if
            that is not known.
    """

    blocks: int
    free_blocks: int
    needed_blocks: int
    requests: int
    tokens: int
    token_s: float
    handoff_s: float = 0.0
    allowed: bool = True
    growth_blocks: float | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that holds no KV, and where it could start.

    Attributes:
        sides: The borrower's own memory first.
        tokens: Of context that the request will attend to.
        rest_s: Seconds of a step of the borrower beside attention.
    """

    sides: Sequence[Partition]
    tokens: int
    rest_s: float


Placement = Callable[[Arrival, float], int | None]
"""Of an arrival and the share of the requests that is lent, which only ``ratio`` reads."""


def local(arrival: Arrival, lent_share: float) -> int | None:
    """Never lends: as stock vLLM, a request starts as soon as its blocks are free."""
    return 0 if _fits(arrival.sides[0], arrival.sides[0].needed_blocks) else None


def ratio(arrival: Arrival, lent_share: float) -> int | None:
    """Weaver's fixed share: ``lent_share`` of the running requests is lent, in [0, 1].

    The paper's ratio is one of sequences, each put on a side at random and left there; here a
    request goes where the share is missed, which meets it without the noise. The emptiest lender
    takes it. A request for which its kind of side has no room starts on the other.
    """
    sides = arrival.sides
    running = sum(side.requests for side in sides)
    lent = running - sides[0].requests
    lend = lent + 0.5 < lent_share * (running + 1)
    fitting = [at for at, side in enumerate(sides) if _fits(side, side.needed_blocks)]
    wanted = [at for at in fitting if (at > 0) is lend]
    return max(wanted or fitting, key=lambda at: sides[at].free_blocks, default=None)


def adaptive(arrival: Arrival, lent_share: float) -> int | None:
    """Own memory while it has room and attention is not most of a step; else balances the work.

    Of the sides that keep the headroom which running requests will grow into, the one with which
    attention takes least takes the request, if that lets the borrower generate more tokens a
    second than without the request. What no lender takes starts as ``local`` has it, without
    headroom: lending never makes a request wait that would not have waited otherwise.
    """
    sides = arrival.sides
    roomy = [at for at, side in enumerate(sides) if _has_room(side, side.needed_blocks)]
    if 0 in roomy and _side_s(sides[0], sides[0].tokens + arrival.tokens) <= arrival.rest_s:
        return 0
    by_work = sorted(roomy, key=lambda at: (_attention_s(sides, arrival.tokens, to=at), at))
    if by_work and _speeds_up(arrival, by_work[0]):
        return by_work[0]
    return local(arrival, lent_share)


PLACEMENTS: Mapping[str, Placement] = {"local": local, "ratio": ratio, "adaptive": adaptive}


@dataclass(frozen=True, slots=True)
class Resident:
    """A request that runs on a side that has too few free blocks for its next step.

    Attributes:
        blocks: It holds there.
        tokens: Of its context.
        copy_s: Predicted seconds to copy its KV to another side.
        recompute_s: Predicted seconds to compute it again.
    """

    blocks: int
    tokens: int
    copy_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True)
class RequestMove:
    """A request, by its place in the sequence it was given in, goes to a side."""

    request: int
    side: int


def move(
    sides: Sequence[Partition], requests: Sequence[Resident], exhausted: int, missing_blocks: int
) -> RequestMove | None:
    """The cheapest move that makes the preemptions unnecessary which a side would else need.

    Args:
        sides: With no request arriving: ``needed_blocks`` is not read.
        requests: Those on the exhausted side, in the order in which they would be preempted and
            computed again.
        exhausted: The side.
        missing_blocks: What its next step lacks there.

    Returns:
        The request whose blocks suffice and that is copied in the shortest time, and the side with
        headroom for it where attention then takes least; None if there is none, or if computing
        again what would be preempted takes no longer than the copy.
    """
    victims = takewhile(
        lambda at: sum(each.blocks for each in requests[:at]) < missing_blocks,
        range(len(requests)),
    )
    recompute_s = sum(requests[at].recompute_s for at in victims)
    moves = [
        (
            request.copy_s,
            _attention_s(sides, request.tokens, to=to, leaves=exhausted),
            RequestMove(at, to),
        )
        for at, request in enumerate(requests)
        for to, side in enumerate(sides)
        if to != exhausted
        and request.blocks >= missing_blocks
        and request.copy_s < recompute_s
        and _has_room(side, request.blocks)
    ]
    return min(moves, key=lambda each: each[:2])[2] if moves else None


def headroom_blocks(side: Partition, blocks: int) -> float:
    """What must stay free for the requests of a side to grow, once one more holds ``blocks``.

    Of n requests that hold h blocks each and will grow by g each, in the mean, the first to end
    give their blocks back before the last have grown. If what is left to grow is uniform on
    [0, 2g], n (1 - t/2g) of them still run when they have grown by t blocks, and hold h + t each:
    at most n (2g - h)² / 8g more than now, and never more than now if h >= 2g. A request that is
    alone pushes no other out, so it needs none; where the growth is not known, it is one block.
    """
    if not side.requests:
        return 0.0
    requests = side.requests + 1
    if side.growth_blocks is None:
        return float(requests)
    if side.growth_blocks <= 0:
        return 0.0
    held = (side.blocks - side.free_blocks + blocks) / requests
    lacking = max(2 * side.growth_blocks - held, 0.0)
    return requests * lacking**2 / (8 * side.growth_blocks)


def _fits(side: Partition, blocks: int) -> bool:
    return side.allowed and blocks <= side.free_blocks


def _has_room(side: Partition, blocks: int) -> bool:
    return _fits(side, blocks) and headroom_blocks(side, blocks) <= side.free_blocks - blocks


def _side_s(side: Partition, tokens: int) -> float:
    return side.handoff_s + tokens * side.token_s if tokens else 0.0


def _attention_s(
    sides: Sequence[Partition], tokens: int, *, to: int | None = None, leaves: int | None = None
) -> float:
    """Of a step, in seconds, with a context of ``tokens`` on ``to`` that may leave ``leaves``."""
    return max(
        _side_s(side, side.tokens + tokens * ((at == to) - (at == leaves)))
        for at, side in enumerate(sides)
    )


def _speeds_up(arrival: Arrival, at: int) -> bool:
    """Whether tokens a second, those of a step over its time, rise with the request."""
    running = sum(side.requests for side in arrival.sides)
    without_s = arrival.rest_s + _attention_s(arrival.sides, 0)
    with_s = arrival.rest_s + _attention_s(arrival.sides, arrival.tokens, to=at)
    return running * with_s < (running + 1) * without_s or not running
