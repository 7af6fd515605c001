"""Refusal of requests that are predicted to miss their deadline."""

from __future__ import annotations

import time

from loomserve.deployments.gateway.answering import ForwardRequest
from loomserve.platform.base.errors import TooManyRequests
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.routers.lateness import finish
from loomserve.routers.ticket import RoutingTicket


def refuse_if_late(request: ForwardRequest, ticket: RoutingTicket, metrics: GatewayMetrics) -> None:
    """
    Args:
        request: what is to be answered.
        ticket: booked on the replica that is to answer it.
        metrics: counts refusals.

    Raises:
        TooManyRequests: it is more likely than not to end after ``request.refuse_after``.
    """
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
