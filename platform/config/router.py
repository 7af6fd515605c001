"""The section ``models[].router``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from loomserve.platform.config.base import Section
from loomserve.platform.config.policies import PolicyRegistry

ROUTING_POLICIES = PolicyRegistry(
    "routing policy",
    "loomserve.routing_policies",
    "loomserve.routers.policy:RoutingPolicy",
    {
        "load_aware": "loomserve.routers.policies.load_aware:LoadAware",
        "round_robin": "loomserve.routers.policies.round_robin:RoundRobin",
        "power_of_two": "loomserve.routers.policies.power_of_two:PowerOfTwo",
        "prefix_aware": "loomserve.routers.policies.prefix_aware:PrefixAware",
    },
)


class Router(Section):
    """How requests are spread over the replicas of a model."""

    policy: Annotated[str, ROUTING_POLICIES] = Field(
        "prefix_aware",
        description="prefix_aware: measured loads, and where the prompt's beginning was sent "
        "before; load_aware: BanaServe's algorithm 4-2 on loads alone.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Those of a policy that a package brings."
    )
    load_limit: float = Field(
        1.6,
        gt=0,
        le=2,
        description="δ_L: a replica whose utilisation (0 to 2) is below this takes the request.",
    )
    stale_after_s: float = Field(
        10.0, gt=0, description="A load report older than this counts as unknown."
    )

    @model_validator(mode="after")
    def _policy_takes_the_options(self) -> Router:
        ROUTING_POLICIES.check(self.policy, self.options, "options")
        return self
