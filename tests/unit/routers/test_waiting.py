"""Requests wait at a replica from when they go there until their answer begins or they leave."""

from __future__ import annotations

from loomserve.platform.scheduling.policy.queue import QueuedRequest
from loomserve.routers.waiting import WaitingRequests


def within(seconds: float) -> QueuedRequest:
    return QueuedRequest(arrived_s=seconds, tokens=1, left=1, deadline_s=seconds)


def waiting(*seconds: float) -> WaitingRequests:
    made = WaitingRequests()
    made.order_by("deadline", deadlines=True)
    for each in seconds:
        made.came(each, "r", within(each), began=lambda: False)
    return made


def test_requests_count_by_their_order_at_their_own_replica() -> None:
    made = waiting(10.0, 20.0, 30.0, 40.0)
    made.came("elsewhere", "other", within(1.0), began=lambda: False)
    assert made.share_ahead(within(25.0), "r", now=0.0) == 0.5
    assert made.share_ahead(within(25.0), "other", now=0.0) == 1.0
    assert made.share_ahead(within(0.5), "other", now=0.0) == 0.0


def test_who_has_left_or_begun_does_not_wait() -> None:
    made = waiting(10.0, 40.0)
    begun = False
    made.came("begins", "r", within(15.0), began=lambda: begun)
    made.left(10.0, "r")
    made.left(10.0, "r")
    assert made.share_ahead(within(25.0), "r", now=0.0) == 0.5
    begun = True
    assert made.share_ahead(within(25.0), "r", now=0.0) == 0.0
    made.left(40.0, "r")
    made.left("begins", "r")
    assert made.share_ahead(within(25.0), "r", now=0.0) == 1.0, "nothing is known"


def test_engines_that_heed_no_deadlines_serve_in_the_order_of_arrival() -> None:
    made = waiting(10.0, 20.0)
    made.order_by("deadline", deadlines=False)
    assert made.share_ahead(within(25.0)._replace(deadline_s=5.0), "r", now=0.0) == 1.0
