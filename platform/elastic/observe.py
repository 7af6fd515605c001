"""Makes the snapshot that the coming and going of models is decided on, with what each takes of a
device's memory: estimated, until it has been measured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from loomserve.platform.config import Model
from loomserve.platform.devices.memory import GPU_ENGINE_BYTES, is_on_gpus, replica_bytes
from loomserve.platform.elastic.policy.snapshot import ElasticModel, ElasticSnapshot, ModelDemand
from loomserve.platform.elastic.policy.uses import BusyShares, ReturnTimes
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.snapshot import FleetModel, ModelRecord
from loomserve.platform.state import Presence

# So long after a model is to sleep, it does.
_FALLEN_S = 3.0


class ModelSizes:
    """Sizes of models' replicas, in bytes of one device each."""

    def __init__(self, gpus: Collection[str] = ()) -> None:
        self._gpus = gpus
        self._weights: dict[str, int] = {}
        self._asleep: dict[str, float] = {}
        self._dropped: dict[str, int] = {}

    def set_weights(self, model: str, size: int) -> None:
        """Set what an engine of a model holds of its weights, in bytes."""
        self._weights[model] = size

    def knows(self, model: str) -> bool:
        return model in self._weights

    def observe(self, model: FleetModel) -> None:
        """Take in what replicas say of their size, and were measured to have in sleep."""
        for each in model.replicas:
            footprint = each.footprint
            if footprint is None:
                continue
            self._dropped[model.name] = footprint.dropped_bytes
            if not each.asleep:
                continue
            # It is measured every few seconds, and may have been just before.
            if footprint.memory_measured_at > model.record.since + _FALLEN_S:
                self._asleep[model.name] = float(footprint.memory_bytes)

    def asleep(self, model: Model) -> float:
        """What a replica that sleeps keeps."""
        return model.largest_share * self._asleep_bytes(model)

    def ready(self, model: Model) -> float:
        """What a replica takes at most."""
        awake = self._left_in_sleep(model) + model.kv_bytes
        return model.largest_share * (self._asleep_bytes(model) + awake)

    def on_host(self, model: Model) -> dict[Presence, float]:
        """What a replica on GPUs takes of the host of each, by what it is; empty: it is on none."""
        if not is_on_gpus(model, self._gpus):
            return {}
        awake = float(GPU_ENGINE_BYTES)
        weights = model.largest_share * self._weights.get(model.name, 0)
        return {Presence.READY: awake, Presence.ASLEEP: awake + weights}

    def _asleep_bytes(self, model: Model) -> float:
        measured = self._asleep.get(model.name)
        if measured is not None:
            return measured
        return self._estimate(model) - self._left_in_sleep(model)

    def _left_in_sleep(self, model: Model) -> float:
        """What of its weights a replica's device is without in its sleep. A GPU's go to the host's
        memory."""
        if is_on_gpus(model, self._gpus):
            return self._weights.get(model.name, 0)
        return self._dropped.get(model.name, 0)

    def _estimate(self, model: Model) -> float:
        """A replica without KV memory, before any has slept."""
        held = self._weights.get(model.name, 0)
        return replica_bytes(model, held, self._gpus) - model.kv_bytes


# Until a model has been seen to come.
_WAKE_S, _LOAD_S = 0.5, 30.0


