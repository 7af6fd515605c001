"""Routing written down replica by replica, as the tables of the product are to decide."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.base import Decision
from loomserve.routers.in_flight import NOTHING, Assigned, InFlight
from loomserve.routers.policies.prefix_aware import PREFILL_WEIGHT
from loomserve.routers.prefix_index import Held
from loomserve.routers.snapshot import RoutingStats


@dataclass(frozen=True)
class ReplicaSeen:
    """One replica as its router sees it at one moment.

    The engine's report counts the requests of every gateway, but as of ``load.measured_at``; this
    process's ledger is exact and immediate, but knows only its own requests. So the estimate is
    the report plus what this process started, less what it finished, since the measurement.
    """

    id: str
    load: ReplicaLoad | None = None
    """The last report; None: there is none, or it is too old to count."""
    max_running: int = 1
    """Requests the engine runs at once (``max_num_seqs``); 1 until it has said."""
    kv_capacity_tokens: int | None = None
    """Tokens that its KV cache holds; None until it has said."""
    draining: bool = False
    role: Role = Role.UNIFIED
    assigned: Assigned = NOTHING
    """Requests that this process has open on it now."""
    assigned_when_measured: Assigned = NOTHING
    """Requests that this process had open on it at ``load.measured_at``."""

    @property
    def queue_length(self) -> int:
        """Requests running or waiting."""
        here = self.assigned.requests
        if self.load is None:
            return here
        since = here - self.assigned_when_measured.requests
        # Requests on the wire at the measurement are in neither term; what is open here is a floor.
        return max(here, self.load.running + self.load.waiting + since)

    @property
    def utilisation(self) -> float:
        """BanaServe's U = C/C_max + M/M_max (eq. 4-33), of requests and of KV cache.

        The paper's C is what the hardware does, hence U ≤ 2. Here C is demand: requests waiting
        beyond ``max_running`` raise U above 2, or a flooded replica would pass for a full one.
        """
        return self.queue_length / self.max_running + self._kv_share

    @property
    def _kv_share(self) -> float:
        measured = 0.0 if self.load is None else self.load.kv_cache_usage
        if self.kv_capacity_tokens is None:
            return measured
        tokens = self.assigned.tokens
        if self.load is not None:
            # Those that wait at the engine have no memory yet.
            tokens += self.load.waiting_tokens - self.assigned_when_measured.tokens
        return min(1.0, max(0.0, measured + tokens / self.kv_capacity_tokens))


ReferencePick = Callable[[Sequence[ReplicaSeen]], Decision]


def snapshot(replica_id: str, stats: RoutingStats | None, ledger: InFlight) -> ReplicaSeen:
    """Join a replica's last report (None: it has sent none) with the requests open on it here."""
    assigned = ledger.of(replica_id)
    if stats is None:
        return ReplicaSeen(replica_id, assigned=assigned)
    load = stats.load
    return ReplicaSeen(
        id=replica_id,
        load=load,
        max_running=stats.max_running,
        kv_capacity_tokens=stats.kv_capacity_tokens,
        draining=stats.draining,
        role=stats.role,
        assigned=assigned,
        assigned_when_measured=assigned
        if load is None
        else ledger.of(replica_id, load.measured_at),
    )


def candidates(
    replicas: Sequence[ReplicaSeen],
    *,
    exclude: frozenset[str],
    pinned_to: str | None = None,
    now: float,
    stale_after_s: float,
) -> list[ReplicaSeen]:
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


def decide(eligible: Sequence[ReplicaSeen], pick: ReferencePick) -> Decision | None:
    """The policy's pick among the eligible replicas; None if there is none."""
    if not eligible:
        return None
    if len(eligible) == 1:
        return Decision(eligible[0].id, "only_candidate")
    return pick(eligible)


def _forget_stale_load(replica: ReplicaSeen, now: float, stale_after_s: float) -> ReplicaSeen:
    if replica.load is None or now - replica.load.measured_at <= stale_after_s:
        return replica
    return replace(replica, load=None)


def load_aware(replicas: Sequence[ReplicaSeen], *, load_limit: float) -> Decision:
    least = min(replicas, key=lambda r: (r.load is None, r.utilisation, r.queue_length, r.id))
    if least.utilisation < load_limit:
        return Decision(least.id, "least_loaded")
    shortest = min(replicas, key=lambda r: (r.queue_length, r.utilisation, r.id))
    return Decision(shortest.id, "shortest_queue")


def power_of_two(replicas: Sequence[ReplicaSeen], *, rng: random.Random) -> Decision:
    two = rng.sample(replicas, k=min(2, len(replicas)))
    return Decision(min(two, key=lambda r: r.queue_length).id, "power_of_two")


def round_robin(replicas: Sequence[ReplicaSeen], *, turn: int) -> Decision:
    ids = sorted(replica.id for replica in replicas)
    return Decision(ids[turn % len(ids)], "round_robin")


def prefix_aware(
    replicas: Sequence[ReplicaSeen],
    *,
    matched: Mapping[str, int],
    blocks: int,
    prompt_tokens: int,
    load_limit: float,
    load_share: float | None = None,
) -> Decision:
    """``load_share``: of what a replica computes, what it takes to load it from their store."""
    stored = 0.0 if load_share is None else max(matched.values(), default=0) / max(1, blocks)

    def cost(replica: ReplicaSeen) -> float:
        share = matched.get(replica.id, 0) / max(1, blocks)
        missing = (1 - share) * prompt_tokens
        if load_share is not None:
            missing = (1 - stored + load_share * (stored - share)) * prompt_tokens
        # Of unknown capacity, as if the prompt filled it.
        capacity = replica.kv_capacity_tokens or max(1, prompt_tokens)
        return replica.utilisation + PREFILL_WEIGHT * missing / capacity

    known = [replica for replica in replicas if replica.load is not None] or replicas
    cheapest = min(known, key=lambda r: (cost(r), r.utilisation, r.queue_length, r.id))
    if matched.get(cheapest.id, 0) > min(matched.get(replica.id, 0) for replica in replicas):
        return Decision(cheapest.id, "prefix")
    return load_aware(replicas, load_limit=load_limit)


def matched_blocks(keys: Sequence[int], sent: Mapping[str, Collection[int]]) -> dict[str, int]:
    """Blocks at the prompt's beginning that each replica has; without those with none."""
    found = {}
    for replica_id, known in sent.items():
        blocks = 0
        while blocks < len(keys) and keys[blocks] in known:
            blocks += 1
        if blocks:
            found[replica_id] = blocks
    return found


def held(matched: Mapping[str, int], ids: Sequence[str]) -> Held | None:
    """What the index tells of replicas, in the order of their rows, that have so many blocks."""
    levels = [
        (blocks, {id_ for id_ in ids if matched.get(id_, 0) >= blocks})
        for blocks in sorted({*matched.values()} - {0}, reverse=True)
    ]
    return Held(levels, ids, {id_: row for row, id_ in enumerate(ids)}) if levels else None
