"""The memory of requests that engines ended with: by request, for a while, and bounded."""

from __future__ import annotations

from loomserve.platform.requests.query_of_death import QueriesOfDeath


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_request_is_known_by_the_replicas_that_ended_with_it() -> None:
    deadly = QueriesOfDeath(Clock())
    assert not deadly
    for replica in ("r1", "r2", "r1"):
        deadly.ended(b"a", replica)
    deadly.ended(b"b", "r1")
    assert (deadly.replicas(b"a"), deadly.replicas(b"b")) == ({"r1", "r2"}, {"r1"})
    assert deadly.replicas(b"c") == frozenset()


def test_it_is_forgotten_a_while_after_the_last_end_and_at_once_when_it_is_answered() -> None:
    clock = Clock()
    deadly = QueriesOfDeath(clock, remember_s=60)
    deadly.ended(b"a", "r1")
    deadly.ended(b"b", "r1")
    clock.now = 50
    deadly.ended(b"a", "r2")
    clock.now = 60
    assert deadly.replicas(b"b") == frozenset()
    assert deadly.replicas(b"a") == {"r1", "r2"}
    clock.now = 110
    assert deadly.replicas(b"a") == frozenset()
    assert not deadly
    deadly.ended(b"a", "r1")
    deadly.answered(b"a")
    deadly.answered(b"never seen")
    assert not deadly


def test_of_many_the_latest_are_remembered() -> None:
    deadly = QueriesOfDeath(Clock(), most=100)
    for number in range(1000):
        deadly.ended(b"%d" % number, "r1")
    assert sum(bool(deadly.replicas(b"%d" % number)) for number in range(1000)) == 100
    assert deadly.replicas(b"999")
