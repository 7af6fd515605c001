"""Made-up replicas for tests of policies."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.base import Replica
from loomserve.routers.in_flight import Assigned

NOW = 1_000.0
LIMIT = 1.6
NOBODY: frozenset[str] = frozenset()


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
) -> Replica:
    return Replica(id, load(running, waiting, kv), max_running, kv_capacity_tokens=1_000)


def raised(replica: Replica, tokens: int) -> Replica:
    """The next snapshot of a replica that was given a request."""
    assigned = replica.assigned
    return replace(replica, assigned=Assigned(assigned.requests + 1, assigned.tokens + tokens))


counts = st.integers(0, 100)
assigned = st.builds(Assigned, requests=counts, tokens=st.integers(0, 10_000))
loads = st.builds(
    load,
    running=counts,
    waiting=counts,
    kv=st.floats(0, 1),
    age_s=st.floats(-5, 100),
)
fleets = st.lists(
    st.builds(
        Replica,
        id=st.uuids().map(str),
        load=st.none() | loads,
        max_running=st.integers(1, 64),
        kv_capacity_tokens=st.none() | st.integers(1, 10_000),
        draining=st.booleans(),
        role=st.sampled_from(Role),
        assigned=assigned,
        assigned_when_measured=assigned,
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda r: r.id,
)
