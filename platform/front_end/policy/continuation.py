"""Which replicas are lost, and whether a request that one of them had goes on, waits or ends.

A request goes on with the tokens it has. It is suspected of an engine's end until it has gone well
past the token at which that engine ended: a request that ends engines does so at the same token
again. It is not suspected if the engine had given it tokens for a while: it was there when another
one came.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple


class Loss(StrEnum):
    """Why a request has to leave a replica."""

    GONE = "gone"
    """The engine's process has ended."""
    CUT = "cut"
    """The connection to it has ended, and its process may go on."""
    SILENT = "silent"
    """It has sent nothing for a while: stopped or unreachable."""
    HUNG = "hung"
    """It answers, has requests, and takes no step, though it has what it needs to."""
    FORGOTTEN = "forgotten"
    """It runs, but has given the request up."""
    DRAINED = "drained"
    """The platform takes it away."""
    MOVED = "moved"
    """It runs, and another one has less to do."""


BLAMED = frozenset({Loss.GONE, Loss.HUNG})
"""What a request may have caused."""

_STALLED = frozenset({Loss.SILENT, Loss.HUNG})


class Action(StrEnum):
    """What becomes of a request."""

    GO_ON = "go_on"
    WAIT = "wait"
    """It stays with its replica if that one still is, or waits for another."""
    END_SUSPECT = "suspect"
    """Engines ended with it, and no more are to."""
    END_STALLED = "stalled"
    """Engines stood still with it, though not all of them ended, and no more are to."""
    END_TOO_OFTEN = "too_often"
    END_RETURNED = "returned"
    """Its engine ended, and its sender finds out whether it was the cause."""
    END_NO_REPLICA = "no_replica"


@dataclass(frozen=True)
class ContinuationBounds:
    """Limits of continuation."""

    silence_s: float = 3.0
    """Of a replica's own clock, as is ``hang_s``:
    :func:`~loomserve.platform.engine.process.policy.silence.counted_against`."""
    hang_s: float = 60.0
    reroute_timeout_s: float = 30.0
    """How long a request waits for a replica that can take it."""
    begun_timeout_s: float = 60.0
    """The same of one whose answer has begun, which its client cannot ask for elsewhere."""
    most_losses: int = 3
    """Engines by whose end one request may be carried on; likewise moves for other reasons."""
    most_suspected: int = 2
    """Engines that may have ended because of one request before it is ended itself."""
    proven_tokens: int = 8
    """A request that got so many tokens of an engine, or after its end, was not the cause of it."""
    resumes: bool = True
    """False: tokens that were computed again would go on with another text, as those of a model
    with a state do."""


@dataclass(frozen=True)
class ReplicaView:
    """A connected replica as its front end sees it; times are of the replica's own clock."""

    heard_at: float
    stepped_at: float
    """When its count of steps last changed, or when it last had no request."""
    open: int
    draining: bool = False


class Death(NamedTuple):
    """An engine's end or standstill, as a request that it had saw it."""

    at: int
    """Tokens that the request then had."""
    given: int = 0
    """Those of them that this engine had given."""
    ended: bool = True


@dataclass(frozen=True)
class RequestView:
    """A request that is to leave its replica, or that has none."""

    placed: bool = False
    tokens: int = 0
    deaths: Sequence[Death] = ()
    moves: int = 0
    """How often it left a replica for another reason than that or draining."""
    waiting_since: float | None = None
    carried_on: bool = True
    """False: once it is suspected it goes back to its sender."""


def loss(replica: ReplicaView, now: float, bounds: ContinuationBounds) -> Loss | None:
    """Why a connected replica's requests have to leave it, if they have to."""
    if now - replica.heard_at > bounds.silence_s:
        return Loss.SILENT
    if replica.open and now - replica.stepped_at > bounds.hang_s:
        return Loss.HUNG
    return Loss.DRAINED if replica.draining else None


def suspicions(request: RequestView, bounds: ContinuationBounds) -> Sequence[Death]:
    """The deaths that the request may have caused."""
    proven = bounds.proven_tokens
    deaths = request.deaths
    return [one for one in deaths if request.tokens - one.at < proven and one.given < proven]


def next_action(
    request: RequestView, lost: Loss | None, *, others: bool, now: float, bounds: ContinuationBounds
) -> Action:
    """What becomes of a request. ``lost``: why it leaves its replica; None: it has not been with
    one. ``others``: whether there is a replica that could take it."""
    suspected = suspicions(request, bounds)
    if len(suspected) >= bounds.most_suspected:
        return Action.END_SUSPECT if all(one.ended for one in suspected) else Action.END_STALLED
    if not request.carried_on and any(one.ended for one in suspected):
        return Action.END_RETURNED
    if len(request.deaths) > bounds.most_losses:
        return Action.END_TOO_OFTEN
    if request.tokens and not bounds.resumes:
        if not request.placed:
            return Action.END_RETURNED
        others = False
    if lost not in BLAMED and lost is not Loss.DRAINED and request.moves >= bounds.most_losses:
        if lost is Loss.FORGOTTEN or (lost is Loss.CUT and request.moves > bounds.most_losses):
            return Action.END_TOO_OFTEN
        # Moving again would only add to what its replicas have to do.
        others = others and not request.placed
    if others:
        return Action.GO_ON
    since = now if request.waiting_since is None else request.waiting_since
    stands_still = not request.placed or lost in _STALLED
    patience_s = bounds.begun_timeout_s if request.tokens else bounds.reroute_timeout_s
    if stands_still and now - since >= patience_s:
        return Action.END_NO_REPLICA
    return Action.WAIT


class Ending(NamedTuple):
    """How an answer has ended."""

    reason: Literal["stop", "length"]
    stop_token: int | None = None
    """The stop token that ended it, if the client had asked for one."""


@dataclass(frozen=True)
class AnswerLimits:
    """What ends an answer in an engine, as far as its tokens alone show."""

    prompt_tokens: int
    max_tokens: int | None
    max_model_len: int
    eos_token: int | None
    """None: the end of sequence is ignored."""
    stop_tokens: Set[int]


def ending(tokens: Sequence[int], limits: AnswerLimits) -> Ending | None:
    """How the answer has ended with its last token, if it has; in vLLM's order of checks."""
    if not tokens:
        return None
    if tokens[-1] == limits.eos_token:
        return Ending("stop")
    if tokens[-1] in limits.stop_tokens:
        return Ending("stop", tokens[-1])
    full = limits.prompt_tokens + len(tokens) >= limits.max_model_len
    if full or (limits.max_tokens is not None and len(tokens) >= limits.max_tokens):
        return Ending("length")
    return None
