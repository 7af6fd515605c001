"""One routing decision: filter the replicas, then have the policy pick one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loomserve.platform.state.roles import Role
from loomserve.routers.base import Decision, Pick, Replica


def candidates(
    replicas: Sequence[Replica],
    *,
    exclude: frozenset[str],
    pinned_to: str | None = None,
    now: float,
    stale_after_s: float,
) -> list[Replica]:
    """The replicas that may take a request, without loads that are out of date.

    Prefill replicas take clients' requests only if no other replica can.

    A report counts in full until it is ``stale_after_s`` old (the ledger keeps it current until
    then) and not at all afterwards. ``now`` is in monotonic seconds.
    """
    willing = [
        _forget_stale_load(replica, now, stale_after_s)
        for replica in replicas
        if not replica.draining and replica.id not in exclude and pinned_to in (None, replica.id)
    ]
    return [replica for replica in willing if replica.role is not Role.PREFILL] or willing


def decide(eligible: Sequence[Replica], pick: Pick) -> Decision | None:
    """The policy's pick among the eligible replicas, and the others; None if there is none."""
    if not eligible:
        return None
    if len(eligible) == 1:
        return Decision(eligible[0].id, "only_candidate")
    picked = pick(eligible)
    others = tuple(replica.id for replica in eligible if replica.id != picked.replica_id)
    return replace(picked, others=others)


def _forget_stale_load(replica: Replica, now: float, stale_after_s: float) -> Replica:
    if replica.load is None or now - replica.load.measured_at <= stale_after_s:
        return replica
    return replace(replica, load=None)
