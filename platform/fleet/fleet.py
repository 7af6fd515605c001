"""The fleet: plain state without Ray; the controller's actor feeds it and asks it."""

from __future__ import annotations

from collections.abc import Sequence

from loomserve.platform.adapters.table import AdapterTable
from loomserve.platform.aliases.table import AliasTable
from loomserve.platform.config import Alias, Device
from loomserve.platform.fleet.loans import FleetLoans
from loomserve.platform.fleet.messages import DesiredState, Heartbeat, MoveOrder
from loomserve.platform.fleet.nodes import FleetNodes
from loomserve.platform.fleet.rates import Rates, sums_of
from loomserve.platform.fleet.registry import Registry
from loomserve.platform.fleet.snapshot import ReplicaRecord
from loomserve.platform.fleet.views import FleetViews
from loomserve.platform.fleet.wishes import Wishes
from loomserve.platform.state import Presence


class Fleet:
    """Answers heartbeats with the state desired of a replica. Times are monotonic seconds of the
    caller's one clock.

    Attributes:
        orders: Which requests are to go on elsewhere, by the id of their replica.
        gives_back: Why replicas are to end and give their memory back, by their ids.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        drain_timeout_s: float,
        aliases: AliasTable | None = None,
        rates: Rates | None = None,
    ) -> None:
        """``drain_timeout_s``: how long a replica that is stopped waits for its requests."""
        self.registry = Registry(rates=rates or Rates())
        self.aliases = aliases or AliasTable({})
        self.adapters = AdapterTable(drain_timeout_s)
        self.loans = FleetLoans(self.registry)
        on = {each.name: each.on for each in devices}
        self.nodes = FleetNodes(self.registry, on, up=frozenset(on.values()))
        self.views = FleetViews(self.registry, devices, self.aliases, self.adapters)
        self.orders: dict[str, MoveOrder] = {}
        self.gives_back: dict[str, str] = {}
        self._drain_timeout_s = drain_timeout_s

    def report(self, heartbeat: Heartbeat, now: float) -> DesiredState:
        """Take in a replica's heartbeat, and say what the replica should be. Its times are of the
        replica's clock; all that is kept is of the caller's."""
        # The moments of two measurements are told apart best by the clock that both are of.
        sums, heartbeat = sums_of(heartbeat), heartbeat.received(now)
        if heartbeat.model.name not in self.registry:
            why = "its model has been unloaded"
            role = heartbeat.stats.role
            return DesiredState(draining=True, gives_back=why, stop_timeout_s=0.0, role=role)
        if sums is not None:
            self.registry.rates.take(heartbeat.replica_id, *sums)
        before = self.registry.find(heartbeat.replica_id)
        self.loans.observe(before.heartbeat if before else None, heartbeat)
        return self._desired_state(self.registry.take(heartbeat, now), now)

    def _desired_state(self, replica: ReplicaRecord, now: float) -> DesiredState:
        record = self.registry.record(replica.model.name)
        deadline = record.unload_deadline
        return DesiredState(
            draining=(
                replica.draining or deadline is not None or record.presence is Presence.UNLOADED
            ),
            gives_back=self.gives_back.get(replica.id, ""),
            stop_timeout_s=self._drain_timeout_s if deadline is None else max(0.0, deadline - now),
            role=record.role(replica.heartbeat),
            lenders=tuple(self.loans.lenders(replica, now)),
            lenders_off=self.loans.lenders_off(replica),
            lender_limits=self.loans.limits(replica.id),
            shards=self.loans.shards(replica.id),
            drain_loans=self.loans.draining(replica),
            move=self.orders.get(replica.id),
            adapters=self.adapters.wanted(replica.model.name, now),
            loans=self.loans.borrowed_from(replica, now),
        )

    def set_alias(self, name: str, alias: Alias | None) -> None:
        """Change what an alias stands for; None: it is deleted. Raises RequestError if it cannot
        be, as of :class:`AliasTable`."""
        if alias is None:
            self.aliases.delete(name)
        else:
            models = [model.name for model in self.registry.models]
            self.aliases.put(name, alias, [*models, *self.adapters.names])

    def wishes(self) -> Wishes:
        return Wishes(
            models=self.registry.wishes(),
            drained=tuple(sorted(self.registry.drains.replicas)),
            leaving=tuple(sorted(self.registry.drains.leaving)),
            ending=tuple(sorted(self.registry.drains.ending)),
            drained_nodes=tuple(sorted(self.nodes.drained)),
            left_nodes=tuple(sorted(self.nodes.left & self.nodes.drained.keys())),
            pairs_off=tuple(sorted(self.loans.desired.pairs_off)),
            draining_loans=tuple(sorted(self.loans.desired.draining)),
            aliases=self.aliases.all,
            adapters=self.adapters.wishes,
            last_adapter=self.adapters.last_id,
        )

    def restore(self, wishes: Wishes) -> None:
        """Take over what was wished of an earlier controller of this run."""
        self.registry.restore(wishes.models, wishes.drained)
        self.registry.drains.leaving |= set(wishes.leaving)
        self.registry.drains.ending |= set(wishes.ending)
        self.nodes.restore(wishes.drained_nodes, wishes.left_nodes)
        if wishes.aliases is not None:
            self.aliases.restore(wishes.aliases)
        self.adapters.restore(wishes.adapters, wishes.last_adapter)
        self.loans.desired.pairs_off |= set(wishes.pairs_off)
        self.loans.desired.draining |= set(wishes.draining_loans)
