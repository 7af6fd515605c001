"""The fleet as gateways, the batch lane and operators see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loomserve.platform.adapters.messages import Adapter, AdapterRoute
from loomserve.platform.adapters.table import AdapterTable
from loomserve.platform.aliases.table import AliasTable
from loomserve.platform.config import LOCAL_NODE, Device
from loomserve.platform.devices.claims import place
from loomserve.platform.fleet.messages import (
    FrontEndSpec,
    ModelEngines,
    ModelRoute,
    ReplicaRoute,
    ServedEngines,
)
from loomserve.platform.fleet.registry import ModelRecord, Registry, ReplicaRecord
from loomserve.platform.state import (
    AdapterState,
    DeviceState,
    ModelState,
    ModelStatus,
    Presence,
    ReplicaState,
    ScalingState,
)


@dataclass(frozen=True)
class FleetViews:
    """Views of a registry; each is made when it is asked for."""

    registry: Registry
    devices: Sequence[Device]
    aliases: AliasTable
    adapters: AdapterTable

    def routes(self, now: float) -> tuple[ModelRoute, ...]:
        """For gateways."""
        return tuple(self._route(record, now) for record in self.registry.records)

    def _route(self, record: ModelRecord, now: float) -> ModelRoute:
        model = record.model
        reachable = self.registry.reachable(model.name, now)
        status, message = self._status(record, now)
        return ModelRoute(
            name=model.name,
            status=status,
            on_demand=record.on_demand,
            problem=message if status is ModelStatus.FAILED else "",
            policy=model.router.policy,
            max_concurrent_requests=model.max_concurrent_requests,
            max_model_len=self.registry.max_model_len(model.name, now),
            kvstore=model.kvstore,
            kv_token_bytes=max(
                (
                    each.heartbeat.footprint.token_bytes
                    for each in reachable
                    if each.heartbeat.footprint
                ),
                default=0.0,
            ),
            predictor=model.lengths.name_for(model.name) if model.lengths else None,
            router=model.router,
            front_end=_front_end(record, reachable),
            replicas=tuple(_replica_route(each, self._on(each.device)) for each in reachable),
            adapters=self._adapter_routes(model.name, reachable, now),
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
                for record in self.registry.records
                for name, engines in self._all_engines(record, now).items()
            },
            aliases=self.aliases.all,
        )

    def _all_engines(self, record: ModelRecord, now: float) -> dict[str, ModelEngines]:
        """Those of a model, and of its adapters those that have each; by what clients ask for."""
        model = self._engines(record, now)
        having = {one.name: one for one in self.adapters.of(record.model.name)}
        return {record.model.name: model} | {
            name: model.model_copy(
                update={
                    "predictor": None,
                    "replicas": tuple(
                        each
                        for each in model.replicas
                        if (replica := self.registry.find(each.id)) and _has(replica, one)
                    ),
                }
            )
            for name, one in having.items()
        }

    def _engines(self, record: ModelRecord, now: float) -> ModelEngines:
        model = record.model
        return ModelEngines(
            max_model_len=self.registry.max_model_len(model.name, now),
            predictor=model.lengths.name_for(model.name) if model.lengths else None,
            replicas=() if record.unload_deadline else self.registry.live_replicas(model.name, now),
            on_demand=record.on_demand and record.unload_deadline is None,
        )

    def models(self, now: float) -> tuple[ModelState, ...]:
        """For operators."""
        return tuple(self._model(record, now) for record in self.registry.records)

    def _model(self, record: ModelRecord, now: float) -> ModelState:
        model = record.model
        status, message = self._status(record, now)
        front_end = _front_end(record, self.registry.reachable(model.name, now))
        return ModelState(
            name=model.name,
            source=model.source,
            status=status,
            message=message,
            target_replicas=record.target_replicas,
            scaling=_scaling(record),
            router=model.router.policy,
            max_model_len=self.registry.max_model_len(model.name, now),
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
                    load=each.heartbeat.stats.load,
                    borrowing=each.heartbeat.borrowing,
                )
                for each in sorted(self.registry.live(model.name, now), key=lambda r: r.device)
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
        for replica in self.registry.all_live(now):
            for used in [stage.device for stage in replica.heartbeat.stages] or [replica.device]:
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

    def _status(self, record: ModelRecord, now: float) -> tuple[ModelStatus, str]:
        """With the reason, for a person."""
        live = self.registry.live(record.model.name, now)
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
        if silent := self.registry.reachable(record.model.name, now):
            silence_s = now - max(replica.seen_at for replica in silent)
            return ModelStatus.LOADING, (
                f"nothing was heard of its replicas for {silence_s:.0f} s: they stall, or start "
                "anew; requests wait for them"
            )
        return ModelStatus.LOADING, "its engine is starting"


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


def _front_end(record: ModelRecord, reachable: Sequence[ReplicaRecord]) -> FrontEndSpec | None:
    """What a model is answered with: as its engines were started, else as the next ones will be. It
    takes seconds to set up, for which no engine should have to wait."""
    return next((each.heartbeat.front_end for each in reachable), record.front_end)


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
