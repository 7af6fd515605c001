"""What a model takes of a device's memory: estimated, until it has been measured."""

from __future__ import annotations

from collections.abc import Collection

from loomserve.platform.config import Model
from loomserve.platform.devices.memory import GPU_ENGINE_BYTES, is_on_gpus, replica_bytes
from loomserve.platform.fleet.snapshot import FleetModel
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
