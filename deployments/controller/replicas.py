"""Has Serve run the replicas that are wished, each on its device."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection

from loomserve.deployments.controller.serve_apps import ServeApps
from loomserve.platform.config import Device, Model
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.messages import EngineSpec, devices_with_replicas
from loomserve.platform.fleet.nodes import places
from loomserve.platform.fleet.snapshot import ModelRecord, ReplicaRecord
from loomserve.platform.state import Presence

_DELETING = "DELETING"


class ModelReplicas:
    """Compares what Serve has of a model with what is wished, and has it do what is missing."""

    def __init__(
        self,
        fleet: Fleet,
        apps: ServeApps,
        spec_of: Callable[[Model], EngineSpec],
        device: Callable[[str], Device],
        base: str,
        clock: Callable[[], float],
    ) -> None:
        """``base``: folder to which the configuration's paths are relative."""
        self._fleet, self._apps = fleet, apps
        self._spec_of, self._device = spec_of, device
        self._base = base
        self._clock = clock
        self._down: frozenset[str] = frozenset()
        self._drained: frozenset[str] = frozenset()
        self._busy: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def set_nodes(self, down: frozenset[str], drained: frozenset[str]) -> bool:
        """Set which nodes are down or drained; returns whether that is new."""
        changed = (down, drained) != (self._down, self._drained)
        self._down, self._drained = down, drained
        return changed

    async def settle(self, name: str) -> None:
        """Start and end replicas of a model until they are as desired; raises Serve's errors."""
        async with self._busy[name]:
            target = self._fleet.registry.targets().get(name)
            if target is None:
                return  # it was unloaded meanwhile
            record = self._fleet.registry.record(name)
            model = record.model
            there = devices_with_replicas(name, await self._apps.statuses())
            leaving = {device for device, app in there.items() if app.status == _DELETING}
            if leaving:
                # An earlier controller has begun it; until it is done none can come there.
                await self._apps.delete(name, leaving)
                there = {device: app for device, app in there.items() if device not in leaving}
            live = self._live(record)
            asleep = {
                device
                for device, each in live.items()
                if each.asleep and record.presence is Presence.ASLEEP
            }
            wanted = self._wanted(record, target, there.keys() | asleep)
            # The engine of one that sleeps stays without a replica of Serve's.
            missing = tuple(device for device in wanted if device not in there.keys() | asleep)
            if missing:
                handed = await self._apps.deploy(self._spec_of(model), missing, self._base)
                self._fleet.registry.set_failure(name, handed.problem)
                if handed.problem is not None:
                    return
                self._fleet.registry.set_front_end(name, handed.front_end)
            alone = {device for device, each in live.items() if not each.heartbeat.held}
            if unwanted := (there.keys() | alone) - set(wanted):
                await self._apps.delete(name, unwanted)
            if sleeping := there.keys() & asleep & set(wanted):
                await self._apps.release(name, sleeping)

    async def end(self, name: str) -> None:
        """End all replicas of a model; raises Serve's errors."""
        async with self._busy[name]:
            record = self._fleet.registry.record(name)
            there = devices_with_replicas(name, await self._apps.statuses())
            await self._apps.delete(name, there.keys() | self._live(record).keys())

    def _live(self, record: ModelRecord) -> dict[str, ReplicaRecord]:
        """Live replicas by the device that each stands at; of a pipeline its first one."""
        live = self._fleet.registry.live(record.model.name, self._clock())
        first = None if record.model.pipeline is None else record.model.devices[0]
        return {first or each.device: each for each in live}

    def _wanted(self, record: ModelRecord, target: int, there: Collection[str]) -> tuple[str, ...]:
        model = record.model
        if not target:
            return ()
        if model.pipeline is not None:
            # Its first device stands for all.
            return model.devices[:1]
        devices = [name for name in record.devices if self._device(name).on not in self._drained]
        up = {name for name in devices if self._device(name).on not in self._down}
        registry = self._fleet.registry
        live = registry.live(model.name, self._clock())
        began = {
            replica.device: replica.heartbeat.footprint.ready_at
            for replica in live
            if replica.heartbeat.footprint is not None
        }
        gone = registry.drains.leaving | registry.drains.ending
        going = {each.device for each in live if each.id in gone}
        oldest_first = sorted(
            there, key=lambda name: (name in going, began.get(name, float("inf")), name)
        )
        return places(devices, target, oldest_first, up)
