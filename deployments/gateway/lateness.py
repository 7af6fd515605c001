"""Refusal of requests that are predicted to miss their deadline."""

from __future__ import annotations

import time

from loomserve.deployments.gateway.answering import ForwardRequest
from loomserve.platform.base.errors import TooManyRequests
from loomserve.platform.front_end.routing import RoutingRequest
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.scheduling.policy.queue import QueuedRequest
from loomserve.routers.lateness import finish
from loomserve.routers.ticket import RoutingTicket
from loomserve.routers.waiting import WaitingRequests


def queued(
    request: ForwardRequest, routing: RoutingRequest, ticket: RoutingTicket
) -> QueuedRequest:
    """The request as the queue of the replica that it is booked on will see it."""
    prompt, expected, left_s = len(routing.prompt_token_ids), request.expected_tokens, 0.0
    if expected is not None and ticket.replica is not None:
        alone = finish(ticket.replica, prompt, expected)
        left_s = alone.run_s if alone is not None else 0.0
    return QueuedRequest(
        arrived_s=time.monotonic(),
        tokens=max(1, prompt + round(expected or 0)),
        left=prompt + round(routing.max_tokens or 0 if expected is None else expected),
        left_s=left_s,
        deadline_s=request.deadline,
        background=request.background,
    )


def refuse_if_late(
    request: ForwardRequest,
    seen: QueuedRequest,
    ticket: RoutingTicket,
    waiting: WaitingRequests,
    metrics: GatewayMetrics,
) -> None:
    """
    Args:
        request: what is to be answered.
        seen: the same as its replica's queue will see it.
        ticket: booked on the replica that is to answer it.
        waiting: at the model's replicas.
        metrics: counts refusals.

    Raises:
        TooManyRequests: its key wants that, and it is predicted to end after its deadline.
    """
    replica, expected = ticket.replica, request.expected_tokens
    if not request.refuse_late or request.deadline is None or expected is None or replica is None:
        return
    now = time.monotonic()
    within_s = request.deadline - now
    share = waiting.share_ahead(seen, replica.id, now)
    predicted = finish(replica, ticket.prompt_tokens, expected, share)
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
