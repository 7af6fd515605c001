"""The measurements that rebalancing is decided on: devices, engines, links and loans.

An engine's figures are those of its home device; the work that lenders do for it stands in its
loans. Compute is device seconds *asked for* in a second: waiting requests count too, so that a
flooded device is told from a full one (the paper's C is what the hardware does, and stops at its
maximum).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TypeVar

from loomserve.platform.lending.policy.layout import Layout, abreast, stacked
from loomserve.platform.state.roles import Role

_T = TypeVar("_T")


class MoveKind(StrEnum):
    """What may move from an engine to another device."""

    REQUESTS = "requests"  # some requests' KV and attention (Weaver); counted in bytes of KV
    HEADS = "heads"  # some KV heads of all layers (BanaServe, section 4.3.2)
    LAYERS = "layers"  # whole layers with their weights (BanaServe, section 4.3.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSnapshot:
    """A device: its whole memory, what processes, weights and KV (used or not) have of it, and its
    speed relative to the other devices, above 0."""

    name: str
    node: str
    memory_bytes: int
    allocated_bytes: int
    speed: float = 1.0
    measured_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """A replica, at home on ``device``.

    Attributes:
        prefill: Device seconds a second that prompts ask for, at home.
        attention: Device seconds a second that decoding's attention asks for, at home.
        linear: Device seconds a second that the rest of decoding asks for, at home.
        queue: Number of requests that run or wait.
        max_running: Number of requests that may run; 0: none can come from elsewhere or go there.
        kv_bytes: KV memory at home.
        kv_used_bytes: KV memory at home that its own requests use.
        kv_growth: Bytes a second by which its requests' KV grows.
        recompute_s: Time in which a byte of a request's KV is computed again; None: not measured.
        stores_kv: Whether it keeps KV in the store, from which other replicas load it.
        draining: Whether its requests go on elsewhere, and none comes.
        lend_bytes: KV memory that borrowers may have at most.
        borrow_bytes: KV that it may have with lenders at most.
        borrowed: Lenders whose memory its requests may have, with the bytes of each, used or not.
        layers: Number of layers at home.
        layer_bytes: Weights of one layer.
        heads: Number of KV heads of a layer at home.
        tpot_s: Time per output token.
        sync_s: Measured time until its steps stand still, and until they go on.
        drain_s: Mean time of a request: by then, what it has begun is done.
        movable: Kinds of moves that actuators can make with it.
        lenders: Engines to which its requests can move; None: any.
        shard_lenders: Engines to which its heads and layers can move; None: any.
    """

    id: str
    model: str
    device: str
    role: Role = Role.UNIFIED
    prefill: float
    attention: float
    linear: float
    queue: int = 0
    waiting: int = 0
    max_running: int = 0
    kv_bytes: int
    kv_used_bytes: int
    kv_growth: float = 0.0
    recompute_s: float | None = None
    stores_kv: bool = False
    draining: bool = False
    lend_bytes: int = 0
    borrow_bytes: int = 0
    borrowed: tuple[tuple[str, int], ...] = ()
    layers: int
    layer_bytes: int
    heads: int
    tpot_s: float
    sync_s: float
    drain_s: float = 0.0
    movable: frozenset[MoveKind] = frozenset()
    lenders: frozenset[str] | None = None
    shard_lenders: frozenset[str] | None = None
    measured_at_s: float

    @property
    def compute(self) -> float:
        return self.prefill + self.attention + self.linear

    def without_work(self) -> EngineSnapshot:
        """One like it that has not been asked for anything."""
        return replace(
            self,
            prefill=0.0,
            attention=0.0,
            linear=0.0,
            kv_growth=0.0,
            queue=0,
            waiting=0,
            kv_used_bytes=0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoanSnapshot:
    """Work of an engine that a lender's device does, in the lender's device seconds a second.

    Attributes:
        amount: Bytes of KV, heads or layers, by ``kind``.
        kv_bytes: KV in the lender's KV memory.
        weights_bytes: Weights on the lender's device, beside its KV memory.
    """

    kind: MoveKind
    engine: str
    lender: str
    amount: int
    prefill: float = 0.0
    attention: float
    linear: float = 0.0
    kv_bytes: int
    weights_bytes: int = 0
    measured_at_s: float

    @property
    def compute(self) -> float:
        return self.prefill + self.attention + self.linear


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot:
    """A model; ``replicas`` and ``least`` are numbers that there should and must be.

    Attributes:
        devices: Devices where replicas may run, in the order in which they are used.
        replica_bytes: Memory that one more replica takes on a device, its KV included.
        replica: One more replica before it has work; None: replicas may not come and go.
        start_s: Measured time until a replica serves.
        roles: Whether an operator has given its replicas roles, so that they may change.
        scaled: Whether its load decides on its replicas (:mod:`.scaling`), and no gap does.
    """

    name: str
    devices: tuple[str, ...]
    replicas: int
    replica_bytes: int
    least: int = 1
    replica: EngineSnapshot | None = None
    start_s: float = 0.0
    roles: bool = False
    scaled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way from one device to another; the way back is a link of its own."""

    source: str
    target: str
    bytes_per_s: float
    latency_s: float
    measured_at_s: float


