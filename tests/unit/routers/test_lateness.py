"""When a request is predicted to end: the formula as a table, and what must hold for any load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.state import Pace, ReplicaLoad
from loomserve.routers.base import Replica
from loomserve.routers.lateness import Finish, finish

PACE = Pace(prefill_token_s=0.01, output_token_s=0.1, request_s=8.0)


def replica(
    running: int, waiting: int = 0, pace: Pace | None = PACE, max_running: int = 4
) -> Replica:
    load = ReplicaLoad(
        running=running,
        waiting=waiting,
        kv_cache_usage=0.0,
        step_time_s=0.1,
        pace=pace,
        measured_at=1.0,
    )
    return Replica("r", load, max_running, queue_length=running + waiting)


@pytest.mark.parametrize(
    ("replica_", "wait_s"),
    [
        (replica(0), 0.0),
        (replica(3), 0.0),
        # One of four places must become free: every 8 / 4 seconds one does.
        (replica(4), 2.0),
        (replica(4, waiting=3), 8.0),
        # Its memory is full with two, of which one ends every 4 seconds.
        (replica(2, waiting=1), 8.0),
        (replica(0, waiting=1), 0.0),
        # Sent since the measurement.
        (replica(0)._replace(queue_length=4), 2.0),
    ],
)
def test_a_request_waits_for_those_before_it_and_then_takes_its_own_time(
    replica_: Replica, wait_s: float
) -> None:
    assert finish(replica_, 100, 20.0) == Finish(pytest.approx(wait_s), pytest.approx(1.0 + 2.0))
    assert finish(replica_, 100, 20.0).total_s == pytest.approx(wait_s + 3.0)  # type: ignore[union-attr]


@pytest.mark.parametrize("replica_", [Replica("new"), replica(4, waiting=9, pace=None)])
def test_of_a_replica_that_has_not_served_yet_nothing_is_predicted(replica_: Replica) -> None:
    assert finish(replica_, 100, 20.0) is None


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 20), st.integers(0, 500))
def test_who_waits_behind_more_or_answers_longer_never_ends_earlier(
    running: int, waiting: int, places: int, tokens: int
) -> None:
    running = min(running, places)

    def ends(waiting: int, tokens: float) -> float:
        found = finish(replica(running, waiting, max_running=places), 10, tokens)
        assert found is not None
        return found.total_s

    assert ends(waiting + 1, tokens) >= ends(waiting, tokens)
    assert ends(waiting, tokens + 1) > ends(waiting, tokens)
