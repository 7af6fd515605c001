"""What rebalancing is decided on: devices, engines, links and loans, each with its age.

An engine's work is that of its home device, as measured there; what it has moved elsewhere stands
in its loans. Compute is device seconds a second *asked for*: what waits counts too, so a flooded
device is told from a full one (the paper's C is what the hardware does, and stops at its maximum).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.lending.policy.layout import Layout, abreast, stacked
from loomserve.platform.state.roles import Role

_T = TypeVar("_T")


class MoveKind(StrEnum):
    """What of an engine may be on another device."""

    REQUESTS = "requests"  # some requests' KV and attention (Weaver); counted in bytes of KV
    HEADS = "heads"  # some KV heads of all layers (BanaServe, section 4.3.2)
    LAYERS = "layers"  # whole layers with their weights (BanaServe, section 4.3.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSnapshot:
    """
    Attributes:
        memory_bytes: All of it.
        allocated_bytes: Of it, to processes, weights and KV, used or not.
        speed: Of computing, relative to the other devices; above 0.
    """

    name: str
    node: str
    memory_bytes: int
    allocated_bytes: int
    speed: float = 1.0
    measured_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """A replica.

    Attributes:
        device: Its home.
        prefill: Device seconds a second that prompts ask for, at home.
        attention: The same of decoding's attention.
        linear: The same of all else in decoding.
        queue: Requests running or waiting.
        kv_bytes: KV memory that it has at home.
        kv_used_bytes: Of it, by its own requests.
        kv_growth: Bytes a second by which its requests' KV grows.
        lend_bytes: Of its KV memory, the most that guests may have.
        borrow_bytes: The most KV that it may have with others.
        borrowed: Lenders whose memory its requests may have, and how many bytes each, used or not.
        layers: At home.
        layer_bytes: Weights of one.
        heads: KV heads of a layer at home.
        tpot_s: Time per output token.
        sync_s: Until its steps stand still, and to go on after (measured).
        drain_s: Until what it has begun is done: the mean time of a request.
        movable: What its mechanisms can move; none until there are any.
        lenders: Engines to which its requests can be moved; None: any.
        shard_lenders: Those to which its heads and layers can; None: any.
        newest: Whether it is its model's last, which is the first to go where there are fewer.
    """

    id: str
    model: str
    device: str
    role: Role = Role.UNIFIED
    prefill: float
    attention: float
    linear: float
    queue: int = 0
    kv_bytes: int
    kv_used_bytes: int
    kv_growth: float = 0.0
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
    newest: bool = True
    measured_at_s: float

    @property
    def compute(self) -> float:
        return self.prefill + self.attention + self.linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LoanSnapshot:
    """A part of an engine's work that another engine's device does.

    Attributes:
        amount: Bytes of KV, heads or layers, by ``kind``.
        compute: Device seconds a second on the lender's device.
        prefill: Of them, for prompts.
        attention: Of them, for decoding's attention.
        kv_bytes: There, in the lender's KV memory.
        weights_bytes: There, beside it.
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
    """
    Attributes:
        devices: Where replicas may run, in the order in which they are used.
        replicas: How many there should be.
        least: How few there may be.
        replica_bytes: What one more takes of a device's memory, its KV included.
        replica: One as it would be, without work; None if replicas may not come and go.
        start_s: Until one serves (measured).
        roles: Whether an operator has given it roles, so that they may change.
    """

    name: str
    devices: tuple[str, ...]
    replicas: int
    replica_bytes: int
    least: int = 1
    replica: EngineSnapshot | None = None
    start_s: float = 0.0
    roles: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """From a device to another, one way."""

    source: str
    target: str
    bytes_per_s: float
    latency_s: float
    measured_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """At ``at_s`` of the clock of all ``measured_at_s``; names and ids are unique.

    What is asked for by name and is not there raises LookupError.
    """

    at_s: float
    devices: tuple[DeviceSnapshot, ...]
    models: tuple[ModelSnapshot, ...]
    engines: tuple[EngineSnapshot, ...]
    links: tuple[Link, ...] = ()
    loans: tuple[LoanSnapshot, ...] = ()
    changed_at_s: float = float("-inf")
    """When the last action ended."""

    def device(self, name: str) -> DeviceSnapshot:
        return _one((each for each in self.devices if each.name == name), "device", name)

    def engine(self, id_: str) -> EngineSnapshot:
        return _one((each for each in self.engines if each.id == id_), "engine", id_)

    def model(self, name: str) -> ModelSnapshot:
        return _one((each for each in self.models if each.name == name), "model", name)

    def link(self, source: str, target: str) -> Link | None:
        return next(
            (each for each in self.links if (each.source, each.target) == (source, target)), None
        )

    def on(self, device: str) -> list[EngineSnapshot]:
        return [each for each in self.engines if each.device == device]

    def of(self, model: str) -> list[EngineSnapshot]:
        return [each for each in self.engines if each.model == model]

    def guests(self, lender: str) -> list[LoanSnapshot]:
        return [each for each in self.loans if each.lender == lender]

    def lent(self, engine: str) -> list[LoanSnapshot]:
        """What of the engine is elsewhere."""
        return [each for each in self.loans if each.engine == engine]

    def next_device(self, model: str) -> str | None:
        """Where one more replica would start: they take devices in the order of the list."""
        taken = {each.device for each in self.of(model)}
        return next((each for each in self.model(model).devices if each not in taken), None)

    def idle_kv(self, engine: EngineSnapshot) -> int:
        """Bytes of its KV memory that neither its requests nor guests use."""
        guests = sum(loan.kv_bytes for loan in self.guests(engine.id))
        return engine.kv_bytes + self._freed(engine) - engine.kv_used_bytes - guests

    def lends(self, engine: EngineSnapshot) -> float:
        """Bytes of its KV memory that its guests keep."""
        return sum(map(self.kept_for, self.guests(engine.id)))

    def borrows(self, engine: EngineSnapshot) -> int:
        """Bytes of its KV that are elsewhere."""
        return sum(loan.kv_bytes for loan in self.lent(engine.id))

    def kept_for(self, loan: LoanSnapshot) -> float:
        """Bytes of its lender's KV memory that nobody else can have, in use or not."""
        if loan.kind is MoveKind.REQUESTS:
            return loan.kv_bytes
        engine = self.engine(loan.engine)
        home = engine.heads if loan.kind is MoveKind.HEADS else engine.layers
        return shard_room(
            engine, self.engine(loan.lender), loan.kind, loan.amount, home + loan.amount
        )

    def kv_room(self, engine: EngineSnapshot) -> float:
        """Bytes of whole KV that its requests can have: where a part of each block is elsewhere,
        more of them fit at home."""
        away = dict.fromkeys(MoveKind, 0)
        for loan in self.lent(engine.id):
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
        """Bytes of weights that left, and so are KV memory."""
        return sum(loan.weights_bytes for loan in self.lent(engine.id))