class ElasticObserver:
    """Follows models' uses, sizes and times to come; times are of the fleet's clock."""

    def __init__(
        self,
        fleet: Fleet,
        budgets: Mapping[str, float],
        wake_s: Mapping[str, float],
        gpus: Collection[str] = (),
    ) -> None:
        """``budgets``: bytes that models may take together, by pool; ``wake_s``: how long models
        took to come back from sleep, kept current by others; ``gpus``: the devices that are
        GPUs."""
        self.sizes, self.returns, self.busy = ModelSizes(gpus), ReturnTimes(), BusyShares()
        self._fleet, self._budgets, self._wake_s = fleet, budgets, wake_s
        self._load_s: dict[str, float] = {}
        self._counted: dict[str, int] = {}
        self._settled_at: dict[str, tuple[float, float]] = {}
        """Since when models were to be as they are, and were first seen to be so."""

    def snapshot(
        self,
        now: float,
        demands: Mapping[str, float],
        moving: Collection[str],
        waiting_at: Mapping[str, str] | None = None,
    ) -> ElasticSnapshot:
        """``demands``: when each model was first asked for, in order; ``moving``: models on their
        way to their presence; ``waiting_at``: devices at which demands wait for others to go."""
        models = [
            self._model(model, now, model.name in moving)
            for model in self._fleet.registry.snapshot(now).models
            if model.record.unload_deadline is None
        ]
        there = waiting_at or {}
        asked = [ModelDemand(name, now - at, there.get(name)) for name, at in demands.items()]
        return ElasticSnapshot(models, asked, self._budgets)

    def _model(self, seen: FleetModel, now: float, moving: bool) -> ElasticModel:
        record, live, name = seen.record, seen.replicas, seen.name
        model = record.model
        self._observe(seen, now)
        rules = model.idle_rules
        ready, asleep = self.sizes.ready(model), self.sizes.asleep(model)
        on_host = self.sizes.on_host(model)
        settled = not moving and seen.settled
        holds = {Presence.READY: ready, Presence.ASLEEP: asleep}.get(record.presence, 0.0)
        held_on_host = on_host.get(record.presence, 0.0)
        if not settled and live:
            # Until it has gone; what has not been heard of is as large as it can be.
            holds = ready if seen.awake else asleep
            holds = ready if record.presence is Presence.READY else holds
            held_on_host = max(on_host.values(), default=0.0)
        lends = any(each.heartbeat.lent for each in live)
        return ElasticModel(
            name=name,
            presence=record.presence,
            settled=settled,
            since_s=now - self._since(record, settled, now),
            idle_s=seen.idle_s(now),
            returns_s=self.returns.mean_s(name),
            devices=seen.devices,
            held_bytes=holds,
            ready_bytes=ready,
            asleep_bytes=asleep,
            host_held_bytes=held_on_host,
            host_bytes=on_host,
            wake_s=self._wake_s.get(name, _WAKE_S),
            load_s=self._load_s.get(name, _LOAD_S),
            # vLLM allocates a GPU's memory so that it can be given back only if it is told to.
            can_sleep=rules is not None or not on_host,
            pinned=model.pinned,
            choices=() if live else self._choices(record),
            heat=self.busy.share(name),
            # What it lends is of use to another; it goes only if its memory is needed.
            sleep_after_s=rules.sleep_after_s if rules and not lends else None,
            unload_after_s=rules.unload_after_s if rules and not lends else None,
        )

    def _since(self, record: ModelRecord, settled: bool, now: float) -> float:
        """When a model became what it is to be, which takes as long as a start; or was to."""
        name = record.model.name
        wished, at = self._settled_at.get(name, (None, now))
        if wished == record.since:
            return at
        if not settled:
            return record.since
        self._settled_at[name] = (record.since, now)
        return now

    def _choices(self, record: ModelRecord) -> tuple[str, ...]:
        """Devices of which an unloaded model gets one, if the platform may choose."""
        if record.berth is None or record.presence is not Presence.UNLOADED:
            return ()
        if record.target_replicas > 1 or record.model.roles or record.model.pipeline:
            return ()
        usable = self._fleet.nodes.usable
        on = self._fleet.nodes.on
        return tuple(name for name in record.devices if on.get(name) in usable)

    def _observe(self, seen: FleetModel, now: float) -> None:
        name = seen.name
        self.busy.observe(name, seen.has_requests, now)
        self.sizes.observe(seen)
        for each in seen.replicas:
            footprint, load = each.footprint, each.load
            if footprint is not None:
                self._load_s[name] = footprint.start_s
            if load is not None:
                self.returns.used(name, load.requests - self._counted.get(each.id, 0), now)
                self._counted[each.id] = load.requests
