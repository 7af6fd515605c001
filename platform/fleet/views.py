"""The fleet as gateways, the batch lane and operators see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loomserve.platform.adapters.messages import Adapter, AdapterRoute
from loomserve.platform.adapters.table import AdapterTable
from loomserve.platform.aliases.table import AliasTable
from loomserve.platform.config import LOCAL_NODE, Device
from loomserve.platform.devices.binding import place
from loomserve.platform.fleet.messages import ModelRoute, ReplicaRoute, ServedEngines, ServedModel
from loomserve.platform.fleet.registry import Registry
from loomserve.platform.fleet.snapshot import FleetModel, ModelRecord, ReplicaRecord
from loomserve.platform.state import (
    AdapterState,
    DeviceState,
    ModelState,
    ModelStatus,
    Presence,
    ReplicaState,
    ScalingState,
)
from loomserve.routers.snapshot import RoutingStats


@dataclass(frozen=True)
class FleetViews:
    """Views of a registry; each is made when it is asked for."""

    registry: Registry
    devices: Sequence[Device]
    aliases: AliasTable
    adapters: AdapterTable

    def routes(self, now: float) -> tuple[ModelRoute, ...]:
        """For gateways."""
        return tuple(self._route(model, now) for model in self.registry.snapshot(now).models)

    def _route(self, model: FleetModel, now: float) -> ModelRoute:
        status, message = _status(model, now)
        sizes = [each.footprint.token_bytes for each in model.reachable if each.footprint]
        return ModelRoute(
            model=model.record.model,
            status=status,
            on_demand=model.record.on_demand,
            problem=message if status is ModelStatus.FAILED else "",
            max_model_len=model.max_model_len,
            kv_token_bytes=max(sizes, default=0.0),
            front_end=model.front_end,
            replicas=tuple(_replica_route(each, self._on(each.device)) for each in model.reachable),
            adapters=self._adapter_routes(model.name, model.reachable, now),
        )

    def _adapter_routes(
        self, model: str, replicas: Sequence[ReplicaRecord], now: float
    ) -> tuple[AdapterRoute, ...]:
        stay, leave = self.adapters.of(model), self.adapters.leaving(model, now)
        return tuple(
            AdapterRoute(
                adapter=one,
                replicas=tuple(each.id for each in replicas if _has(each, one)),
                leaves=leaves,
            )
            for some, leaves in ((stay, False), (leave, True))
            for one in some
        )

    def _on(self, device: str) -> str:
        return next((each.on for each in self.devices if each.name == device), LOCAL_NODE)

    def engines(self, now: float) -> ServedEngines:
        """For the batch lane."""
        return ServedEngines(
            models={
                name: engines
                for model in self.registry.snapshot(now).models
                for name, engines in self._engines(model, now).items()
            },
            aliases=self.aliases.all,
        )

    def _engines(self, model: FleetModel, now: float) -> dict[str, ServedModel]:
        """Those of a model, and of its adapters those that have each; by what clients ask for."""
        record, stays = model.record, model.record.unload_deadline is None
        engines = {
            each.id: _next_stats(record, each, now)
            for each in model.replicas
            if stays and each.heartbeat.answers
        }
        served = ServedModel(
            max_model_len=model.max_model_len,
            engines=engines,
            predictor=record.model.predictor,
            on_demand=record.on_demand and stays,
        )
        found = {model.name: served}
        for one in self.adapters.of(model.name):
            having = {each.id for each in model.replicas if _has(each, one)}
            some = {id_: stats for id_, stats in engines.items() if id_ in having}
            found[one.name] = served.model_copy(update={"predictor": None, "engines": some})
        return found

    def models(self, now: float) -> tuple[ModelState, ...]:
        """For operators."""
        return tuple(self._model(model, now) for model in self.registry.snapshot(now).models)

    def _model(self, seen: FleetModel, now: float) -> ModelState:
        record, model, front_end = seen.record, seen.record.model, seen.front_end
        status, message = _status(seen, now)
        return ModelState(
            name=model.name,
            source=model.source,
            status=status,
            message=message,
            target_replicas=record.target_replicas,
            scaling=_scaling(record),
            router=model.router.policy,
            max_model_len=seen.max_model_len,
            devices=record.devices,
            placement=record.berth.why if record.berth is not None else "",
            parsers=front_end.parsers if front_end is not None else None,
            replicas=tuple(
                ReplicaState(
                    id=each.id,
                    device=each.device,
                    node=self._on(each.device),
                    stages=each.heartbeat.stages,
                    address=each.heartbeat.address,
                    pid=each.heartbeat.pid,
                    engine_pid=each.heartbeat.engine_pid,
                    draining=each.stops,
                    message=each.heartbeat.ends or each.heartbeat.problem,
                    asleep=each.asleep,
                    role=record.role(each.heartbeat),
                    in_flight=each.heartbeat.in_flight,
                    load=each.load,
                    borrowing=each.heartbeat.borrowing,
                )
                for each in sorted(seen.replicas, key=lambda r: r.device)
            ),
            adapters=self.adapter_states(model.name, now),
        )

    def adapter_states(self, model: str, now: float) -> tuple[AdapterState, ...]:
        """For operators: a model's adapters, and those of its configuration that it did not get."""
        live = self.registry.live(model, now)
        states = [
            AdapterState(
                name=one.name,
                source=one.source,
                rank=one.rank,
                digest=one.digest,
                replicas=tuple(each.id for each in live if _has(each, one)),
                message="; ".join(sorted({p for each in live if (p := _problem(each, one))})),
            )
            for one in self.adapters.of(model)
        ]
        states += [
            AdapterState(name=name, source=source, message=why)
            for name, (source, why) in sorted(self.adapters.problems(model).items())
        ]
        return tuple(states)

    def used_devices(self, now: float) -> tuple[DeviceState, ...]:
        """For operators: each device with the models that use it."""
        on_device: dict[str, set[str]] = {device.name: set() for device in self.devices}
        for replica in self.registry.snapshot(now).replicas:
            for used in replica.shares:
                on_device[used].add(replica.model.name)
        return tuple(
            DeviceState(
                name=device.name,
                kind=device.kind,
                node=device.on,
                place=place(device),
                models=tuple(sorted(on_device[device.name])),
                memory=device.memory,
            )
            for device in self.devices
        )


