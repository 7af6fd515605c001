"""What the admin API calls of the controller: rebalancing and its plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import TypeVar

from loomserve.platform.base.reply import replies
from loomserve.platform.rebalancing.plans.plans import Plan
from loomserve.platform.rebalancing.plans.reports import (
    Events,
    MadePlan,
    Mode,
    PlanList,
    RebalancingState,
)
from loomserve.platform.rebalancing.policy.actions import Action
from loomserve.platform.rebalancing.runner import RebalancingRunner

T = TypeVar("T")


class PlanMethods(ABC):
    """Those of the controller that its rebalancing answers."""

    _rebalancing: RebalancingRunner

    @abstractmethod
    async def _published(self, work: Awaitable[T]) -> T:
        """The result of ``work``, which is kept, and of which gateways are told first."""

    @replies
    async def rebalancing_state(self) -> RebalancingState:
        return self._rebalancing.rebalancer.state()

    @replies
    async def switch_rebalancing(self, mode: Mode | None, paused: bool | None) -> RebalancingState:
        return await self._published(self._rebalancing.rebalancer.switch(mode, paused))

    @replies
    async def rebalancing_events(self, limit: int) -> Events:
        return Events(events=tuple(await self._rebalancing.rebalancer.events(limit)))

    @replies
    async def plans(self) -> PlanList:
        found = {"plans": self._rebalancing.rebalancer.plans()}
        return PlanList.model_validate(found, from_attributes=True)

    @replies
    async def make_plan(self, actions: tuple[Action, ...], forced: bool) -> MadePlan:
        return await self._published(self._rebalancing.rebalancer.make(actions, forced=forced))

    @replies
    async def plan(self, plan_id: str) -> Plan:
        return self._rebalancing.rebalancer.plan(plan_id)

    @replies
    async def apply_plan(self, plan_id: str) -> Plan:
        return await self._published(self._rebalancing.rebalancer.apply(plan_id))

    @replies
    async def abort_plan(self, plan_id: str) -> Plan:
        return await self._published(self._rebalancing.rebalancer.abort(plan_id))
