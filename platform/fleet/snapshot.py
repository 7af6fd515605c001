"""The fleet at one moment: models as operators want them, and replicas as they say that they are.

All that decide on models and replicas decide on it, and what is derived of a replica's heartbeat is
derived here. Times are of the fleet's clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from loomserve.platform.adapters.messages import AdapterReport
from loomserve.platform.config import Model
from loomserve.platform.fleet.messages import FrontEndSpec, Heartbeat
from loomserve.platform.run.engine_address import node_of
from loomserve.platform.state import FootprintState, Presence, ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.snapshot import RoutingStats


@dataclass
class Drains:
    """Replicas, by their ids, that are drained.

    Attributes:
        replicas: Those that operators drain.
        devices: Of which all are drained.
        leaving: Those that are to be ended, and count among those that there are to be still.
        ending: Those that are ended, and do not count any more.
    """

    replicas: set[str] = field(default_factory=set)
    devices: frozenset[str] = frozenset()
    leaving: set[str] = field(default_factory=set)
    ending: set[str] = field(default_factory=set)

    def covers(self, heartbeat: Heartbeat) -> bool:
        drained = self.replicas | self.leaving | self.ending
        return heartbeat.device in self.devices or heartbeat.replica_id in drained

    def has_left(self, replica_id: str) -> None:
        """Count a drained replica no more, which is about to be ended."""
        self.leaving.discard(replica_id)
        self.ending.add(replica_id)

    def forget(self, gone: Collection[str]) -> None:
        self.leaving.difference_update(gone)
        self.ending.difference_update(gone)


@dataclass(frozen=True)
class ModelBerth:
    """Where the platform has a model be, which it may change: all that the model may use, those of
    its replicas first, and why, for a person."""

    devices: tuple[str, ...]
    why: str


@dataclass
class ModelRecord:
    """One model, as operators want it."""

    model: Model
    target_replicas: int
    unload_deadline: float | None = None
    failure: str | None = None
    """Why its application cannot start."""
    roles: dict[str, Role] = field(default_factory=dict)
    """By device, where an operator has changed it."""
    presence: Presence = Presence.READY
    since: float = 0.0
    """When it was first to be there as ``presence`` says."""
    why: str = ""
    """Why it is to be so, for a person."""
    was_away: bool = False
    """Whether it has slept, or had no engine."""
    front_end: FrontEndSpec | None = None
    """As its last replica said, or was told."""
    fixed: bool = False
    """Whether an operator has set the number of its replicas, so that its load does not."""
    scaling: str = ""
    """What was decided last of the number of its replicas, and why, for a person."""
    berth: ModelBerth | None = None
    """None: the configuration says where it is."""

    @property
    def devices(self) -> tuple[str, ...]:
        """All that it may use, in the order in which its replicas get them."""
        return self.berth.devices if self.berth is not None else self.model.devices

    def move(self, devices: tuple[str, ...], why: str) -> None:
        """Have its replicas be on these of its devices, from the next start on."""
        # In the order of the model's, by which plans tell where a further replica comes.
        rest = [name for name in self.model.devices if name not in devices]
        self.berth = ModelBerth((*devices, *rest), why)

    @property
    def stays(self) -> bool:
        return self.unload_deadline is None and self.presence is Presence.READY

    @property
    def on_demand(self) -> bool:
        """Whether requests wait for it where it is not ready, and have it come."""
        return self.was_away or self.model.start == "on_demand"

    def fix(self, fixed: bool) -> None:
        """Whether an operator has set the number of its replicas, whatever its load."""
        self.fixed = fixed
        self.scaling = "an operator has set the number of its replicas" if fixed else ""

    @property
    def replicas(self) -> int:
        return 0 if self.presence is Presence.UNLOADED else self.target_replicas

    def role(self, heartbeat: Heartbeat) -> Role:
        """The role that a replica has, or is given in answer to its next heartbeat."""
        return self.roles.get(heartbeat.device, heartbeat.stats.role)


@dataclass
class ReplicaRecord:
    """One replica, by its last heartbeat. ``rates``: what its sums have grown by in a second, as of
    :class:`Rates`; None: not enough was seen."""

    heartbeat: Heartbeat
    seen_at: float
    drains: Drains
    rates: Mapping[str, float] | None = None

    @property
    def id(self) -> str:
        return self.heartbeat.replica_id

    @property
    def device(self) -> str:
        return self.heartbeat.device

    @property
    def model(self) -> Model:
        return self.heartbeat.model

    @property
    def node(self) -> str:
        return node_of(self.heartbeat.address)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of its work and memory by device; those of a pipeline are by layers."""
        stages = self.heartbeat.stages
        layers = sum(stage.layers for stage in stages)
        return {stage.device: stage.layers / layers for stage in stages} or {self.device: 1.0}

    @property
    def load(self) -> ReplicaLoad | None:
        return self.heartbeat.stats.load

    @property
    def footprint(self) -> FootprintState | None:
        return self.heartbeat.footprint

    # What becomes of it

    @property
    def draining(self) -> bool:
        """Whether the platform drains it."""
        return self.drains.covers(self.heartbeat)

    @property
    def leaving(self) -> bool:
        return self.id in self.drains.leaving

    @property
    def ending(self) -> bool:
        return self.id in self.drains.ending

    @property
    def stops(self) -> bool:
        return self.draining or self.heartbeat.stats.draining

    @property
    def asleep(self) -> bool:
        return self.load is not None and self.load.asleep

    @property
    def is_drained(self) -> bool:
        """Whether it takes nothing new, and has nothing open: neither requests nor loans. Its
        report is of after it knew that it is drained; one from before may be out of date."""
        report = self.heartbeat
        return report.stats.draining and not (report.in_flight or report.lent or self.ongoing)

    def may_lend_to(self, borrower: ReplicaRecord) -> bool:
        """Whether it can now; on one device, the borrower would wait for a lender whose core it
        holds."""
        elsewhere = self.node == borrower.node and self.device != borrower.device
        return elsewhere and not self.stops and not self.asleep

    # What it has to do

    @property
    def waiting(self) -> int:
        return self.load.waiting if self.load is not None else 0

    @property
    def ongoing(self) -> int:
        """Requests that run or wait."""
        return self.load.running + self.load.waiting if self.load is not None else 0

    def idle_s(self, now: float) -> float:
        """For how long it has had no request; 0: it has some, or that is unknown."""
        load = self.load
        if load is None or self.heartbeat.in_flight or not load.idle_s:
            return 0.0
        return load.idle_s + now - load.measured_at

    # Its KV memory

    @property
    def kv_share(self) -> float:
        """Share of KV blocks in use; what lenders grant is room that it has already."""
        said = self.heartbeat.borrowing
        if said is None:
            return self.load.kv_cache_usage if self.load is not None else 0.0
        loans = [loan for loan in said.loans if loan.shard is None]
        blocks = said.own_blocks + sum(loan.usable_blocks for loan in loans)
        free = said.own_free_blocks + sum(loan.free_blocks for loan in loans)
        return (blocks - free) / blocks if blocks else 0.0

    @property
    def own_kv_share(self) -> float:
        """Share of its own KV memory that is in use."""
        said = self.heartbeat.borrowing
        if said is not None and said.loans:
            return 1.0 - said.own_free_blocks / max(1, said.own_blocks)
        return self.load.kv_cache_usage if self.load is not None else 0.0

    @property
    def lent_blocks(self) -> int:
        return sum(lent.blocks for lent in self.heartbeat.lent)

    @property
    def away(self) -> tuple[int, int]:
        """Numbers of KV heads and of layers that are not at home."""
        shards = [loan.shard for loan in self.heartbeat.loans if loan.shard is not None]
        away = [shard for shard in shards if shard.is_away]
        heads = sum(shard.heads for shard in away)
        return heads, sum(shard.layers[1] - shard.layers[0] for shard in away if shard.layers)

    # What its next heartbeat will say

    def note_asleep(self, asleep: bool) -> None:
        stats = self.heartbeat.stats
        if stats.load is not None:
            load = stats.load.model_copy(update={"asleep": asleep})
            self.note_stats(stats.model_copy(update={"load": load}))

    def note_adapters(self, reports: tuple[AdapterReport, ...]) -> None:
        self.heartbeat = self.heartbeat.model_copy(update={"adapters": reports})

    def note_stats(self, stats: RoutingStats) -> None:
        load = stats.load
        update = {"in_flight": load.running + load.waiting} if load is not None else {}
        self.heartbeat = self.heartbeat.model_copy(update={"stats": stats, **update})


