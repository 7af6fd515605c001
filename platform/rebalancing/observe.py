"""Makes the snapshots that rebalancing and scaling decide on, of heartbeats and a device profile.

Its times are Unix seconds, for plans outlive the controller that makes them. Replicas report theirs
in monotonic seconds, since the time of day may step between two heartbeats.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from loomserve.platform.config import Device as ConfiguredDevice
from loomserve.platform.devices.memory import least_replicas
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.messages import Heartbeat
from loomserve.platform.fleet.snapshot import ReplicaRecord
from loomserve.platform.placement.policy.device_times import DeviceProfile
from loomserve.platform.rebalancing.policy.measured import Flaw, Measured, Unfit
from loomserve.platform.rebalancing.policy.snapshot import (
    DeviceSnapshot,
    EngineSnapshot,
    Link,
    LoanSnapshot,
    ModelSnapshot,
    MoveKind,
    Snapshot,
)
from loomserve.platform.state import BorrowingState, FootprintState, LoanState, ReplicaLoad

PROFILE = "loomserve profile devices"
"""Name of what is missing where nobody has measured the devices."""

# All devices of a configuration are of the machine that it was started on.
_NODE = "this machine"
_LEAST_TPOT_S = 1e-6


@dataclass(frozen=True, slots=True)
class _Complete:
    """A report that lacks nothing."""

    record: ReplicaRecord
    load: ReplicaLoad
    footprint: FootprintState
    rates: Mapping[str, float]

    @property
    def heartbeat(self) -> Heartbeat:
        return self.record.heartbeat


def measured(
    fleet: Fleet,
    devices: Sequence[ConfiguredDevice],
    profile: DeviceProfile | None,
    *,
    at_s: float,
    monotonic_s: float,
    changed_at_s: float,
) -> Measured:
    """``at_s`` is now in Unix seconds, ``monotonic_s`` by the fleet's clock; ``changed_at_s`` is
    when the last action ended."""
    seen = fleet.registry.snapshot(monotonic_s)
    missing = list(_not_profiled(devices, profile))
    whole = []
    for record in seen.replicas:
        complete = _complete(record, at_s - monotonic_s)
        if complete is None:
            missing.append(Flaw(Unfit.PARTIAL, record.id))
        else:
            whole.append(complete)
    if missing or profile is None:
        return Measured(None, tuple(missing), seen.scaled)
    gpus = {device.name for device in devices if device.kind == "cuda"}
    engines = tuple(engine for each in whole for engine in _engines(fleet, each, gpus, monotonic_s))
    targets = fleet.registry.targets()
    snapshot = Snapshot(
        at_s=at_s,
        devices=tuple(_device(device.name, whole, profile, at_s) for device in devices),
        models=tuple(_model(name, count, whole, engines) for name, count in targets.items()),
        engines=engines,
        links=_links(profile),
        loans=tuple(loan for each in whole for loan in _loans(each)),
        changed_at_s=changed_at_s,
    )
    return Measured(snapshot, (), seen.scaled)


def _not_profiled(
    devices: Sequence[ConfiguredDevice], profile: DeviceProfile | None
) -> Iterator[Flaw]:
    if profile is None:
        yield Flaw(Unfit.PARTIAL, PROFILE)
        return
    known = {device.name for device in profile.devices}
    for device in devices:
        if device.name not in known:
            yield Flaw(Unfit.PARTIAL, f"{device.name} in {PROFILE}")


def _complete(record: ReplicaRecord, later_s: float) -> _Complete | None:
    """None if it lacks something; ``later_s``: Unix time less that of reports."""
    load, footprint, grown = record.load, record.footprint, record.rates
    if load is None or load.work is None or footprint is None or grown is None:
        return None
    load = load.model_copy(update={"measured_at": load.measured_at + later_s})
    memory_at = footprint.memory_measured_at + later_s
    footprint = footprint.model_copy(update={"memory_measured_at": memory_at})
    return _Complete(record, load, footprint, grown)


def _device(
    name: str, whole: Sequence[_Complete], profile: DeviceProfile, at_s: float
) -> DeviceSnapshot:
    facts = profile.device(name)
    there = [(each, share) for each in whole if (share := each.record.shares.get(name))]
    return DeviceSnapshot(
        name=name,
        node=_NODE,
        memory_bytes=facts.memory,
        allocated_bytes=int(sum(each.footprint.memory_bytes * share for each, share in there)),
        # What moves is attention and small batches' weights, which wait for memory.
        speed=facts.bytes_per_s / max(each.bytes_per_s for each in profile.devices),
        measured_at_s=min((each.footprint.memory_measured_at for each, _ in there), default=at_s),
    )


def _engines(
    fleet: Fleet, each: _Complete, gpus: Container[str], now: float
) -> Iterator[EngineSnapshot]:
    """The replica as one engine; a pipeline as one for each stage, none of which moves."""
    report, load, facts, rates = each.heartbeat, each.load, each.footprint, each.rates
    # What waits asks for as much as what runs is given.
    asked = (load.running + load.waiting) / load.running if load.running else 1.0
    kv_bytes, kv_used = _kv(each)
    lending = report.model.lending
    heads_away, layers_away = each.record.away
    limits = fleet.loans.limits(report.replica_id)
    engine = EngineSnapshot(
        id=report.replica_id,
        model=report.model.name,
        device=report.device,
        role=fleet.registry.record(report.model.name).role(report),
        prefill=rates["prefill"] * asked,
        attention=rates["attention"] * asked,
        linear=rates["linear"] * asked,
        queue=each.record.ongoing,
        waiting=load.waiting,
        max_running=report.stats.max_running,
        kv_bytes=kv_bytes,
        kv_used_bytes=kv_used,
        kv_growth=rates["tokens"] * facts.token_bytes,
        recompute_s=load.pace.prefill_token_s / facts.token_bytes if load.pace else None,
        stores_kv=load.scheduling is not None,
        draining=each.record.stops,
        lend_bytes=(lending.lend_memory or 0) if lending else 0,
        borrow_bytes=(lending.borrow_memory or 0) if lending else 0,
        borrowed=tuple(
            (loan.lender_replica, loan.usable_blocks * facts.block_bytes)
            for loan in report.loans
            if loan.shard is None
        ),
        layers=facts.layers - layers_away,
        layer_bytes=facts.layer_bytes,
        heads=facts.kv_heads - heads_away,
        tpot_s=max(load.pace.output_token_s if load.pace else load.step_time_s, _LEAST_TPOT_S),
        sync_s=load.step_time_s,
        drain_s=load.pace.request_s if load.pace else 0.0,
        movable=_movable(on_gpu=report.device in gpus) if lending else frozenset(),
        # A plan can move requests to lenders with a limit. Without one, the borrower itself decides
        # how far its requests go there.
        lenders=frozenset(
            lender.id for lender in fleet.loans.lenders(each.record, now) if lender.model in limits
        ),
        shard_lenders=fleet.loans.shard_lenders(each.record, now),
        measured_at_s=load.measured_at,
    )
    if not report.stages:
        yield engine
        return
    for place, stage in enumerate(report.stages):
        share = each.record.shares[stage.device]
        yield replace(
            engine,
            id=f"{engine.id}#{place}",
            device=stage.device,
            prefill=share * engine.prefill,
            attention=share * engine.attention,
            linear=share * engine.linear,
            kv_bytes=int(share * kv_bytes),
            kv_used_bytes=int(share * kv_used),
            kv_growth=share * engine.kv_growth,
            layers=stage.layers,
            movable=frozenset(),
            max_running=0,
        )


def _movable(*, on_gpu: bool) -> frozenset[MoveKind]:
    """What is lent of an engine; between GPUs no layers, whose modules and graphs stay."""
    return frozenset(kind for kind in MoveKind if not (on_gpu and kind is MoveKind.LAYERS))


def _kv(each: _Complete) -> tuple[int, int]:
    """Bytes of its KV memory at home, and bytes of it that its own requests use."""
    size = each.heartbeat.model.kv_cache_memory
    if each.heartbeat.borrowing is not None:
        return size, int(_own_used(each, each.heartbeat.borrowing) * (1 - _share_away(each)))
    # vLLM's share is of what is not lent.
    lent = each.record.lent_blocks * each.footprint.block_bytes
    return size, int(each.load.kv_cache_usage * max(size - lent, 0))


def _own_used(each: _Complete, said: BorrowingState) -> int:
    """Bytes of own blocks that its requests use, the share that is away included."""
    used = said.own_blocks - said.own_free_blocks - each.record.lent_blocks
    # Loans are looked at one after the other.
    return max(used, 0) * each.footprint.block_bytes


def _share_away(each: _Complete) -> float:
    """The share of each block that is away."""
    heads, layers = each.record.away
    return heads / each.footprint.kv_heads + layers / each.footprint.layers


def _loans(each: _Complete) -> Iterator[LoanSnapshot]:
    for loan in each.heartbeat.loans:
        if loan.shard is not None:
            yield from _shard(each, loan)
            continue
        used = kv_at(loan, each.footprint)
        if used > 0:
            yield LoanSnapshot(
                kind=MoveKind.REQUESTS,
                engine=each.heartbeat.replica_id,
                lender=loan.lender_replica,
                amount=used,
                attention=each.rates.get(loan.name, 0.0),
                kv_bytes=used,
                measured_at_s=each.load.measured_at,
            )


def _shard(each: _Complete, loan: LoanState) -> Iterator[LoanSnapshot]:
    """A loan of heads or layers, which have a share of each block in use."""
    heads, layers = each.record.away
    assert each.heartbeat.borrowing is not None
    if not heads and not layers:
        return
    yield LoanSnapshot(
        kind=MoveKind.HEADS if heads else MoveKind.LAYERS,
        engine=each.heartbeat.replica_id,
        lender=loan.lender_replica,
        amount=heads or layers,
        attention=each.rates.get(loan.name, 0.0),
        kv_bytes=int(_own_used(each, each.heartbeat.borrowing) * _share_away(each)),
        weights_bytes=layers * each.footprint.layer_bytes,
        measured_at_s=each.load.measured_at,
    )


def kv_at(loan: LoanState, footprint: FootprintState) -> int:
    """Bytes of KV that lie with the lender."""
    return (loan.usable_blocks - loan.free_blocks) * footprint.block_bytes


def _model(
    name: str, count: int, whole: Sequence[_Complete], engines: Sequence[EngineSnapshot]
) -> ModelSnapshot:
    of = [each for each in whole if each.heartbeat.model.name == name]
    if not of:
        # The snapshot's flaws say that its replicas are missing.
        return ModelSnapshot(name=name, devices=(), replicas=count, replica_bytes=0)
    configured, stages = of[0].heartbeat.model, max(1, len(of[0].heartbeat.stages))
    like = next(engine for engine in engines if engine.model == name)
    scaled = configured.scaling is not None
    comes_and_goes = stages == 1 and (scaled or configured.replicas == "auto")
    return ModelSnapshot(
        name=name,
        devices=configured.devices,
        replicas=count * stages,
        replica_bytes=max(each.footprint.memory_bytes for each in of),
        least=least_replicas(configured),
        replica=like.without_work() if comes_and_goes else None,
        start_s=max(each.footprint.start_s for each in of),
        roles=configured.roles is not None,
        scaled=scaled,
    )


def _links(profile: DeviceProfile) -> tuple[Link, ...]:
    measured_at_s = datetime.fromisoformat(profile.measured_at).timestamp()
    return tuple(
        Link(
            source=link.source,
            target=link.target,
            bytes_per_s=link.bytes_per_s,
            latency_s=link.latency_s,
            measured_at_s=measured_at_s,
        )
        for link in profile.links
    )
