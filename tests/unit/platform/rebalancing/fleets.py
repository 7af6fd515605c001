"""Fleets for the tests of rebalancing: made up, and carried on from one period to the next."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.rebalancing.policy.forecast import Corrections
from loomserve.platform.rebalancing.policy.heat import Heat, classify
from loomserve.platform.rebalancing.policy.planner import Proposal, propose
from loomserve.platform.rebalancing.policy.snapshot import (
    DeviceSnapshot,
    EngineSnapshot,
    Link,
    ModelSnapshot,
    MoveKind,
    Snapshot,
)
from loomserve.platform.state.roles import Role

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


def mixed_fleet(rng: random.Random) -> Snapshot:
    """Of all that there may be: nodes, unequal devices, replicas that come and go, roles, gaps."""
    nodes, names = rng.choice([1, 1, 2, 3]), [f"d{at}" for at in range(rng.randint(2, 9))]
    devices = tuple(
        DeviceSnapshot(
            name=name,
            node=f"n{at % nodes}",
            memory_bytes=rng.choice([4, 8]) * GIB,
            allocated_bytes=int(rng.uniform(1, 3.8) * GIB),
            speed=rng.choice([1.0, 1.0, 0.5, 0.8]),
            measured_at_s=0.0,
        )
        for at, name in enumerate(names)
    )
    engines: list[EngineSnapshot] = []
    models = []
    for at in range(rng.randint(1, len(names))):
        on = rng.sample(names, rng.randint(1, min(4, len(names))))
        its, model = _mixed_model(rng, f"m{at}", on, rng.randint(1, len(on)))
        engines += its
        models.append(model)
    rng.shuffle(engines)
    links = tuple(
        Link(
            source=a.name,
            target=b.name,
            bytes_per_s=rng.choice([2e9, 2e7]),
            latency_s=1e-5,
            measured_at_s=0.0,
        )
        for a in devices
        for b in devices
        if a is not b and a.node == b.node and rng.random() < 0.95
    )
    return Snapshot(
        at_s=0.0, devices=devices, models=tuple(models), engines=tuple(engines), links=links
    )


def _mixed_model(
    rng: random.Random, name: str, devices: Sequence[str], replicas: int
) -> tuple[list[EngineSnapshot], ModelSnapshot]:
    roles = rng.random() < 0.3
    engines = [
        replace(
            _mixed_engine(rng, engine(name, device, rng.uniform(0.02, 1.2), rng.uniform(0, 0.9))),
            id=f"{name}-{at}",
            role=rng.choice(list(Role)) if roles else Role.UNIFIED,
        )
        for at, device in enumerate(devices[:replicas])
    ]
    nothing = {"prefill": 0.0, "attention": 0.0, "linear": 0.0, "kv_growth": 0.0}
    idle = replace(engines[0], **nothing, queue=0, waiting=0, kv_used_bytes=0)  # type: ignore[arg-type]
    return engines, ModelSnapshot(
        name=name,
        devices=tuple(devices),
        replicas=replicas,
        replica_bytes=GIB,
        replica=idle if rng.random() < 0.4 else None,
        start_s=rng.choice([1.0, 100.0]),
        roles=roles,
    )


def _mixed_engine(rng: random.Random, of: EngineSnapshot) -> EngineSnapshot:
    queue = rng.choice([0, 3, 20])
    return replace(
        of,
        queue=queue,
        waiting=rng.randint(0, queue),
        max_running=rng.choice([0, 8, 32]),
        kv_growth=rng.choice([0.0, 2.0 * MIB]),
        recompute_s=rng.choice([None, 1e-9, 1e-8]),
        stores_kv=rng.random() < 0.5,
        draining=rng.random() < 0.1,
        lend_bytes=rng.choice([0, GIB, GIB]),
        borrow_bytes=rng.choice([0, GIB, GIB]),
        layers=rng.choice([6, 30]),
        layer_bytes=rng.choice([0, 8 * MIB, 64 * MIB]),
        heads=rng.choice([1, 4]),
        movable=frozenset(kind for kind in MoveKind if rng.random() < 0.8),
        lenders=rng.choice([None, None, frozenset()]),
        shard_lenders=rng.choice([None, None, frozenset()]),
    )


def mixed_options(rng: random.Random) -> Rebalancing:
    return Rebalancing(
        confirm_periods=1,
        settle_s=0.0,
        most_actions=rng.choice([1, 4, 20]),
        rising=rng.choice([0.25, 0.4]),
        tpot_budget=rng.choice([1.2, 1.5, 3.0]),
        efficiency=rng.choice([0.0, 0.01]),
        least_gain=rng.choice([0.01, 0.05]),
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
    heat = classify({}, snapshot.loads, options)
    return propose(snapshot, heat, Corrections(), options)


def carried_on(
    snapshot: Snapshot, periods: int, options: Rebalancing = OPTIONS
) -> list[tuple[Snapshot, Proposal]]:
    """Plans carried out as predicted, on a load that stays as it is."""
    heat: dict[str, Heat] = {}
    history = []
    for period in range(periods):
        snapshot = measured_at(snapshot, period * PERIOD_S)
        heat = classify(heat, snapshot.loads, options)
        proposal = propose(snapshot, heat, Corrections(), options)
        history.append((snapshot, proposal))
        snapshot = proposal.after
    return history
