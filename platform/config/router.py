"""The section ``models[].router``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from loomserve.platform.config.base import Section

RoutingPolicy = Literal["load_aware", "round_robin", "power_of_two", "prefix_aware"]


class Router(Section):
    """How requests are spread over the replicas of a model."""

    policy: RoutingPolicy = Field(
        "load_aware",
        description="load_aware: BanaServe's algorithm 4-2 on measured loads; prefix_aware: loads, "
        "and where the prompt's beginning was sent before.",
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