@dataclass(frozen=True, slots=True)
class SnapshotPlaces:
    """Places in a snapshot's tuples; of several of one name, the first. Engines ``on`` a device and
    ``of`` a model, links by source and target, loans by lender and by engine."""

    devices: dict[str, int]
    models: dict[str, int]
    engines: dict[str, int]
    on: dict[str, tuple[int, ...]]
    of: dict[str, tuple[int, ...]]
    links: dict[tuple[str, str], Link]
    loans_at: dict[str, tuple[LoanSnapshot, ...]]
    loans_of: dict[str, tuple[LoanSnapshot, ...]]

    @classmethod
    def made(cls, snapshot: Snapshot) -> SnapshotPlaces:
        engines, loans = snapshot.engines, snapshot.loans
        return cls(
            devices=_first(each.name for each in snapshot.devices),
            models=_first(each.name for each in snapshot.models),
            engines=_first(each.id for each in engines),
            on=_grouped(range(len(engines)), lambda place: engines[place].device),
            of=_grouped(range(len(engines)), lambda place: engines[place].model),
            links={(link.source, link.target): link for link in reversed(snapshot.links)},
            loans_at=_grouped(loans, lambda loan: loan.lender),
            loans_of=_grouped(loans, lambda loan: loan.engine),
        )

    def with_loan(self, before: LoanSnapshot, after: LoanSnapshot | None) -> SnapshotPlaces:
        """With a loan behind all others, in the place of one that may not have been there."""
        loans_at, loans_of = dict(self.loans_at), dict(self.loans_of)
        for loans, key in ((loans_at, before.lender), (loans_of, before.engine)):
            others = tuple(each for each in loans.get(key, ()) if each is not before)
            loans[key] = others if after is None else (*others, after)
        return replace(self, loans_at=loans_at, loans_of=loans_of)


