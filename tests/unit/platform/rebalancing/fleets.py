"""Fleets for the tests of rebalancing: made up, and carried on from one period to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.rebalancing.policy.correction import Corrections
from loomserve.platform.rebalancing.policy.heat import Heat, classify
from loomserve.platform.rebalancing.policy.planner import Proposal, propose
from loomserve.platform.rebalancing.policy.snapshot import (
    DeviceSnapshot,
    EngineSnapshot,
    Link,
    ModelSnapshot,
    MoveKind,
    Snapshot,
    utilisations,
)

MIB = 2**20
GIB = 2**30
OPTIONS = Rebalancing(confirm_periods=1, settle_s=0.0)
PERIOD_S = 10.0


def engine(name: str, device: str, compute: float, used: float) -> EngineSnapshot:
    """Of 30 layers; ``used`` is the share of its GiB of KV."""
    return EngineSnapshot(
        id=name,
        model=name,
        device=device,
        prefill=0.2 * compute,
        attention=0.5 * compute,
        linear=0.3 * compute,
        kv_bytes=GIB,
        kv_used_bytes=int(used * GIB),
        kv_growth=2.0 * MIB,
        lend_bytes=GIB,
        borrow_bytes=GIB,
        layers=30,
        layer_bytes=8 * MIB,
        heads=4,
        tpot_s=0.05,
        sync_s=0.002,
        drain_s=5.0,
        movable=frozenset(MoveKind),
        measured_at_s=0.0,
    )


def fleet(
    loads: Sequence[tuple[float, float]], parts: frozenset[MoveKind] = frozenset(MoveKind)
) -> Snapshot:
    """A device of 4 GiB with a model of its own for each (compute, share of KV used)."""
    names = [f"d{at}" for at in range(len(loads))]
    engines = tuple(
        replace(engine(f"m{at}", names[at], *load), movable=parts) for at, load in enumerate(loads)
    )
    return Snapshot(
        at_s=0.0,
        devices=tuple(
            DeviceSnapshot(
                name=name,
                node="n",
                memory_bytes=4 * GIB,
                allocated_bytes=2 * GIB,
                measured_at_s=0.0,
            )
            for name in names
        ),
        models=tuple(
            ModelSnapshot(
                name=each.model,
                devices=tuple(names),
                replicas=1,
                replica_bytes=GIB + GIB // 2,
            )
            for each in engines
        ),
        engines=engines,
        links=tuple(
            Link(source=a, target=b, bytes_per_s=2e9, latency_s=1e-5, measured_at_s=0.0)
            for a in names
            for b in names
            if a != b
        ),
    )


def measured_at(snapshot: Snapshot, at_s: float) -> Snapshot:
    """The same, measured anew."""
    return replace(
        snapshot,
        at_s=at_s,
        devices=tuple(replace(each, measured_at_s=at_s) for each in snapshot.devices),
        engines=tuple(replace(each, measured_at_s=at_s) for each in snapshot.engines),
        loans=tuple(replace(each, measured_at_s=at_s) for each in snapshot.loans),
    )


def noisy(snapshot: Snapshot, noise: Mapping[str, float]) -> Snapshot:
    """With each engine's compute off by so much, as a measurement may be."""
    return replace(
        snapshot,
        engines=tuple(
            replace(each, linear=max(each.linear + noise.get(each.device, 0.0), 0.0))
            for each in snapshot.engines
        ),
    )


def proposed(snapshot: Snapshot, options: Rebalancing = OPTIONS) -> Proposal:
    heat = classify({}, utilisations(snapshot), options)
    return propose(snapshot, heat, Corrections(), options)


def carried_on(
    snapshot: Snapshot, periods: int, options: Rebalancing = OPTIONS
) -> list[tuple[Snapshot, Proposal]]:
    """Plans carried out as predicted, on a load that stays as it is."""
    heat: dict[str, Heat] = {}
    history = []
    for period in range(periods):
        snapshot = measured_at(snapshot, period * PERIOD_S)
        heat = classify(heat, utilisations(snapshot), options)
        proposal = propose(snapshot, heat, Corrections(), options)
        history.append((snapshot, proposal))
        snapshot = proposal.after
    return history
