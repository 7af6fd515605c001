"""The interface between a front end and its router, which chooses replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from loomserve.platform.base.errors import RequestError
from loomserve.platform.requests.usage import RequestUsage
from loomserve.platform.tracing import RequestTrace


@dataclass(eq=False)
class RoutingContext:
    """What the gateway knows of the HTTP request at hand; it adds what its router asks for."""

    carried_on: bool = True
    """False: once its engine may have ended because of it, it ends, and its sender decides."""
    failure: RequestError | None = None
    """The error that ended the request, which vLLM gives its client in its own shape."""
    usage: RequestUsage = field(default_factory=RequestUsage)
    engines: dict[str, Callable[[], int | None]] = field(default_factory=dict)
    """Of each of its sequences: the steps of the engine that gives it tokens. None: none does, or
    none since it goes on elsewhere."""
    salt: str | None = None
    """Its cache salt, where vLLM's request has no field for it."""
    trace: RequestTrace | None = None
    """Has a span for each replica that it is with; None: there is none."""


routing_context: ContextVar[RoutingContext | None] = ContextVar("routing_context", default=None)


@dataclass(frozen=True, eq=False)
class RoutingRequest:
    """A request, or the rest of one, that needs a replica; the same object until it leaves that."""

    request_id: str
    """One for each of several answers to one prompt."""
    external_id: str
    """The HTTP request's id; answers to one prompt share it."""
    prompt_token_ids: Sequence[int]
    """With the tokens of the answer so far; empty for prompts that are embeddings."""
    max_tokens: int
    """The most tokens that are to come."""
    candidates: frozenset[str]
    """Ids of the replicas that can take it; nearly all requests of a moment share one set."""
    exclude: frozenset[str] = frozenset()
    """Ids of replicas whose engine ended with it; it goes to them only if there are no others."""
    cache_salt: str | None = None
    adapter: str | None = None
    """Key of its adapter's KV; None: it asks for the model itself."""
    sequences: int = 1
    attempt: int = 0
    """How often it has left a replica."""
    prompt_only: bool = False
    """It is computed up to its first token, for a replica that has been chosen for its answer."""
    context: RoutingContext | None = None
    """Of :data:`routing_context`, as it was when the request came."""

    @property
    def excluded(self) -> frozenset[str]:
        """Ids that it does not go to, candidates or not."""
        return frozenset() if self.candidates <= self.exclude else self.exclude


Choose = Callable[[RoutingRequest], str | None]
"""The id of one of the candidates; None: the request waits.

It may raise a :class:`~loomserve.platform.base.errors.RequestError`, with which the request ends.
"""

Left = Callable[[RoutingRequest, str], None]
"""Called once for each chosen replica, with its id, when the request ends there or leaves it."""


def nothing(*_: Any) -> None:
    """A listener that ignores what it hears."""


class InvalidChoiceError(Exception):
    """A router chose a replica that is no candidate."""


def checked(choose: Choose) -> Choose:
    """``choose``, but raising InvalidChoiceError for a replica that is no candidate."""

    def chosen(routing: RoutingRequest) -> str | None:
        replica_id = choose(routing)
        allowed = replica_id in routing.candidates and replica_id not in routing.excluded
        if replica_id is not None and not allowed:
            raise InvalidChoiceError(
                f"{replica_id!r} is none of {sorted(routing.candidates - routing.excluded)}"
            )
        return replica_id

    return chosen
