"""The models that there should be, and the last heartbeats of their replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from loomserve.platform.base.errors import Conflict, NotFound, UnknownModel
from loomserve.platform.config import Model
from loomserve.platform.fleet.messages import FrontEndSpec, Heartbeat, model_app
from loomserve.platform.fleet.rates import Rates
from loomserve.platform.fleet.snapshot import (
    Drains,
    FleetModel,
    FleetSnapshot,
    ModelBerth,
    ModelRecord,
    ReplicaRecord,
)
from loomserve.platform.fleet.wishes import ModelWish
from loomserve.platform.state import Presence
from loomserve.platform.state.roles import Role

# Four heartbeats missed in a row: what the replica told last is no ground for decisions any more.
HEARTBEAT_EXPIRES_S = 10.0
# So long gateways know of it all the same. Its process may only be slow, and whether its engine
# takes requests they see by themselves.
SILENCE_ENDS_S = 60.0


@dataclass
class Registry:
    """Records of models and replicas; times are monotonic seconds of the caller's one clock.
    Operators' wishes are kept and restored; all else is rebuilt from heartbeats, so a controller
    that restarts knows the fleet within one period."""

    drains: Drains = field(default_factory=Drains)
    rates: Rates = field(default_factory=Rates)
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
        if replica is None or not _is_live(replica, now):
            raise NotFound(f"replica {replica_id!r} does not report any more")
        return replica

    def take(self, heartbeat: Heartbeat, now: float) -> ReplicaRecord:
        """Record a heartbeat, and forget replicas that have been silent for long."""
        rates = self.rates.of(heartbeat.replica_id)
        replica = ReplicaRecord(heartbeat, now, self.drains, rates)
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
        return list(self.model(name, now).replicas) if name in self else []

    def snapshot(self, now: float) -> FleetSnapshot:
        """All models, each with its live replicas."""
        by_model = defaultdict[str, list[ReplicaRecord]](list)
        for replica in self._replicas.values():
            by_model[replica.model.name].append(replica)
        models = (_seen(record, by_model[name], now) for name, record in self._models.items())
        return FleetSnapshot(now, tuple(models))

    def model(self, name: str, now: float) -> FleetModel:
        """A model with its live replicas; raises UnknownModel if there is no such model."""
        replicas = [each for each in self._replicas.values() if each.model.name == name]
        return _seen(self.record(name), replicas, now)


def _seen(record: ModelRecord, replicas: Sequence[ReplicaRecord], now: float) -> FleetModel:
    """A model with those of all its replicas that are live, or were until lately."""
    live = tuple(replica for replica in replicas if _is_live(replica, now))
    taken = {replica.device for replica in live}
    silent = tuple(
        replica
        for replica in replicas
        if replica.device not in taken and now - replica.seen_at < SILENCE_ENDS_S
    )
    return FleetModel(replace(record), live, silent)


def _is_live(replica: ReplicaRecord, now: float) -> bool:
    return now - replica.seen_at < HEARTBEAT_EXPIRES_S


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
