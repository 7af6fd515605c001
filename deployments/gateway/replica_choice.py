"""Chooses replicas for requests whose front end is in the gateway's own process."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial

from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.platform.base.errors import TooManyRequests
from loomserve.platform.config import Router
from loomserve.platform.front_end.routing import RoutingContext, RoutingRequest
from loomserve.platform.http.engine_errors import no_replica
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.tracing import RequestTrace
from loomserve.routers.base import Decision
from loomserve.routers.in_flight import InFlight
from loomserve.routers.lateness import finish
from loomserve.routers.policy import NodesKv
from loomserve.routers.policy_choice import ReplicaChooser, RoutingTicket
from loomserve.routers.prefix_index import token_keys
from loomserve.routers.table import ReplicaTable

# Engines count exactly; this stands for an answer of which nothing is known.
_ANSWER_TOKENS = 256
_NOBODY: frozenset[str] = frozenset()


@dataclass(eq=False, kw_only=True)
class AnswerContext(RoutingContext):
    """What routing knows of the HTTP request at hand."""

    request: ModelRequest
    chosen: bool = False
    """Whether a replica has been chosen that is to answer it."""
    on_chosen: Callable[[], object] | None = None
    """Called once, when one is chosen."""
    queues: dict[RoutingRequest, Callable[[], bool]] = field(default_factory=dict)
    """Of what engines have of it: whether requests wait at that engine."""
    _waits: ExitStack = field(default_factory=ExitStack)
    _waiting: bool = False

    @classmethod
    def of(cls, request: ModelRequest) -> AnswerContext:
        return cls(
            request=request,
            carried_on=request.carried_on,
            usage=request.usage,
            trace=request.recorded,
            salt=request.content.salt,
        )

    def waits(self, counted: AbstractContextManager[None]) -> None:
        """It waits for a replica, and is counted as such until :meth:`goes_on`."""
        if not self._waiting:
            self._waiting = True
            self._waits.enter_context(counted)
            if self.trace is not None:
                self._waits.enter_context(self.trace.during("wait_for_replica"))

    @property
    def may_wait(self) -> bool:
        """Whether it may be one of the requests that wait at an engine, as preempted ones do."""
        return any(has_queue() for has_queue in self.queues.values())

    def is_chosen(self) -> None:
        if not self.chosen:
            self.chosen = True
            if (begin := self.on_chosen) is not None:
                self.on_chosen = None
                begin()

    def goes_on(self) -> None:
        self._waiting = False
        self._waits.close()


class ReplicaChoice:
    """The choice of replicas for one model's front end, by its policy."""

    def __init__(
        self,
        model: str,
        router: Router,
        ledger: InFlight,
        metrics: GatewayMetrics,
        table: ReplicaTable,
    ) -> None:
        """``table``: the model's replicas, kept up to date by the caller."""
        self._model = model
        self._policy = router.policy
        self._chooser = ReplicaChooser(
            model, router.policy, table, load_limit=router.load_limit, options=router.options
        )
        self._ledger = ledger
        self._metrics = metrics
        self._table = table
        self._open = metrics.in_flight(model)
        self._booked: dict[RoutingRequest, tuple[RoutingTicket, AnswerContext | None]] = {}
        self.untried: Callable[[], frozenset[str]] = lambda: _NOBODY
        """Replicas that have not given their first answer, and get no client's request before."""
        self._last_excluded = (_NOBODY, _NOBODY, _NOBODY)
        """The table's replicas, a request's candidates, and those that were none."""

    def set_kv(self, kv: NodesKv) -> None:
        self._chooser.model.kv = kv

    def choose(self, routing: RoutingRequest) -> str | None:
        """Book a request on a replica until :meth:`left`; None: it waits. Raises RequestError."""
        context = routing.context if isinstance(routing.context, AnswerContext) else None
        request = context.request if context is not None else None
        ticket = self._ticket(routing, request)
        decision = self._chooser.decide(ticket)
        if decision is None:
            if not routing.prompt_only:
                self._note_wait(ticket, context)
            return None
        try:
            if request is not None and _is_first(routing):
                _refuse_if_late(request, ticket, self._metrics)
            if context is not None:
                self._chosen(context, routing, decision)
        except BaseException:
            ticket.close()
            raise
        self._open[decision.replica_id] += 1
        self._booked[routing] = ticket, context
        return decision.replica_id

    def left(self, routing: RoutingRequest, replica_id: str) -> None:
        """The request has ended at the replica, or has left it."""
        booked = self._booked.pop(routing, None)
        if booked is not None:
            ticket, context = booked
            ticket.close()
            self._open[replica_id] -= 1
            if context is not None:
                context.queues.pop(routing, None)

    def _chosen(self, context: AnswerContext, routing: RoutingRequest, decision: Decision) -> None:
        context.goes_on()
        if not routing.prompt_only:
            context.is_chosen()
        if context.trace is not None:
            self._tell(context.trace, routing, decision)
        context.queues[routing] = partial(self._has_queue, decision.replica_id)

    def _has_queue(self, replica_id: str) -> bool:
        load = self._table.last_load(replica_id)
        return load is not None and load.waiting > 0

    def _ticket(self, routing: RoutingRequest, request: ModelRequest | None) -> RoutingTicket:
        expected = request.expected_tokens if request is not None else None
        output_tokens = _ANSWER_TOKENS if expected is None else round(expected)
        return RoutingTicket(
            self._ledger,
            prompt_tokens=len(routing.prompt_token_ids),
            hash_prompt=lambda: token_keys(
                routing.prompt_token_ids,
                model=self._model,
                salt=routing.cache_salt,
                adapter=routing.adapter,
            ),
            output_tokens=min(output_tokens, routing.max_tokens or output_tokens),
            sequences=routing.sequences,
            exclude=self._excluded(routing, request),
            # What it has been pinned for is gone with the first replica.
            pinned_to=request.pinned_to if request is not None and _is_first(routing) else None,
        )

    def _excluded(self, routing: RoutingRequest, request: ModelRequest | None) -> frozenset[str]:
        """The replicas that it cannot go to; nearly all requests have the same candidates."""
        known, of, excluded = self._last_excluded
        if known is not self._table.known_ids or of is not routing.candidates:
            excluded = self._table.known_ids - routing.candidates
            self._last_excluded = self._table.known_ids, routing.candidates, excluded
        untried = self.untried()
        if untried and not (request is not None and request.is_first):
            excluded |= untried
        return excluded | routing.excluded if routing.exclude else excluded

    def _tell(self, trace: RequestTrace, routing: RoutingRequest, decision: Decision) -> None:
        trace.event(
            "route",
            {
                "loomserve.sequence": routing.request_id,
                "loomserve.replica": decision.replica_id,
                "loomserve.policy": self._policy,
                "loomserve.reason": decision.reason,
                "loomserve.candidates": len(routing.candidates),
                "loomserve.attempt": routing.attempt,
                "loomserve.prompt_only": routing.prompt_only,
            },
        )

    def _note_wait(self, ticket: RoutingTicket, context: AnswerContext | None) -> None:
        if ticket.pinned_to is not None:
            # Whoever pinned it looks for another; one that is only just starting is not worth it.
            raise no_replica(self._model)
        if context is not None:
            context.waits(self._metrics.queued(self._model))


def _is_first(routing: RoutingRequest) -> bool:
    return not (routing.attempt or routing.prompt_only)


def _refuse_if_late(request: ModelRequest, ticket: RoutingTicket, metrics: GatewayMetrics) -> None:
    """Raise TooManyRequests if the request more likely than not ends after its deadline."""
    replica, tokens = ticket.replica, request.median_tokens
    if request.refuse_after is None or tokens is None or replica is None:
        return
    within_s = request.refuse_after - time.monotonic()
    predicted = finish(replica, ticket.prompt_tokens, tokens)
    if predicted is None or predicted.total_s <= within_s:
        return
    metrics.refused_late(request.model)
    raise TooManyRequests(
        f"model {request.model!r} is predicted to answer in {predicted.total_s:.1f} s, of "
        f"which it waits {predicted.wait_s:.1f} s, and x-slo-ms leaves {within_s:.1f} s; try "
        "again later, or allow more time",
        param="x-slo-ms",
        reason="deadline_unreachable",
        retry_after_s=predicted.wait_s,
    )
