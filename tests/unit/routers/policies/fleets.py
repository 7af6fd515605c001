"""Made-up replicas for tests of policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.base import Candidates, Choice, Decision
from loomserve.routers.in_flight import NOTHING, Assigned, Booking, InFlight
from loomserve.routers.snapshot import RoutingStats
from loomserve.routers.table import ReplicaTable
from tests.unit.routers.reference import ReplicaSeen

NOW = 1_000.0
LIMIT = 1.6
NOBODY: frozenset[str] = frozenset()
STALE_S = 10.0
Pick = Callable[[Candidates], Choice]
"""Chooses one of the candidates, at least one."""


def load(running: int = 0, waiting: int = 0, kv: float = 0.0, age_s: float = 0.0) -> ReplicaLoad:
    return ReplicaLoad(
        running=running,
        waiting=waiting,
        kv_cache_usage=kv,
        step_time_s=0.02,
        measured_at=NOW - age_s,
    )


def replica(
    id: str, running: int = 0, waiting: int = 0, kv: float = 0.0, max_running: int = 10
) -> ReplicaSeen:
    return ReplicaSeen(id, load(running, waiting, kv), max_running, kv_capacity_tokens=1_000)


def raised(replica: ReplicaSeen, tokens: int) -> ReplicaSeen:
    """The next snapshot of a replica that was given a request."""
    assigned = replica.assigned
    return replace(replica, assigned=Assigned(assigned.requests + 1, assigned.tokens + tokens))


def table_of(fleet: Sequence[ReplicaSeen], stale_after_s: float = STALE_S) -> ReplicaTable:
    """The table that has come to this: reports that count what was open then, and bookings since.

    Replicas of which nothing but bookings is known have sent no report, so none has a size.
    """
    ledger = InFlight(retain_s=1e6)
    table = ReplicaTable(ledger, stale_after_s=stale_after_s)
    table.set_replicas(one.id for one in fleet)
    for one in fleet:
        before, then = Booking(), one.assigned_when_measured
        measured_at = one.load.measured_at if one.load is not None else NOW
        if one.load is not None and then != NOTHING:
            _book(ledger, before, one.id, then, measured_at - 0.5)
        if one != ReplicaSeen(one.id, assigned=one.assigned):
            table.report(one.id, _report(one))
        if one.load is None or one.assigned != then:
            ledger.finished(before, measured_at + 0.25)
            _book(ledger, Booking(), one.id, one.assigned, measured_at + 0.5)
    return table


def _book(ledger: InFlight, booking: Booking, id_: str, what: Assigned, at: float) -> None:
    ledger.started(booking, id_, what.tokens, at, sequences=what.requests)


def _report(one: ReplicaSeen) -> RoutingStats:
    return RoutingStats(
        load=one.load,
        max_running=one.max_running,
        kv_capacity_tokens=one.kv_capacity_tokens,
        draining=one.draining,
        role=one.role,
        told_at=0.0,
    )


def candidates(table: ReplicaTable) -> Candidates:
    """All that answer."""
    return table.candidates(exclude=NOBODY, now=NOW)


def picked(fleet: Sequence[ReplicaSeen], pick: Pick) -> Decision:
    """What a policy picks of replicas all of which answer."""
    table = table_of(fleet, stale_after_s=1e9)
    among = candidates(table)
    choice = pick(among)
    return Decision(table.ids[among.rows[choice.place]], choice.reason)


counts = st.integers(0, 100)
assigned = st.builds(Assigned, requests=counts, tokens=st.integers(0, 10_000))
loads = st.builds(
    load,
    running=counts,
    waiting=counts,
    kv=st.floats(0, 1),
    age_s=st.floats(-5, 100),
)
# Few figures, so that many are equal.
alike = st.builds(
    load,
    running=st.integers(0, 2),
    waiting=st.just(0),
    kv=st.sampled_from([0.0, 0.5]),
    age_s=st.sampled_from([0.0, 60.0]),
)
replicas = st.builds(
    ReplicaSeen,
    id=st.uuids().map(str),
    load=st.none() | loads | alike,
    max_running=st.integers(1, 64) | st.just(2),
    kv_capacity_tokens=st.none() | st.integers(1, 10_000) | st.just(1_000),
    draining=st.booleans(),
    role=st.sampled_from(Role),
    assigned=assigned | st.just(NOTHING),
    assigned_when_measured=assigned | st.just(NOTHING),
)
mixed_fleets = st.lists(replicas, min_size=1, max_size=6, unique_by=lambda r: r.id)
fleets = mixed_fleets.map(
    lambda fleet: [replace(one, draining=False, role=Role.UNIFIED) for one in fleet]
)
