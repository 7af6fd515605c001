"""Runs the rebalancing controller in the platform controller's actor, beside the fleet.

Requests do not wait for it, and an actor that is restarted goes on where this one was.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, Protocol

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.base.periodic import every, steady_unix_clock
from loomserve.platform.config import Config
from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.placement import device_profile
from loomserve.platform.placement.configured import profile_path
from loomserve.platform.placement.policy.device_times import DeviceProfile
from loomserve.platform.rebalancing.actuators.base import Actuator
from loomserve.platform.rebalancing.actuators.replicas import (
    ReplicasActuator,
    RequestsActuator,
    RoleActuator,
    RunningActuator,
)
from loomserve.platform.rebalancing.actuators.shards import ShardActuator
from loomserve.platform.rebalancing.controller import Rebalancer
from loomserve.platform.rebalancing.observe import measured
from loomserve.platform.rebalancing.plans.store import PlanStore, plans_folder
from loomserve.platform.rebalancing.policy.actions import ActionKind
from loomserve.platform.rebalancing.policy.measured import Measured
from loomserve.platform.rebalancing.scaler import RoomFor, Scaler
from loomserve.platform.state.roles import Role

_log = logging.getLogger("ray.serve")

_TICK_S = 1.0
_LEAST_WINDOW_S = 4.0
"""A rate needs two heartbeats."""


class ReplicaControl(Protocol):
    """What Serve has to do for models' replicas."""

    async def set_role(self, replica_id: str, role: Role) -> None:
        """Change what is sent to a replica."""
        ...

    async def scale(self, name: str, replicas: int | None) -> None:
        """Change the number of a model's replicas, whatever its load; None: as it asks for."""
        ...

    def set_replicas(self, name: str, replicas: int) -> None:
        """Change the number of a model's replicas, as its load asks for."""
        ...


class RebalancingRunner:
    """Connects the rebalancing controller with the fleet."""

    def __init__(
        self, config: Config, base: Path, fleet: Fleet, replicas: ReplicaControl, room_for: RoomFor
    ) -> None:
        """``replicas`` does what Serve has to do; ``room_for`` makes room on devices."""
        options = config.rebalancing
        self._clock = steady_unix_clock()
        self._fleet, self._devices = fleet, config.devices
        written = options.profile
        self._profile = _ProfileFile(base / written if written else profile_path(config, base))
        shards = ShardActuator(fleet)
        actuators: dict[ActionKind, Actuator[Any]] = {
            ActionKind.REQUESTS: RequestsActuator(fleet),
            ActionKind.HEADS: shards,
            ActionKind.LAYERS: shards,
            ActionKind.RUNNING: RunningActuator(fleet),
            ActionKind.ROLE: RoleActuator(fleet, replicas.set_role),
            ActionKind.REPLICAS: ReplicasActuator(fleet, replicas.scale),
        }
        self.rebalancer = Rebalancer(
            options,
            PlanStore(plans_folder(config, base)),
            self._observe,
            actuators,
            self._clock,
            Scaler(fleet, replicas.set_replicas, room_for, options),
        )

    async def run(self) -> None:
        """Tick until the process ends, which gives the store's lock back."""
        await every(
            _TICK_S,
            self.rebalancer.tick,
            failed=lambda error: _log.error("rebalancing could not get on", exc_info=error),
        )

    def _observe(self, changed_at_s: float) -> Measured:
        at_s, monotonic_s = self._clock(), time.monotonic()
        registry = self._fleet.registry
        registry.rates.keep(each.id for each in registry.snapshot(monotonic_s).replicas)
        return measured(
            self._fleet,
            self._devices,
            self._profile.read(),
            at_s=at_s,
            monotonic_s=monotonic_s,
            changed_at_s=changed_at_s,
        )


def rates_window_s(options: Rebalancing) -> float:
    """Seconds over which rates are taken: no longer than loads settle after an action."""
    return max(min(options.period_s, options.settle_s), _LEAST_WINDOW_S)


class _ProfileFile:
    """The file of measured devices, read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_at: int | None = None
        self._profile: DeviceProfile | None = None

    def read(self) -> DeviceProfile | None:
        """The profile; None: the file is not there, or damaged."""
        try:
            changed = self._path.stat().st_mtime_ns
            if changed != self._read_at:
                self._profile = device_profile.load(self._path)
                self._read_at = changed
        except (OSError, ConfigError):
            self._profile = self._read_at = None
        return self._profile
