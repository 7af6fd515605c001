"""Actions that take load from a hot device to a cold one, each as large as closes their gap."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator

from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.rebalancing.policy.actions import (
    Action,
    AddReplica,
    Move,
    MoveRequests,
    RemoveReplica,
    SetRole,
)
from loomserve.platform.rebalancing.policy.effects import apply, loan_between, moved_kv, whole
from loomserve.platform.rebalancing.policy.forecast import borrowers_share
from loomserve.platform.rebalancing.policy.limits import unable
from loomserve.platform.rebalancing.policy.snapshot import (
    EngineSnapshot,
    MoveKind,
    Snapshot,
    compute_share,
    shard_room,
)
from loomserve.platform.state.roles import Role


def candidates(
    start: Snapshot,
    snapshot: Snapshot,
    source: str,
    target: str,
    options: Rebalancing,
    *,
    all_moves: bool = True,
) -> Iterator[Action]:
    """All actions that take work from ``source`` to ``target``, whether allowed or not. ``start``
    is the snapshot before the plan, ``snapshot`` that after its actions so far; ``all_moves``: also
    moves that cannot be, as they would leave their node."""
    moves = all_moves or snapshot.device(source).node == snapshot.device(target).node
    for hot in snapshot.on(source):
        for cold in snapshot.on(target):
            for move in _moves(snapshot, hot, cold) if moves else ():
                yield _sized(start, snapshot, source, target, move, options)
            if hot.model == cold.model:
                yield _gone_on(snapshot, hot, cold, options)
    yield from _roles(snapshot, source, target)
    yield from _replicas(snapshot, source, target)


def reachable(
    snapshot: Snapshot, sources: Iterable[str], targets: Collection[str]
) -> dict[str, list[str]]:
    """Of each source, the targets to which anything can be taken from it at all. Moves stay on a
    node; all else needs a replica of one model on both, or starts one."""
    of_node: dict[str, list[str]] = {}
    of_model: dict[str, list[str]] = {}
    for target in targets:
        of_node.setdefault(snapshot.device(target).node, []).append(target)
        for model in {each.model for each in snapshot.on(target)}:
            of_model.setdefault(model, []).append(target)
    wanted = set(targets)

    def of(source: str) -> list[str]:
        found = dict.fromkeys(of_node.get(snapshot.device(source).node, ()))
        for engine in snapshot.on(source):
            found |= dict.fromkeys(of_model.get(engine.model, ()))
            if snapshot.model(engine.model).replica is not None:
                new = snapshot.next_device(engine.model)
                found |= dict.fromkeys([new] if new in wanted else [])
        return list(found)

    return {source: of(source) for source in sources}


def _moves(snapshot: Snapshot, hot: EngineSnapshot, cold: EngineSnapshot) -> Iterator[Move]:
    """All that could come home to the cold engine, and all that could leave the hot one."""
    for kind in MoveKind:
        loan = loan_between(snapshot, kind, cold.id, hot.id)
        if loan is not None:
            yield Move(kind=kind, engine=cold.id, lender=hot.id, amount=loan.amount, back=True)
        most = whole(hot, kind) - (kind is not MoveKind.REQUESTS)
        yield Move(kind=kind, engine=hot.id, lender=cold.id, amount=max(most, 1))


def _sized(
    start: Snapshot, now: Snapshot, source: str, target: str, most: Move, options: Rebalancing
) -> Move:
    """The move with the amount that closes the gap and has room, in memory and in time.

    It moves one unit at least; heads and layers come home as a whole.

    Neither device crosses the mean of all, or a cold one would become the next hot one while
    others are colder. Utilisations are linear in the amount, so two points tell all.
    """
    whole_only = most.back and most.kind is not MoveKind.REQUESTS
    if whole_only or unable(now, most, options):
        return most
    after = apply(now, most)
    loads, later, mean = now.loads, after.loads, now.mean_load
    grown = compute_share(after, target) - compute_share(now, target)
    free = 1 - compute_share(now, target)
    if not most.back:
        free = min(free, _borrowers_limit(start, target, options) - borrowers_share(now, target))
    wanted = min(
        _fraction(
            loads[source] - loads[target],
            loads[source] - loads[target] - later[source] + later[target],
        ),
        _fraction(loads[source] - mean, loads[source] - later[source]),
        _fraction(mean - loads[target], later[target] - loads[target]),
    )
    amount = min(
        round(most.amount * wanted),
        int(most.amount * _fraction(free, grown)),
        _room(now, most, options),
    )
    return most.model_copy(update={"amount": max(amount, 1)})


def _gone_on(
    now: Snapshot, hot: EngineSnapshot, cold: EngineSnapshot, options: Rebalancing
) -> MoveRequests:
    """As many requests as close the gap, for which the cold engine has room; one at least. As with
    other moves, neither device crosses the mean of all."""
    one = MoveRequests(engine=hot.id, to=cold.id, requests=1)
    if unable(now, one, options):
        return one
    mean = now.mean_load
    room = now.idle_kv(cold) - options.headroom * cold.kv_bytes

    def fits(requests: int) -> bool:
        later = apply(now, one.model_copy(update={"requests": requests})).loads
        hotter, colder = later[hot.device], later[cold.device]
        return hotter >= mean >= colder and hotter >= colder and moved_kv(hot, requests) <= room

    # Both loads and the KV only grow or fall with the number.
    numbers = range(1, min(hot.queue, cold.max_running - cold.queue) + 1)
    most = bisect_left(numbers, True, key=lambda requests: not fits(requests))
    return one.model_copy(update={"requests": max(most, 1)})


def _fraction(wanted: float, whole_: float) -> float:
    """The share, in [0, 1], of what changes by ``whole_`` that changes by ``wanted``."""
    return min(max(wanted, 0.0) / whole_, 1.0) if whole_ > 0 else 1.0


def _borrowers_limit(start: Snapshot, device: str, options: Rebalancing) -> float:
    """The share of the device that borrowers may have before steps exceed ``tpot_budget``."""
    generates = any(engine.attention + engine.linear for engine in start.on(device))
    return 1 - (1 - borrowers_share(start, device)) / options.tpot_budget if generates else 1.0


def _room(snapshot: Snapshot, most: Move, options: Rebalancing) -> int:
    """The amount for which there is memory where the move goes."""
    engine, lender = snapshot.engine(most.engine), snapshot.engine(most.lender)
    if most.back:
        loan = loan_between(snapshot, most.kind, engine.id, lender.id)
        assert loan is not None
        free = snapshot.idle_kv(engine) - options.headroom * engine.kv_bytes
        size = (loan.kv_bytes + loan.weights_bytes) / loan.amount
        return int(free / size) if size else most.amount
    there = lender.lend_bytes - snapshot.lends(lender)
    free = min(
        snapshot.idle_kv(lender) - options.headroom * lender.kv_bytes,
        there,
        engine.borrow_bytes - snapshot.borrows(engine),
    )
    every = whole(engine, most.kind)
    size = engine.kv_used_bytes / every
    amount = min(int(free / size) if size else most.amount, most.amount)
    if most.kind is not MoveKind.REQUESTS:
        amounts = range(amount, 0, -1)
        amount = next(
            (n for n in amounts if shard_room(engine, lender, most.kind, n, every) <= there), 0
        )
    if most.kind is MoveKind.LAYERS and engine.layer_bytes:
        device = snapshot.device(lender.device)
        free = device.memory_bytes * (1 - options.headroom) - device.allocated_bytes
        amount = min(amount, int(free / engine.layer_bytes))
    return amount


def _roles(snapshot: Snapshot, source: str, target: str) -> Iterator[Action]:
    """Another role for a replica of a model that both devices serve."""
    shared = {each.model for each in snapshot.on(source)}
    shared &= {each.model for each in snapshot.on(target)}
    for engine in (*snapshot.on(source), *snapshot.on(target)):
        if engine.model in shared and snapshot.model(engine.model).roles:
            for role in Role:
                if role is not engine.role:
                    yield SetRole(engine=engine.id, role=role)


def _replicas(snapshot: Snapshot, source: str, target: str) -> Iterator[Action]:
    """One more replica on the cold device, or one fewer on the hot one."""
    there = {each.model for each in snapshot.on(target)}
    for engine in snapshot.on(source):
        model = snapshot.model(engine.model)
        if model.replica is None or model.scaled:
            continue
        if engine.model in there:
            yield RemoveReplica(engine=engine.id)
        elif snapshot.next_device(engine.model) == target:
            yield AddReplica(model=engine.model, device=target)