def _first(names: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for place, name in enumerate(names):
        found.setdefault(name, place)
    return found


def _grouped(all_: Sequence[_T], key: Callable[[_T], str]) -> dict[str, tuple[_T, ...]]:
    found: dict[str, list[_T]] = {}
    for each in all_:
        found.setdefault(key(each), []).append(each)
    return {name: tuple(group) for name, group in found.items()}


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that rebalancing is decided on, at one time; names and ids are unique.

    Methods raise LookupError for a name that is not in it. ``at_s`` and every ``measured_at_s``
    are of one clock.

    Planning asks thousands of snapshots that differ in two engines. So :meth:`changed` makes them:
    they share what is found where, and the loads of devices that did not change.
    """

    at_s: float
    devices: tuple[DeviceSnapshot, ...]
    models: tuple[ModelSnapshot, ...]
    engines: tuple[EngineSnapshot, ...]
    links: tuple[Link, ...] = ()
    loans: tuple[LoanSnapshot, ...] = ()
    changed_at_s: float = float("-inf")
    """Time when the last action ended."""

    @cached_property
    def _places(self) -> SnapshotPlaces:
        return SnapshotPlaces.made(self)

    @cached_property
    def _origin(self) -> tuple[Snapshot, frozenset[str]] | None:
        """The snapshot that this one was changed from, and the devices whose figures differ."""
        return None

    @cached_property
    def loads(self) -> Mapping[str, float]:
        """U of each device (eq. 4-28): a sum, so a device with all of its compute and half of its
        memory in use equals one with the reverse, though they could help each other."""
        if self._origin is None:
            return {device.name: self._load(device.name) for device in self.devices}
        before, touched = self._origin
        return {**before.loads, **{name: self._load(name) for name in touched}}

    @cached_property
    def mean_load(self) -> float:
        return sum(self.loads.values()) / len(self.loads)

    def touched_since(self, before: Snapshot) -> frozenset[str] | None:
        """The devices whose figures may differ from those before; None: any may."""
        if self._origin is None or self._origin[0] is not before:
            return None
        return self._origin[1]

    def changed(
        self,
        engines: Iterable[EngineSnapshot] = (),
        loan: tuple[LoanSnapshot, LoanSnapshot] | None = None,
        allocated: tuple[str, int] | None = None,
    ) -> Snapshot:
        """The same with other figures of engines on the same devices; ``loan``: what a loan was,
        and is then (without an amount it is none); ``allocated``: a device, and bytes by which its
        memory grows."""
        found, loans, devices = self._places, self.loans, self.devices
        touched = set[str]()
        changed = list(self.engines)
        for engine in engines:
            changed[found.engines[engine.id]] = engine
            touched.add(engine.device)
        if loan is not None:
            before, after = loan
            loans = tuple(each for each in loans if each is not before)
            loans = (*loans, after) if after.amount > 0 else loans
            found = found.with_loan(before, after if after.amount > 0 else None)
            touched |= {self.engine(after.engine).device, self.engine(after.lender).device}
        if allocated is not None:
            name, size = allocated
            device = self.device(name)
            more = replace(device, allocated_bytes=device.allocated_bytes + size)
            place = found.devices[name]
            devices = (*devices[:place], more, *devices[place + 1 :])
            touched.add(name)
        snapshot = replace(self, engines=tuple(changed), loans=loans, devices=devices)
        vars(snapshot).update(_places=found, _origin=(self, frozenset(touched)))
        return snapshot

    def device(self, name: str) -> DeviceSnapshot:
        return self.devices[_place(self._places.devices, "device", name)]

    def has(self, engine: str) -> bool:
        return engine in self._places.engines

    def devices_in_order(self, names: Iterable[str]) -> list[DeviceSnapshot]:
        places = self._places.devices
        return [self.devices[place] for place in sorted(places[name] for name in names)]

    def engines_in_order(self, ids: Iterable[str]) -> list[EngineSnapshot]:
        places = self._places.engines
        return [self.engines[place] for place in sorted(places[id_] for id_ in ids)]

    def engine(self, id_: str) -> EngineSnapshot:
        return self.engines[_place(self._places.engines, "engine", id_)]

    def model(self, name: str) -> ModelSnapshot:
        return self.models[_place(self._places.models, "model", name)]

    def link(self, source: str, target: str) -> Link | None:
        return self._places.links.get((source, target))

    def on(self, device: str) -> list[EngineSnapshot]:
        return [self.engines[place] for place in self._places.on.get(device, ())]

    def of(self, model: str) -> list[EngineSnapshot]:
        return [self.engines[place] for place in self._places.of.get(model, ())]

    def loans_at(self, lender: str) -> Sequence[LoanSnapshot]:
        """Loans with which others borrow from the engine."""
        return self._places.loans_at.get(lender, ())

    def loans_of(self, engine: str) -> Sequence[LoanSnapshot]:
        """Loans with which the engine borrows."""
        return self._places.loans_of.get(engine, ())

    def next_device(self, model: str) -> str | None:
        """The device where one more replica would start: the first free one of the model's."""
        taken = {each.device for each in self.of(model)}
        return next((each for each in self.model(model).devices if each not in taken), None)

    def idle_kv(self, engine: EngineSnapshot) -> int:
        """Bytes of its KV memory that neither its requests nor borrowers use."""
        lent = sum(loan.kv_bytes for loan in self.loans_at(engine.id))
        return engine.kv_bytes + self._freed(engine) - engine.kv_used_bytes - lent

    def lends(self, engine: EngineSnapshot) -> float:
        """Bytes of its KV memory that borrowers keep, used or not."""
        return sum(map(self.kept_for, self.loans_at(engine.id)))

    def borrows(self, engine: EngineSnapshot) -> int:
        """Bytes of its KV that lie with lenders."""
        return sum(loan.kv_bytes for loan in self.loans_of(engine.id))

    def kept_for(self, loan: LoanSnapshot) -> float:
        """Bytes of the lender's KV memory that nobody else can have, used or not."""
        if loan.kind is MoveKind.REQUESTS:
            return loan.kv_bytes
        engine = self.engine(loan.engine)
        home = engine.heads if loan.kind is MoveKind.HEADS else engine.layers
        return shard_room(
            engine, self.engine(loan.lender), loan.kind, loan.amount, home + loan.amount
        )

    def kv_room(self, engine: EngineSnapshot) -> float:
        """Bytes of whole KV that its requests can have. Where heads or layers of each block lie
        with a lender, more blocks fit at home."""
        away = dict.fromkeys(MoveKind, 0)
        for loan in self.loans_of(engine.id):
            away[loan.kind] += loan.amount
        heads = (engine.heads + away[MoveKind.HEADS]) / engine.heads
        layers = (engine.layers + away[MoveKind.LAYERS]) / engine.layers
        # There are no more blocks than the engine has numbers for.
        home = min(
            (engine.kv_bytes * heads + self._freed(engine)) * layers,
            engine.kv_bytes + engine.borrow_bytes,
        )
        return home + sum(size for _, size in engine.borrowed)

    def _freed(self, engine: EngineSnapshot) -> int:
        """Bytes of weights that left the device, and so are KV memory."""
        return sum(loan.weights_bytes for loan in self.loans_of(engine.id))

    def _load(self, device: str) -> float:
        return compute_share(self, device) + memory_share(self, device)


def _place(places: Mapping[str, int], what: str, name: str) -> int:
    place = places.get(name)
    if place is None:
        raise LookupError(f"there is no {what} {name!r} in the snapshot")
    return place


def shard_room(
    engine: EngineSnapshot, lender: EngineSnapshot, kind: MoveKind, amount: int, whole: int
) -> float:
    """Bytes of the lender's KV memory that heads or layers take. That is their share of each of the
    engine's blocks, and the bytes that stay empty in the lender's blocks where layers do not fill
    them."""
    layers = amount if kind is MoveKind.LAYERS else engine.layers
    borrower, there = Layout(layers, 1), Layout(lender.layers, 1)
    taken = there.layers * stacked(there, borrower) / (layers * abreast(there, borrower))
    return engine.kv_bytes * amount / whole * taken


def compute_share(snapshot: Snapshot, device: str) -> float:
    """C/C_max: device seconds a second that all engines and borrowers there ask for."""
    here = snapshot.on(device)
    served = (loan.compute for engine in here for loan in snapshot.loans_at(engine.id))
    return sum(engine.compute for engine in here) + sum(served)


def memory_share(snapshot: Snapshot, device: str) -> float:
    """M/M_max: allocated memory, without KV memory that nobody uses."""
    there = snapshot.device(device)
    idle = sum(snapshot.idle_kv(engine) for engine in snapshot.on(device))
    return (there.allocated_bytes - idle) / there.memory_bytes