def _one(found: Iterator[_T], what: str, name: str) -> _T:
    for each in found:
        return each
    raise LookupError(f"there is no {what} {name!r} in the snapshot")


def shard_room(
    engine: EngineSnapshot, lender: EngineSnapshot, kind: MoveKind, amount: int, whole: int
) -> float:
    """Bytes of the lender's KV memory that heads or layers take: a share of each of the engine's
    blocks, and what of the lender's blocks stays empty beside those of fewer layers."""
    layers = amount if kind is MoveKind.LAYERS else engine.layers
    guest, there = Layout(layers, 1), Layout(lender.layers, 1)
    taken = there.layers * stacked(there, guest) / (layers * abreast(there, guest))
    return engine.kv_bytes * amount / whole * taken


def compute_share(snapshot: Snapshot, device: str) -> float:
    """C/C_max: device seconds a second that all engines and guests there ask for."""
    here = snapshot.on(device)
    served = (loan.compute for engine in here for loan in snapshot.guests(engine.id))
    return sum(engine.compute for engine in here) + sum(served)


def memory_share(snapshot: Snapshot, device: str) -> float:
    """M/M_max: what is allocated, without KV memory that nobody uses."""
    there = snapshot.device(device)
    idle = sum(snapshot.idle_kv(engine) for engine in snapshot.on(device))
    return (there.allocated_bytes - idle) / there.memory_bytes


def utilisations(snapshot: Snapshot) -> dict[str, float]:
    """U of each device (eq. 4-28).

    A sum: a device with all of its compute and half of its memory in use equals one with the
    reverse, though they could help each other. The paper's own example of imbalance, prefill
    devices at 95 % compute and 35 % memory beside decode devices at the opposite (figure 4-2 b),
    counts as balanced by its formula.
    """
    return {
        device.name: compute_share(snapshot, device.name) + memory_share(snapshot, device.name)
        for device in snapshot.devices
    }


class Unfit(StrEnum):
    """Why a snapshot gives no plan."""

    EMPTY = "empty"
    STALE = "stale"
    PARTIAL = "partial"
    SETTLING = "settling"


@dataclass(frozen=True, slots=True)
class Flaw:
    """Something missing or unfit; ``subject`` names a device, engine or model."""

    why: Unfit
    subject: str


@dataclass(frozen=True, slots=True)
class Measured:
    """``snapshot`` is None if anything in it would be made up; ``missing`` says what."""

    snapshot: Snapshot | None
    missing: tuple[Flaw, ...]

    def flaws(self, options: Rebalancing) -> tuple[Flaw, ...]:
        """All that keeps it from being decided on."""
        return (*self.missing, *(flaws(self.snapshot, options) if self.snapshot else ()))


def flaws(snapshot: Snapshot, options: Rebalancing) -> list[Flaw]:
    """What must be measured (again) before anything can be decided; none: it is fit."""
    if len(snapshot.devices) < 2:
        return [Flaw(Unfit.EMPTY, "devices")]
    found = list(_missing(snapshot))
    for name, measured_at_s in _measured(snapshot):
        if snapshot.at_s - measured_at_s > options.stale_after_s or measured_at_s > snapshot.at_s:
            found.append(Flaw(Unfit.STALE, name))
        elif measured_at_s < snapshot.changed_at_s + options.settle_s:
            found.append(Flaw(Unfit.SETTLING, name))
    return found


def _measured(snapshot: Snapshot) -> Iterator[tuple[str, float]]:
    yield from ((each.name, each.measured_at_s) for each in snapshot.devices)
    yield from ((each.id, each.measured_at_s) for each in snapshot.engines)
    yield from ((f"{each.engine} at {each.lender}", each.measured_at_s) for each in snapshot.loans)


def _missing(snapshot: Snapshot) -> Iterator[Flaw]:
    devices = {device.name for device in snapshot.devices}
    models = {model.name for model in snapshot.models}
    engines = {engine.id for engine in snapshot.engines}
    for engine in snapshot.engines:
        if engine.device not in devices:
            yield Flaw(Unfit.PARTIAL, engine.device)
        if engine.model not in models:
            yield Flaw(Unfit.PARTIAL, engine.model)
    for model in snapshot.models:
        if len(snapshot.of(model.name)) != model.replicas:
            yield Flaw(Unfit.PARTIAL, model.name)
    for loan in snapshot.loans:
        for end in (loan.engine, loan.lender):
            if end not in engines:
                yield Flaw(Unfit.PARTIAL, end)