def _status(model: FleetModel, now: float) -> tuple[ModelStatus, str]:
    """With the reason, for a person."""
    record, live = model.record, model.replicas
    awake = sum(not each.asleep and each.heartbeat.answers for each in live)
    if record.unload_deadline is not None:
        return ModelStatus.UNLOADING, "finishes its running requests"
    if record.presence is Presence.UNLOADED and record.failure is None:
        return ModelStatus.UNLOADED, _until_asked("a request loads it", record)
    if record.presence is Presence.ASLEEP and live:
        return ModelStatus.ASLEEP, _until_asked("a request wakes it", record)
    if awake >= record.target_replicas:
        return ModelStatus.READY, ""
    if awake:
        return ModelStatus.DEGRADED, f"{awake} of {record.target_replicas} replicas answer"
    if record.failure is not None:
        return ModelStatus.FAILED, record.failure
    if any(not each.heartbeat.answers for each in live):
        return ModelStatus.LOADING, "its engine has started, and gives its first answer"
    if live:
        return ModelStatus.WAKING, "its engine takes its memory again"
    if model.silent:
        silence_s = now - max(replica.seen_at for replica in model.silent)
        return ModelStatus.LOADING, (
            f"nothing was heard of its replicas for {silence_s:.0f} s: they stall, or start "
            "anew; requests wait for them"
        )
    return ModelStatus.LOADING, "its engine is starting"


def _next_stats(record: ModelRecord, replica: ReplicaRecord, now: float) -> RoutingStats:
    """What a replica has to do, as it will tell with its next heartbeat."""
    role = record.role(replica.heartbeat)
    update = {"role": role, "draining": replica.stops, "told_at": now}
    return replica.heartbeat.stats.model_copy(update=update)


def _until_asked(how: str, record: ModelRecord) -> str:
    return f"{record.why}; {how}" if record.why else how


def _has(replica: ReplicaRecord, adapter: Adapter) -> bool:
    return any(each.id == adapter.id and not each.problem for each in replica.heartbeat.adapters)


def _problem(replica: ReplicaRecord, adapter: Adapter) -> str:
    """Why a replica has not got an adapter; empty: it has, or has not tried."""
    reports = replica.heartbeat.adapters
    return next((each.problem for each in reports if each.id == adapter.id), "")


def _scaling(record: ModelRecord) -> ScalingState | None:
    rules = record.model.scaling
    if rules is None:
        return None
    return ScalingState(min=rules.min, max=rules.max, fixed=record.fixed, why=record.scaling)


def _replica_route(replica: ReplicaRecord, node: str) -> ReplicaRoute:
    return ReplicaRoute(
        id=replica.id,
        device=replica.device,
        address=replica.heartbeat.address,
        engine=replica.heartbeat.engine,
        node=node,
        draining=replica.stops,
        answers=replica.heartbeat.answers,
    )
