"""The nodes of a platform: which are up, which operators drain, and which gateways they have."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

from loomserve.platform.access.policy.bank import LimitAnswer, LimitReport
from loomserve.platform.base.errors import Conflict, NotFound
from loomserve.platform.config import LOCAL_NODE
from loomserve.platform.fleet.registry import Registry
from loomserve.platform.fleet.snapshot import ReplicaRecord
from loomserve.platform.state import NodeState, NodeStatus

GATEWAY_EXPIRES_S = 10.0


@dataclass(frozen=True, slots=True)
class GatewayHeartbeat:
    """State of a gateway, which it sends to the controller every second; of a cluster only."""

    address: str
    """Where other gateways ask it for its metrics."""
    open: int
    """Sequences that it has open."""
    limits: LimitReport


@dataclass(frozen=True, slots=True)
class GatewayOrders:
    """The answer: what the gateway may use, and who else there is."""

    limits: LimitAnswer
    others: Mapping[str, str]
    """The nodes of the other gateways, by their addresses."""
    generation: int = 0
    """The controller's."""


@dataclass(frozen=True, slots=True)
class _Gateway:
    heartbeat: GatewayHeartbeat
    seen_at: float

    @property
    def node(self) -> str:
        return self.heartbeat.limits.node


@dataclass
class FleetNodes:
    """What is known of nodes; times are seconds of the fleet's clock."""

    registry: Registry
    on: Mapping[str, str]
    """The node of each device."""
    up: frozenset[str]
    """Nodes that are up, whether or not they are drained."""
    drained: dict[str, float] = field(default_factory=dict)
    """Nodes that operators drain, and since when."""
    leaving: frozenset[str] = frozenset()
    """Nodes that Ray is about to leave; each comes back as another of Ray's nodes, if at all."""
    left: set[str] = field(default_factory=set)
    """Drained nodes that Ray has been told to leave, and may have left."""
    state_node: str = LOCAL_NODE
    """That which has what there is but once."""
    _gateways: dict[str, _Gateway] = field(default_factory=dict)

    def take(self, heartbeat: GatewayHeartbeat, now: float) -> Mapping[str, str]:
        """Record a gateway's heartbeat; returns the nodes of the others, by their addresses."""
        self._gateways[heartbeat.limits.gateway] = _Gateway(heartbeat, now)
        self._gateways = {
            id_: each
            for id_, each in self._gateways.items()
            if now - each.seen_at < GATEWAY_EXPIRES_S
        }
        return {
            each.heartbeat.address: each.node
            for id_, each in self._gateways.items()
            if id_ != heartbeat.limits.gateway
        }

    def gateway_ended(self, gateway: str) -> None:
        self._gateways.pop(gateway, None)

    @property
    def usable(self) -> frozenset[str]:
        """Nodes on which something may be started."""
        return self.up - self.emptied

    @property
    def emptied(self) -> frozenset[str]:
        """Nodes that are to have nothing."""
        return self.leaving | self.drained.keys()

    def follow(self, up: frozenset[str], leaving: frozenset[str]) -> None:
        """Take over which nodes Ray knows to be up, and which of them it is about to leave."""
        self.up, self.leaving = up, leaving
        self.left &= self.emptied
        self._drain_devices()

    def leave(self, name: str) -> None:
        """Note that Ray is told to leave a drained node, for which nothing is taken back."""
        self.left.add(name)
        self.leaving |= {name}

    def node_of(self, replica: ReplicaRecord) -> str:
        return self.on.get(replica.device, LOCAL_NODE)

    def drain(self, name: str, now: float) -> None:
        """Have a node's requests go on elsewhere, and start nothing on it any more. Raises NotFound
        if there is no such node; Conflict if what is on it has no other place."""
        self._check_known(name)
        if name in self.drained:
            return
        others = self.usable - {name}
        if not others:
            raise Conflict(f"node {name!r} is the only one that is up: nothing has another place")
        if name == self.state_node:
            raise Conflict(
                f"node {name!r} has what there is but once, the controller, plans and batches: "
                "start the platform on another node to take it away"
            )
        stuck = sorted(self._without_place(name, others, now))
        if stuck:
            raise Conflict(
                f"{', '.join(map(repr, stuck))} would have no replica: give "
                f"{'it' if len(stuck) == 1 else 'them'} a device on another node that is up, "
                "or unload first"
            )
        self.drained[name] = now
        self._drain_devices()

    def undrain(self, name: str) -> None:
        """Give a node work again, once it is back where Ray has been told to leave it. Raises
        NotFound if there is no such node."""
        self._check_known(name)
        self.drained.pop(name, None)
        self._drain_devices()

    def restore(self, drained: Collection[str], left: Collection[str]) -> None:
        """Take over what was drained of an earlier controller, however long ago, and left."""
        self.drained.update(dict.fromkeys(drained, 0.0))
        self.left.update(left)
        self._drain_devices()

    def is_empty(self, name: str, now: float) -> bool:
        """Whether nothing of the platform computes or is open on a node."""
        replicas = any(self.node_of(each) == name for each in self.registry.snapshot(now).replicas)
        open_ = sum(each.heartbeat.open for each in self._live(now) if each.node == name)
        return not replicas and not open_

    def state(self, now: float) -> tuple[NodeState, ...]:
        replicas = [self.node_of(each) for each in self.registry.snapshot(now).replicas]
        gateways = [each.node for each in self._live(now)]
        return tuple(
            NodeState(
                name=name,
                status=self._status(name, now),
                gateways=gateways.count(name),
                replicas=replicas.count(name),
            )
            for name in sorted(self._names)
        )

    def _drain_devices(self) -> None:
        devices = {device for device, node in self.on.items() if node in self.emptied}
        self.registry.drains.devices = frozenset(devices)

    def _status(self, name: str, now: float) -> NodeStatus:
        if name in self.emptied:
            stays = name in self.up and name not in self.left - self.leaving
            done = not stays and self.is_empty(name, now)
            return NodeStatus.DRAINED if done else NodeStatus.DRAINING
        return NodeStatus.UP if name in self.up else NodeStatus.DOWN

    @property
    def _names(self) -> frozenset[str]:
        return self.up | self.drained.keys() | set(self.on.values())

    def _check_known(self, name: str) -> None:
        if name not in self._names:
            known = ", ".join(sorted(self._names))
            raise NotFound(f"there is no node {name!r}; the nodes are: {known}")

    def _without_place(self, name: str, others: Collection[str], now: float) -> set[str]:
        return {
            each.model.name
            for each in self.registry.snapshot(now).replicas
            if self.node_of(each) == name
            and not any(self.on.get(device) in others for device in each.model.devices)
        }

    def _live(self, now: float) -> list[_Gateway]:
        live = self._gateways.values()
        return [each for each in live if now - each.seen_at < GATEWAY_EXPIRES_S]


def places(
    devices: Sequence[str], target: int, there: Sequence[str], up: Container[str]
) -> tuple[str, ...]:
    """The devices that are to have a replica.

    Replicas stay where they are, as long as that node is up; of too many the newest end. One whose
    node is down is given another device, if there is one, and else comes back with its node.
    ``there``: devices that have one, the oldest replica first; ``up``: devices whose nodes are up.
    """
    stay = [name for name in there if name in up and name in devices]
    free = [name for name in devices if name in up and name not in there]
    down = [name for name in devices if name not in up]
    chosen = {*[*stay, *free, *down][:target]}
    return tuple(name for name in devices if name in chosen)
