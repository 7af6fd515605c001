"""Limits on actions: which mechanisms there must be, and what an action must leave free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.rebalancing.policy.actions import (
    Action,
    AddReplica,
    Move,
    MoveRequests,
    RemoveReplica,
    SetRole,
)
from loomserve.platform.rebalancing.policy.effects import loan_between, whole
from loomserve.platform.rebalancing.policy.forecast import Forecast, kv_again_s, route, tpot_ratio
from loomserve.platform.rebalancing.policy.snapshot import (
    DeviceSnapshot,
    EngineSnapshot,
    LoanSnapshot,
    MoveKind,
    Snapshot,
    compute_share,
)
from loomserve.platform.state.roles import Role

_ROUNDING = 1e-9


class Reason(StrEnum):
    """Why a candidate was not taken; a label of metrics."""

    NOT_MOVABLE = "not_movable"  # there is no mechanism for it, or nothing left to move
    HAS_LOANS = "has_loans"  # it lends where it should borrow, or borrows where it should lend
    NO_LINK = "no_link"  # no fresh measurement between the devices, or they are on two nodes
    NO_MEMORY = "no_memory"
    NO_COMPUTE = "no_compute"
    PAUSE_BUDGET = "pause_budget"
    DURATION_BUDGET = "duration_budget"
    TPOT_BUDGET = "tpot_budget"
    NO_GAIN = "no_gain"
    HARMS_OTHERS = "harms_others"  # it makes another device hotter than this one gets colder
    INEFFICIENT = "inefficient"  # for what it costs
    ALREADY_PLANNED = "already_planned"  # the plan changes the same thing already
    PLAN_FULL = "plan_full"
    CHEAPER = "cheaper"  # of a replica: what moves eases its model sooner than one would start


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: Reason
    detail: str


def unable(snapshot: Snapshot, action: Action, options: Rebalancing) -> Refusal | None:
    """Why the action cannot be carried out at all, whatever its effect."""
    match action:
        case Move():
            return _unable_to_move(snapshot, action, options)
        case MoveRequests():
            return _unable_to_go_on(snapshot, action)
        case SetRole():
            engine = snapshot.engine(action.engine)
            if not snapshot.model(engine.model).roles or engine.role is action.role:
                return Refusal(Reason.NOT_MOVABLE, f"{engine.model} has no roles to change")
            return _with_loans(snapshot, engine.model)
        case AddReplica():
            model = snapshot.model(action.model)
            if model.replica is None or action.device != snapshot.next_device(model.name):
                return Refusal(Reason.NOT_MOVABLE, f"no replica may be added on {action.device}")
            return _with_loans(snapshot, model.name)
        case RemoveReplica():
            leaving = snapshot.engine(action.engine)
            model = snapshot.model(leaving.model)
            if model.replica is None or len(snapshot.of(model.name)) <= model.least:
                return Refusal(Reason.NOT_MOVABLE, f"{model.name} has no replica to spare")
            return _with_loans(snapshot, model.name)


def _unable_to_move(snapshot: Snapshot, move: Move, options: Rebalancing) -> Refusal | None:
    engine, lender = snapshot.engine(move.engine), snapshot.engine(move.lender)
    if move.kind not in engine.movable or move.kind not in lender.movable:
        said = f"{move.kind} of {engine.id} to {lender.id}"
        if move.kind is MoveKind.LAYERS and engine.movable & lender.movable:
            said += ": layers move between CPU devices only"
        return Refusal(Reason.NOT_MOVABLE, said)
    if not (engine.borrow_bytes and lender.lend_bytes):
        return Refusal(Reason.NOT_MOVABLE, f"{engine.id} does not borrow from {lender.id}")
    if move.back:
        loan = loan_between(snapshot, move.kind, engine.id, lender.id)
        if loan is None or move.amount > loan.amount:
            return Refusal(Reason.NOT_MOVABLE, f"{lender.id} has less of {engine.id}")
        if move.kind is not MoveKind.REQUESTS and move.amount < loan.amount:
            return Refusal(Reason.NOT_MOVABLE, f"all {loan.amount} {move.kind} come home together")
    else:
        # Whole heads and layers: an engine keeps one of each, or it would be no engine.
        most = whole(engine, move.kind) - (move.kind is not MoveKind.REQUESTS)
        if move.amount > most or engine.device == lender.device:
            return Refusal(Reason.NOT_MOVABLE, f"{engine.id} has {most} {move.kind} to move")
        if move.kind is MoveKind.REQUESTS and not _among(engine.lenders, lender):
            return Refusal(
                Reason.NOT_MOVABLE, f"{engine.id} has no limit with {lender.id} to be raised"
            )
        if move.kind is not MoveKind.REQUESTS and not _among(engine.shard_lenders, lender):
            return Refusal(
                Reason.NOT_MOVABLE, f"{engine.id} may not have {move.kind} with {lender.id}"
            )
        if move.kind is not MoveKind.REQUESTS and (there := _shard_away(snapshot, engine)):
            return Refusal(Reason.HAS_LOANS, f"{there.kind} of {engine.id} are with {there.lender}")
        if snapshot.loans_of(lender.id) or snapshot.loans_at(engine.id):
            return Refusal(Reason.HAS_LOANS, f"{lender.id} borrows or {engine.id} lends")
    nodes = {snapshot.device(each.device).node for each in (engine, lender)}
    link = route(snapshot, move)
    if len(nodes) > 1 or link is None:
        return Refusal(Reason.NO_LINK, f"{engine.device} to {lender.device}")
    if not 0 <= snapshot.at_s - link.measured_at_s <= options.links_stale_after_s:
        return Refusal(Reason.NO_LINK, f"{link.source} to {link.target} was measured too long ago")
    return None


def _unable_to_go_on(snapshot: Snapshot, action: MoveRequests) -> Refusal | None:
    engine, there = snapshot.engine(action.engine), snapshot.engine(action.to)
    said = f"requests of {engine.id} with {there.id}"
    alike = engine.model == there.model and engine.role is there.role is not Role.PREFILL
    if not alike or engine.device == there.device or there.draining:
        return Refusal(Reason.NOT_MOVABLE, said)
    if not (engine.max_running and there.max_running):
        return Refusal(Reason.NOT_MOVABLE, f"{said}: a pipeline's stay")
    if action.requests > engine.queue:
        return Refusal(Reason.NOT_MOVABLE, f"{engine.id} has {engine.queue} requests")
    if shards := [each for each in (engine, there) if _shard_away(snapshot, each)]:
        return Refusal(Reason.HAS_LOANS, f"a shard of {shards[0].id} is away")
    if there.queue + action.requests > there.max_running:
        return Refusal(Reason.NO_COMPUTE, f"{there.id} runs {there.max_running} requests at most")
    if kv_again_s(snapshot, engine, there) is None:
        return Refusal(Reason.NOT_MOVABLE, f"{said}: what a prompt costs there is not measured")
    return None


def _shard_away(snapshot: Snapshot, engine: EngineSnapshot) -> LoanSnapshot | None:
    return next((x for x in snapshot.loans_of(engine.id) if x.kind is not MoveKind.REQUESTS), None)


def _among(lenders: frozenset[str] | None, lender: EngineSnapshot) -> bool:
    return lenders is None or lender.id in lenders


def _with_loans(snapshot: Snapshot, model: str) -> Refusal | None:
    for engine in snapshot.of(model):
        if snapshot.loans_of(engine.id) or snapshot.loans_at(engine.id):
            return Refusal(Reason.HAS_LOANS, engine.id)
    return None


def exceeded(
    start: Snapshot, before: Snapshot, after: Snapshot, options: Rebalancing
) -> Refusal | None:
    """The first limit that an action breaks or, where it was broken before, makes worse. Only
    devices whose figures differ, and engines there or in a loan with one there, can break any.
    Times per output token are compared with those of ``start``, the snapshot before the plan."""
    touched = after.touched_since(before)
    devices: Sequence[DeviceSnapshot] = after.devices
    engines: Sequence[EngineSnapshot] = after.engines
    if touched is not None:
        devices = after.devices_in_order(touched)
        engines = _concerned(before, after, touched)
    return (
        _device_exceeded(before, after, devices, options)
        or _engine_exceeded(before, after, engines, options)
        or _tpot_exceeded(start, before, after, engines, options)
    )


def over_budget(
    earlier: Iterable[tuple[Action, Forecast]],
    action: Action,
    predicted: Forecast,
    options: Rebalancing,
) -> Refusal | None:
    """Whether the action takes too long, or halts an engine for too long. A move halts both of its
    engines; those of a plan, ``earlier`` ones included, follow one another."""
    paused = [(halted(each), its.pause_s) for each, its in earlier]
    pause_s = predicted.pause_s + max(
        (sum(each_s for of, each_s in paused if engine in of) for engine in halted(action)),
        default=0.0,
    )
    if 1000 * pause_s > options.pause_budget_ms:
        return Refusal(Reason.PAUSE_BUDGET, f"{1000 * pause_s:.1f} ms")
    if predicted.duration_s > options.duration_budget_s:
        return Refusal(Reason.DURATION_BUDGET, f"{predicted.duration_s:.1f} s")
    return None


def engines_of(action: Action) -> frozenset[str]:
    """Engines between which the action moves something."""
    match action:
        case Move():
            return frozenset((action.engine, action.lender))
        case MoveRequests():
            return frozenset((action.engine, action.to))
        case _:
            return frozenset()


def halted(action: Action) -> frozenset[str]:
    """Engines that stand still for the action."""
    return engines_of(action) if isinstance(action, Move) else frozenset()


def _concerned(before: Snapshot, after: Snapshot, touched: Iterable[str]) -> list[EngineSnapshot]:
    """Engines on the devices, and those that borrow from them or lend to them, in their order."""
    there = {engine.id for device in touched for engine in after.on(device)}
    others = {
        end
        for snapshot in (before, after)
        for id_ in there
        for loan in (*snapshot.loans_at(id_), *snapshot.loans_of(id_))
        for end in (loan.engine, loan.lender)
    }
    return after.engines_in_order(there | others)


def _device_exceeded(
    before: Snapshot, after: Snapshot, devices: Iterable[DeviceSnapshot], options: Rebalancing
) -> Refusal | None:
    for device in devices:
        most = device.memory_bytes * (1 - options.headroom)
        grown = device.allocated_bytes > before.device(device.name).allocated_bytes
        if grown and device.allocated_bytes > most:
            return Refusal(Reason.NO_MEMORY, device.name)
        share = compute_share(after, device.name)
        more = share > compute_share(before, device.name) + _ROUNDING
        if share > 1 and more and not _others_keep_theirs(before, after, device.name):
            return Refusal(Reason.NO_COMPUTE, f"{device.name} would be asked for {share:.2f}")
    return None


def _others_keep_theirs(before: Snapshot, after: Snapshot, device: str) -> bool:
    """Whether more than a device can do may be asked of it. What waits for an engine of its own
    model there waits no longer than where it was. A device's time is divided evenly among the
    engines that ask for it, so those that get no more work keep all that they ask for as long as
    that is no more than such a part. Borrowers' work comes within their lender's own steps, and
    would hold it up."""
    there = [engine for engine in after.on(device) if engine.compute]
    if any(after.loans_at(engine.id) for engine in there):
        return False
    return all(
        engine.compute <= 1 / len(there)
        for engine in there
        if before.has(engine.id) and engine.compute <= before.engine(engine.id).compute + _ROUNDING
    )


def _engine_exceeded(
    before: Snapshot, after: Snapshot, engines: Iterable[EngineSnapshot], options: Rebalancing
) -> Refusal | None:
    for engine in engines:
        was = before.engine(engine.id) if before.has(engine.id) else None
        idle = after.idle_kv(engine)
        less = was is None or idle < before.idle_kv(was)
        if less and idle < options.headroom * engine.kv_bytes:
            return Refusal(Reason.NO_MEMORY, f"KV of {engine.id}")
        if (
            was is not None
            and engine.borrowed != was.borrowed  # a shard that leaves takes the place of loans
            and after.kv_room(engine) <= before.kv_room(was)
        ):
            return Refusal(Reason.NO_MEMORY, f"{engine.id} borrows what it would gain at home")
        for what, size, size_before, most in (
            ("lends", after.lends(engine), before.lends(engine), engine.lend_bytes),
            ("borrows", after.borrows(engine), before.borrows(engine), engine.borrow_bytes),
        ):
            if size > most and size > size_before:
                return Refusal(Reason.NO_MEMORY, f"{engine.id} {what} at most {most} bytes")
    return None


def _tpot_exceeded(
    start: Snapshot,
    before: Snapshot,
    after: Snapshot,
    engines: Iterable[EngineSnapshot],
    options: Rebalancing,
) -> Refusal | None:
    for engine in engines:
        if not start.has(engine.id):
            continue
        ratio = tpot_ratio(start, after, engine.id)
        if ratio > options.tpot_budget and ratio > tpot_ratio(start, before, engine.id):
            return Refusal(Reason.TPOT_BUDGET, f"{engine.id}: {ratio:.2f} times")
    return None
