"""The snapshot as it will be once an action is done, if the load stays as it is.

This is arithmetic only; :mod:`.limits` says whether the action is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loomserve.platform.rebalancing.policy.actions import (
    Action,
    AddReplica,
    Move,
    MoveRequests,
    RemoveReplica,
    SetRole,
)
from loomserve.platform.rebalancing.policy.snapshot import (
    EngineSnapshot,
    LoanSnapshot,
    ModelSnapshot,
    MoveKind,
    Snapshot,
)
from loomserve.platform.state.roles import Role


def apply(snapshot: Snapshot, action: Action) -> Snapshot:
    """Raises LookupError if the action names what is not in the snapshot."""
    match action:
        case Move(back=False):
            return _moved(snapshot, action)
        case Move():
            return _moved_back(snapshot, action)
        case MoveRequests():
            return _gone_on(snapshot, action)
        case SetRole():
            engine = replace(snapshot.engine(action.engine), role=action.role)
            old = snapshot.of(engine.model)
            new = [engine if each.id == engine.id else each for each in old]
            return snapshot.changed(_spread(snapshot, old, new))
        case AddReplica():
            return _added(snapshot, action)
        case RemoveReplica():
            return _removed(snapshot, action)


def whole(engine: EngineSnapshot, kind: MoveKind) -> int:
    """Amount of ``kind`` that is at home, in its unit."""
    return {
        MoveKind.REQUESTS: engine.kv_used_bytes,
        MoveKind.HEADS: engine.heads,
        MoveKind.LAYERS: engine.layers,
    }[kind]


def loan_between(
    snapshot: Snapshot, kind: MoveKind, engine: str, lender: str
) -> LoanSnapshot | None:
    return next(
        (x for x in snapshot.loans_of(engine) if (x.kind, x.lender) == (kind, lender)), None
    )


def _moved(snapshot: Snapshot, move: Move) -> Snapshot:
    """Heads and requests take their attention and KV along, layers all of their work."""
    engine, lender = snapshot.engine(move.engine), snapshot.engine(move.lender)
    share = move.amount / whole(engine, move.kind)
    slower = _speed(snapshot, engine) / _speed(snapshot, lender)
    layers = move.kind is MoveKind.LAYERS
    kv_bytes = int(share * engine.kv_used_bytes)
    weights_bytes = move.amount * engine.layer_bytes if layers else 0
    before = loan_between(snapshot, move.kind, engine.id, lender.id) or LoanSnapshot(
        kind=move.kind,
        engine=engine.id,
        lender=lender.id,
        amount=0,
        attention=0.0,
        kv_bytes=0,
        measured_at_s=snapshot.at_s,
    )
    loan = replace(
        before,
        amount=before.amount + move.amount,
        attention=before.attention + slower * share * engine.attention,
        prefill=before.prefill + slower * share * engine.prefill * layers,
        linear=before.linear + slower * share * engine.linear * layers,
        kv_bytes=before.kv_bytes + kv_bytes,
        weights_bytes=before.weights_bytes + weights_bytes,
    )
    home = replace(
        engine,
        attention=engine.attention * (1 - share),
        prefill=engine.prefill * (1 - share * layers),
        linear=engine.linear * (1 - share * layers),
        kv_growth=engine.kv_growth * (1 - share),
        kv_used_bytes=engine.kv_used_bytes - kv_bytes,
        borrowed=_still_borrowed(engine, move),
        layers=engine.layers - move.amount * layers,
        heads=engine.heads - move.amount * (move.kind is MoveKind.HEADS),
    )
    return snapshot.changed([home], (before, loan), (lender.device, weights_bytes))


def _moved_back(snapshot: Snapshot, move: Move) -> Snapshot:
    engine, lender = snapshot.engine(move.engine), snapshot.engine(move.lender)
    before = loan_between(snapshot, move.kind, engine.id, lender.id)
    if before is None:
        raise LookupError(f"{engine.id} has no {move.kind} at {lender.id}")
    share = min(move.amount / before.amount, 1.0)
    faster = _speed(snapshot, lender) / _speed(snapshot, engine)
    kv_bytes = int(share * before.kv_bytes)
    weights_bytes = int(share * before.weights_bytes)
    loan = replace(
        before,
        amount=before.amount - move.amount,
        attention=before.attention * (1 - share),
        prefill=before.prefill * (1 - share),
        linear=before.linear * (1 - share),
        kv_bytes=before.kv_bytes - kv_bytes,
        weights_bytes=before.weights_bytes - weights_bytes,
    )
    home = replace(
        engine,
        attention=engine.attention + faster * share * before.attention,
        prefill=engine.prefill + faster * share * before.prefill,
        linear=engine.linear + faster * share * before.linear,
        kv_used_bytes=engine.kv_used_bytes + kv_bytes,
        layers=engine.layers + move.amount * (move.kind is MoveKind.LAYERS),
        heads=engine.heads + move.amount * (move.kind is MoveKind.HEADS),
    )
    return snapshot.changed([home], (before, loan), (lender.device, -weights_bytes))


def moved_kv(engine: EngineSnapshot, requests: int) -> int:
    """Bytes of KV of so many requests at most, of which those that wait come first and have
    none."""
    running = engine.queue - engine.waiting
    return int(engine.kv_used_bytes * max(requests - engine.waiting, 0) / max(running, 1))


def _gone_on(snapshot: Snapshot, action: MoveRequests) -> Snapshot:
    """Each request takes its share of decoding along, and those that wait their prompts."""
    engine, there = snapshot.engine(action.engine), snapshot.engine(action.to)
    waiting = min(action.requests, engine.waiting)
    share, prompts = (each / max(engine.queue, 1) for each in (action.requests, waiting))
    slower = _speed(snapshot, engine) / _speed(snapshot, there)
    kv_bytes = moved_kv(engine, action.requests)
    left = replace(
        engine,
        prefill=engine.prefill * (1 - prompts),
        attention=engine.attention * (1 - share),
        linear=engine.linear * (1 - share),
        kv_growth=engine.kv_growth * (1 - share),
        kv_used_bytes=engine.kv_used_bytes - kv_bytes,
        queue=engine.queue - action.requests,
        waiting=engine.waiting - waiting,
    )
    joined = replace(
        there,
        prefill=there.prefill + slower * prompts * engine.prefill,
        attention=there.attention + slower * share * engine.attention,
        linear=there.linear + slower * share * engine.linear,
        kv_growth=there.kv_growth + share * engine.kv_growth,
        kv_used_bytes=there.kv_used_bytes + kv_bytes,
        queue=there.queue + action.requests,
    )
    return snapshot.changed([left, joined])


def _still_borrowed(engine: EngineSnapshot, move: Move) -> tuple[tuple[str, int], ...]:
    """Layers end all loans of whole requests, heads that with their lender."""
    match move.kind:
        case MoveKind.REQUESTS:
            return engine.borrowed
        case MoveKind.HEADS:
            return tuple(each for each in engine.borrowed if each[0] != move.lender)
        case MoveKind.LAYERS:
            return ()


def _added(snapshot: Snapshot, action: AddReplica) -> Snapshot:
    model = snapshot.model(action.model)
    if model.replica is None:
        raise LookupError(f"replicas of {model.name} do not come and go")
    replica = replace(
        model.replica,
        id=f"{model.name}@{action.device}",
        device=action.device,
        measured_at_s=snapshot.at_s,
    )
    return _scaled(snapshot, model, replica.device, 1, (*snapshot.engines, replica))


def _removed(snapshot: Snapshot, action: RemoveReplica) -> Snapshot:
    engine = snapshot.engine(action.engine)
    left = tuple(each for each in snapshot.engines if each is not engine)
    return _scaled(snapshot, snapshot.model(engine.model), engine.device, -1, left)


def _scaled(
    snapshot: Snapshot,
    model: ModelSnapshot,
    device: str,
    more: int,
    engines: Sequence[EngineSnapshot],
) -> Snapshot:
    """With so many more replicas of a model on a device, and these engines, over which the model's
    work is spread."""
    counted = replace(model, replicas=model.replicas + more)
    before = snapshot.device(device)
    there = replace(before, allocated_bytes=before.allocated_bytes + more * model.replica_bytes)
    new = [each for each in engines if each.model == model.name]
    spread = {each.id: each for each in _spread(snapshot, snapshot.of(model.name), new)}
    return replace(
        snapshot,
        models=tuple(counted if each is model else each for each in snapshot.models),
        devices=tuple(there if each is before else each for each in snapshot.devices),
        engines=tuple(spread.get(each.id, each) for each in engines),
    )


def _spread(
    snapshot: Snapshot, old: Sequence[EngineSnapshot], new: Sequence[EngineSnapshot]
) -> list[EngineSnapshot]:
    """All engines of a model with its work spread, so that each device is busy for as long. That is
    what a load-aware router comes to among replicas that are alone on their devices. Where the
    replicas of a role are missing, the others do its work."""
    speeds = {each.id: _speed(snapshot, each) for each in (*old, *new)}
    prefilling = {each.id for each in new if each.role is not Role.DECODE} or set(speeds)
    decoding = {each.id for each in new if each.role is not Role.PREFILL} or set(speeds)
    prefill_speed = sum(speeds[each.id] for each in new if each.id in prefilling)
    decode_speed = sum(speeds[each.id] for each in new if each.id in decoding)
    prefill, attention, linear = (
        sum(getattr(each, work) * speeds[each.id] for each in old)
        for work in ("prefill", "attention", "linear")
    )
    kv_used_bytes, kv_growth, queue = (
        sum(getattr(each, figure) for each in old)
        for figure in ("kv_used_bytes", "kv_growth", "queue")
    )

    def spread(engine: EngineSnapshot) -> EngineSnapshot:
        prefills = (engine.id in prefilling) / prefill_speed
        decodes = (engine.id in decoding) / decode_speed
        share = decodes * speeds[engine.id]
        return replace(
            engine,
            prefill=prefills * prefill,
            attention=decodes * attention,
            linear=decodes * linear,
            kv_used_bytes=int(share * kv_used_bytes),
            kv_growth=share * kv_growth,
            queue=round(share * queue),
        )

    return [spread(engine) for engine in new]


def _speed(snapshot: Snapshot, engine: EngineSnapshot) -> float:
    return snapshot.device(engine.device).speed