@dataclass(frozen=True)
class FleetModel:
    """A model as it is to be, and its live replicas; ``silent``: those that were live until lately,
    and have no successor."""

    record: ModelRecord
    replicas: tuple[ReplicaRecord, ...]
    silent: tuple[ReplicaRecord, ...] = ()

    @property
    def name(self) -> str:
        return self.record.model.name

    @property
    def reachable(self) -> tuple[ReplicaRecord, ...]:
        """Those that gateways ask, which see by themselves who does not answer."""
        return (*self.replicas, *self.silent)

    @property
    def max_model_len(self) -> int | None:
        """Tokens of context, once a replica has said."""
        return next((each.heartbeat.max_model_len for each in self.reachable), None)

    @property
    def front_end(self) -> FrontEndSpec | None:
        """What it is answered with: as its engines were started, else as the next ones will be. It
        takes seconds to set up, for which no engine should have to wait."""
        return next((each.heartbeat.front_end for each in self.reachable), self.record.front_end)

    # Whether it is there

    @property
    def awake(self) -> int:
        """Replicas that do not sleep."""
        return sum(not each.asleep for each in self.replicas)

    @property
    def settled(self) -> bool:
        """Whether it is what it is to be, as far as its replicas say."""
        match self.record.presence:
            case Presence.UNLOADED:
                return not self.replicas
            case Presence.ASLEEP:
                return bool(self.replicas) and not self.awake
            case _:
                return self.awake >= self.record.target_replicas

    @property
    def is_held(self) -> bool:
        """Whether Serve has a replica for each engine that is to serve, and none for others."""
        serves = self.record.presence is Presence.READY
        return all(each.heartbeat.held is serves for each in self.replicas)

    @property
    def answers(self) -> bool:
        """Whether some replica has answered."""
        return any(each.heartbeat.answers for each in self.replicas)

    @property
    def has_requests(self) -> bool:
        return any(each.heartbeat.in_flight for each in self.replicas)

    def idle_s(self, now: float) -> float:
        """How long none of its replicas has had a request; 0: some have, or that is unknown."""
        return min((each.idle_s(now) for each in self.replicas), default=0.0)

    @property
    def devices(self) -> tuple[str, ...]:
        """Where it is, or where it comes."""
        record, used = self.record, {name for each in self.replicas for name in each.shares}
        if record.model.pipeline is not None:
            return tuple(sorted(used)) or record.model.devices
        if not used:
            return record.devices[: record.target_replicas]
        free = [device for device in record.devices if device not in used]
        # Those that start take their memory, too.
        more = max(0, record.replicas - len(self.replicas))
        return tuple(sorted({*used, *free[:more]}))

    @property
    def start_s(self) -> float:
        """Time until one more would serve, as measured of those that do; 0: of none."""
        starts = [each.footprint.start_s for each in self.replicas if each.footprint is not None]
        return max(starts, default=0.0)

    # How many replicas it has, and should have

    @property
    def counted(self) -> tuple[ReplicaRecord, ...]:
        """Replicas whose load is known, without those that are ended."""
        return tuple(each for each in self.replicas if not each.ending and each.load is not None)

    @property
    def serving(self) -> tuple[ReplicaRecord, ...]:
        return tuple(each for each in self.counted if not each.leaving)

    @property
    def leaving(self) -> tuple[ReplicaRecord, ...]:
        return tuple(each for each in self.counted if each.leaving)

    @property
    def kept(self) -> int:
        """Replicas that there should be once those that leave are gone."""
        return self.record.target_replicas - len(self.leaving)

    @property
    def ongoing(self) -> int:
        """Requests that run or wait."""
        return sum(each.ongoing for each in self.counted)

    @property
    def arrived_per_s(self) -> float | None:
        """Requests a second that came to its replicas; None: not measured yet."""
        rates = [each.rates["requests"] for each in self.replicas if each.rates is not None]
        return sum(rates) if rates else None


@dataclass(frozen=True)
class FleetSnapshot:
    """All models; ``at_s`` is of the fleet's clock."""

    at_s: float
    models: tuple[FleetModel, ...]

    @property
    def replicas(self) -> tuple[ReplicaRecord, ...]:
        """Live replicas, model by model."""
        return tuple(replica for model in self.models for replica in model.replicas)

    @property
    def scaled(self) -> tuple[FleetModel, ...]:
        """Models that are ready, and whose load decides on their replicas."""
        return tuple(
            model
            for model in self.models
            if model.record.model.scaling is not None
            and model.record.stays
            and not model.record.fixed
        )
