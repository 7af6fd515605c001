"""What an engine is told of lending: one dictionary in vLLM's ``additional_config``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

LENDING_CONFIG = "loomserve_lending"
"""The key of ``additional_config`` under which an engine finds its :class:`LendingOptions`."""

ShardSpec = dict[str, Any]
"""What of all of an engine's requests a lender computes: ``{"heads": 1}``, so many KV heads of each
layer, the last ones; or ``{"layers": [10, 20]}``, these decoder layers but for the last named."""


class LendingOptions(BaseModel):
    """Of one engine; all bytes are of its own KV."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    borrow_bytes: int = Field(0, ge=0, description="The most that it may hold with lenders.")
    lenders: int = Field(1, ge=1, description="The most lenders at a time.")
    placement: Literal["adaptive", "ratio", "local"] = "adaptive"
    lent_share: float = Field(0.5, ge=0, le=1, description="Of requests, with placement: ratio.")
    patience_ms: float = Field(
        100, gt=0, description="A lender that takes longer for a layer is given up."
    )
    move: bool = Field(
        True,
        description="Whether running requests move to another partition, their KV copied, where "
        "they would be preempted else.",
    )
    lend_bytes: int = Field(0, ge=0, description="The most that it lends to others.")
    tpot_budget: float = Field(
        1.15,
        gt=1,
        description="The p99 of a lender's steps may be so many times that without borrowers.",
    )
    polling: Literal["steps", "operators", "slices"] = Field(
        "slices",
        description="Where a lender looks for tasks while it computes: nowhere within a step, "
        "between operators, or between slices of those that take long, too.",
    )
