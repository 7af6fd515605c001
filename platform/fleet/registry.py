"""The models that there should be, and the last heartbeats of their replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from loomserve.platform.adapters.messages import AdapterReport
from loomserve.platform.base.errors import Conflict, NotFound, UnknownModel
from loomserve.platform.config import Model
from loomserve.platform.fleet.messages import FrontEndSpec, Heartbeat, LiveReplica, model_app
from loomserve.platform.fleet.wishes import ModelWish
from loomserve.platform.run.sockets import node_of
from loomserve.platform.state import Presence
from loomserve.platform.state.roles import Role
from loomserve.routers.snapshot import RoutingStats

# Four heartbeats missed in a row: what the replica told last is no ground for decisions any more.
HEARTBEAT_EXPIRES_S = 10.0
# So long gateways know of it all the same. Its process may only be slow, and whether its engine
# takes requests they see by themselves.
SILENCE_ENDS_S = 60.0


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
        if heartbeat.device in self.devices:
            return True
        return any(
            heartbeat.replica_id in each for each in (self.replicas, self.leaving, self.ending)
        )

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
    """One replica, by its last heartbeat."""

    heartbeat: Heartbeat
    seen_at: float
    drains: Drains

    @property
    def draining(self) -> bool:
        """Whether the platform drains it."""
        return self.drains.covers(self.heartbeat)

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
    def stops(self) -> bool:
        return self.draining or self.heartbeat.stats.draining

    @property
    def node(self) -> str:
        return node_of(self.heartbeat.address)

    @property
    def asleep(self) -> bool:
        load = self.heartbeat.stats.load
        return load is not None and load.asleep

    def note_asleep(self, asleep: bool) -> None:
        """Note whether it sleeps, which its next heartbeat will say."""
        stats = self.heartbeat.stats
        if stats.load is not None:
            load = stats.load.model_copy(update={"asleep": asleep})
            self.note_stats(stats.model_copy(update={"load": load}))

    def note_adapters(self, reports: tuple[AdapterReport, ...]) -> None:
        """Note which adapters it has, which its next heartbeat will say."""
        self.heartbeat = self.heartbeat.model_copy(update={"adapters": reports})

    def note_stats(self, stats: RoutingStats) -> None:
        """Note what it has to do, which its next heartbeat will say."""
        load = stats.load
        update = {"in_flight": load.running + load.waiting} if load is not None else {}
        self.heartbeat = self.heartbeat.model_copy(update={"stats": stats, **update})


@dataclass
class Registry:
    """Records of models and replicas; times are monotonic seconds of the caller's one clock.
    Operators' wishes are kept and restored; all else is rebuilt from heartbeats, so a controller
    that restarts knows the fleet within one period."""

    drains: Drains = field(default_factory=Drains)
    _models: dict[str, ModelRecord] = field(default_factory=dict)
    _replicas: dict[str, ReplicaRecord] = field(default_factory=dict)

    @property
    def models(self) -> list[Model]:
        return [record.model for record in self._models.values()]

    @property
    def records(self) -> Iterable[ModelRecord]:
        return self._models.values()

    def add(
        self,
        model: Model,
        target_replicas: int,
        presence: Presence = Presence.READY,
        placed: str | None = None,
    ) -> None:
        """Add a model with its devices, the first ones first. ``placed``: why it is there, if the
        platform may move it. Raises Conflict if a model of that name (or of the same application
        name) is there."""
        for name in self._models:
            if model_app(name) == model_app(model.name):
                raise Conflict(f"model {name!r} is already loaded; unload it first", param="name")
        self._models[model.name] = ModelRecord(
            model,
            target_replicas,
            presence=presence,
            was_away=presence is not Presence.READY,
            berth=ModelBerth(model.devices, placed) if placed is not None else None,
        )

    def wishes(self) -> tuple[ModelWish, ...]:
        return tuple(_wish(record) for record in self._models.values())

    @property
    def drained(self) -> frozenset[str]:
        """Replicas that operators drain."""
        return frozenset(self.drains.replicas)

    def restore(self, models: Iterable[ModelWish], drained: Iterable[str]) -> None:
        """Take over what operators wished of an earlier controller."""
        for wish in models:
            self.add(wish.model, wish.replicas, wish.presence)
            record = self._models[wish.model.name]
            record.unload_deadline, record.roles = wish.unload_by, dict(wish.roles)
            record.fixed = wish.fixed
            if wish.berth:
                record.berth = ModelBerth(wish.berth, wish.berth_why)
        self.drains.replicas.update(drained)

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def remove(self, name: str) -> None:
        self._models.pop(name, None)
        self.forget_replicas(name)

    def forget_replicas(self, name: str) -> None:
        """Forget the replicas of a model, which have ended, before their silence tells it."""
        self._replicas = {id_: r for id_, r in self._replicas.items() if r.model.name != name}

    def record(self, name: str) -> ModelRecord:
        """Raises UnknownModel if there is no such model."""
        if name not in self._models:
            raise UnknownModel(unknown_model_message(name, self._models))
        return self._models[name]

    def replica(self, replica_id: str) -> ReplicaRecord:
        """Raises NotFound if no replica of that id has reported."""
        if replica_id not in self._replicas:
            known = ", ".join(sorted(self._replicas)) or "none"
            raise NotFound(f"there is no replica {replica_id!r}; the replicas are: {known}")
        return self._replicas[replica_id]

    def find(self, replica_id: str) -> ReplicaRecord | None:
        """None: it has not reported yet, or not for long."""
        return self._replicas.get(replica_id)

    def live_replica(self, replica_id: str, now: float) -> ReplicaRecord:
        """Raises NotFound if no replica of that id reports."""
        replica = self._replicas.get(replica_id)
        if replica is None or now - replica.seen_at >= HEARTBEAT_EXPIRES_S:
            raise NotFound(f"replica {replica_id!r} does not report any more")
        return replica

    def take(self, heartbeat: Heartbeat, now: float) -> ReplicaRecord:
        """Record a heartbeat, and forget replicas that have been silent for long."""
        replica = ReplicaRecord(heartbeat, now, self.drains)
        known = self._replicas | {replica.id: replica}
        gone = {id_ for id_, each in known.items() if now - each.seen_at >= SILENCE_ENDS_S}
        self._replicas = {id_: each for id_, each in known.items() if id_ not in gone}
        self.drains.forget(gone)
        record = self.record(replica.model.name)
        record.front_end = heartbeat.front_end
        if heartbeat.answers:
            record.failure = None
        return replica

    def set_presence(self, name: str, presence: Presence, now: float, why: str) -> None:
        """Set what a model is to be, from now on, and why. Raises UnknownModel if there is no such
        model."""
        record = self.record(name)
        if record.presence is not presence:
            record.presence, record.since, record.why = presence, now, why
            record.was_away |= presence is not Presence.READY

    def set_target(self, name: str, replicas: int) -> None:
        """Raises UnknownModel if there is no such model."""
        self.record(name).target_replicas = replicas

    def set_failure(self, name: str, failure: str | None) -> None:
        """Why the model's application cannot start, or None; unknown names are ignored."""
        if name in self._models:
            self._models[name].failure = failure

    def set_front_end(self, name: str, front_end: FrontEndSpec | None) -> None:
        """What gateways answer a model with while it has no replica; unknown names are ignored."""
        if name in self._models:
            self._models[name].front_end = front_end

    def begin_unload(self, name: str, deadline: float) -> None:
        """Raises UnknownModel if there is no such model, Conflict if it is being unloaded
        already."""
        record = self.record(name)
        if record.unload_deadline is not None:
            raise Conflict(f"model {name!r} is already being unloaded")
        record.unload_deadline = deadline

    def unload_may_finish(self, name: str, now: float) -> bool:
        """True when nothing runs on the model or lies with it, or its deadline has passed."""
        record = self.record(name)
        assert record.unload_deadline is not None
        busy = any(r.heartbeat.in_flight or r.heartbeat.lent for r in self.live(name, now))
        return not busy or now >= record.unload_deadline

    def set_draining(self, replica_id: str, draining: bool) -> None:
        """Raises NotFound if no replica of that id has reported."""
        id_ = self.replica(replica_id).id
        (self.drains.replicas.add if draining else self.drains.replicas.discard)(id_)

    def set_role(self, replica_id: str, role: Role) -> None:
        """Change the role of a replica, and of those that come after it on its device. Raises
        NotFound if no replica of that id has reported."""
        replica = self.replica(replica_id)
        self.record(replica.model.name).roles[replica.device] = role

    def targets(self) -> dict[str, int]:
        """How many replicas there should be of each model that is not being unloaded."""
        return {
            name: record.replicas
            for name, record in self._models.items()
            if record.unload_deadline is None
        }

    def live(self, name: str, now: float) -> list[ReplicaRecord]:
        """A model's replicas whose heartbeats have not expired."""
        return [
            replica
            for replica in self._replicas.values()
            if replica.model.name == name and now - replica.seen_at < HEARTBEAT_EXPIRES_S
        ]

    def all_live(self, now: float) -> Iterator[ReplicaRecord]:
        """Live replicas, model by model."""
        for name in self._models:
            yield from self.live(name, now)

    def reachable(self, name: str, now: float) -> list[ReplicaRecord]:
        """A model's replicas that are live, or were until lately and have no successor."""
        live = self.live(name, now)
        taken = {replica.device for replica in live}
        return live + [
            replica
            for replica in self._replicas.values()
            if replica.model.name == name
            and replica.device not in taken
            and now - replica.seen_at < SILENCE_ENDS_S
        ]

    def live_replicas(self, name: str, now: float) -> tuple[LiveReplica, ...]:
        """A model's live replicas, as they will be after their next heartbeats."""
        record = self.record(name)
        return tuple(
            LiveReplica(
                id=replica.id,
                address=replica.heartbeat.address,
                stats=replica.heartbeat.stats.model_copy(
                    update={
                        "role": record.role(replica.heartbeat),
                        "draining": replica.stops,
                        "told_at": now,
                    }
                ),
            )
            for replica in self.live(name, now)
            if replica.heartbeat.answers
        )

    def max_model_len(self, name: str, now: float) -> int | None:
        """Tokens of context, once a replica has said."""
        return next((r.heartbeat.max_model_len for r in self.reachable(name, now)), None)


def _wish(record: ModelRecord) -> ModelWish:
    berth = record.berth or ModelBerth((), "")
    return ModelWish(
        model=record.model,
        replicas=record.target_replicas,
        unload_by=record.unload_deadline,
        presence=record.presence,
        roles=dict(record.roles),
        fixed=record.fixed,
        berth=berth.devices,
        berth_why=berth.why,
    )


def unknown_model_message(name: str, known: Iterable[str]) -> str:
    names = ", ".join(sorted(known)) or "none is loaded"
    return f"The model {name[:256]!r} does not exist here. Models: {names}."
