"""The admin API's paths for rebalancing: make, show, apply and abort plans."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field, model_validator

from loomserve.platform.base.reply import Ask
from loomserve.platform.rebalancing.plans.plans import Plan
from loomserve.platform.rebalancing.plans.reports import (
    Events,
    MadePlan,
    Mode,
    PlanList,
    RebalancingState,
)
from loomserve.platform.rebalancing.policy.actions import Action


class PlanRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    actions: tuple[Action, ...] = Field(
        (),
        max_length=100,
        description="Actions to take, in this order; none: the planner finds them.",
    )
    force: bool = Field(
        False,
        description="True: limits of memory, pause and the like may be exceeded, and measurements "
        "be stale. What has no mechanism, or no measured link, cannot be forced.",
    )

    @model_validator(mode="after")
    def _only_actions_are_forced(self) -> PlanRequest:
        if self.force and not self.actions:
            raise ValueError("force is for actions of your own: give some, or leave it out")
        return self


class SwitchRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mode: Mode | None = Field(None, description="off, advise or auto; null: as it is.")
    paused: bool | None = Field(
        None, description="True: begin no action until told otherwise; null: as it is."
    )

    @model_validator(mode="after")
    def _says_something(self) -> SwitchRequest:
        if self.mode is None and self.paused is None:
            raise ValueError("give mode, paused, or both")
        return self


def build_plans_router(ask: Ask) -> APIRouter:
    """The routes under ``/plans`` and ``/rebalancing``."""
    router = APIRouter(tags=["rebalancing"])

    @router.get("/rebalancing", response_model=RebalancingState)
    async def state() -> Any:
        """Loads of devices, the controller's mode, and what keeps it from making plans."""
        return await ask("rebalancing_state")

    @router.put("/rebalancing", response_model=RebalancingState)
    async def switch(request: SwitchRequest) -> Any:
        """Change the controller's mode, or pause its actions; kept until it is changed again."""
        return await ask("switch_rebalancing", request.mode, request.paused)

    @router.get("/rebalancing/events", response_model=Events)
    async def events(
        limit: Annotated[int, Query(ge=1, le=1000, description="Events at most.")] = 100,
    ) -> Any:
        """Events, the newest first, with the devices' loads before and after."""
        return await ask("rebalancing_events", limit)

    @router.get("/plans", response_model=PlanList)
    async def plans() -> Any:
        """The latest plans, the newest first, with predicted and measured gain."""
        return await ask("plans")

    @router.post("/plans", status_code=201, response_model=MadePlan)
    async def make(request: PlanRequest) -> Any:
        """Say what would move, what that gains, costs and halts, and why all else would not.

        Nothing moves before the plan is applied.
        """
        return await ask("make_plan", request.actions, request.force)

    @router.get("/plans/{plan_id}", response_model=Plan)
    async def plan(plan_id: str) -> Any:
        """One plan, step by step."""
        return await ask("plan", plan_id)

    @router.post("/plans/{plan_id}/apply", status_code=202, response_model=Plan)
    async def apply(plan_id: str) -> Any:
        """Carry a proposed plan out; what no longer holds when its turn comes ends it."""
        return await ask("apply_plan", plan_id)

    @router.post("/plans/{plan_id}/abort", status_code=202, response_model=Plan)
    async def abort(plan_id: str) -> Any:
        """Leave what has not begun, and take back what is under way; what was done stands."""
        return await ask("abort_plan", plan_id)

    return router
