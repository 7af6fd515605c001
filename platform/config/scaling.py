"""The section ``models[].replicas`` of a model that is scaled by its load."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from loomserve.platform.config.base import FieldError, Section


class Scaling(Section):
    """How many replicas there may be, and when there are more or fewer."""

    min: int = Field(
        1,
        ge=0,
        description="The fewest replicas; 0: none while nobody asks for it, and the first request "
        "has one come; 1 or more: idle.unload_after_s has no say.",
    )
    max: int = Field(ge=1, description="The most replicas, one a device.")
    target_ongoing_requests: float | None = Field(
        None,
        gt=0,
        description="Requests, running or waiting, that a replica is to have at most; null: as "
        "many as its engine runs at once (engine.max_num_seqs), or as its KV memory holds.",
    )
    ttft_slo_ms: float | None = Field(
        None,
        gt=0,
        description="Milliseconds that a request may wait for its first token; null: no bound.",
    )
    tpot_slo_ms: float | None = Field(
        None,
        gt=0,
        description="Milliseconds that a token of an answer may take after the one before; null: "
        "no bound.",
    )
    upscale_delay_s: float = Field(
        2.0, ge=0, description="Seconds for which more must be wanted before one is started."
    )
    downscale_delay_s: float = Field(
        60.0,
        gt=0,
        description="Seconds for which fewer must suffice before one is ended, and the time that "
        "one takes to start at least; with min: 0 and without idle, seconds without a request "
        "before the last one is ended.",
    )

    @model_validator(mode="after")
    def _min_is_not_above_max(self) -> Scaling:
        if self.min > self.max:
            raise FieldError(f"is {self.min}, and max is {self.max}: make max at least min", "min")
        return self

    @property
    def least(self) -> int:
        """The fewest replicas of a model that is there at all."""
        return max(self.min, 1)


def _branch(value: Any) -> str:
    return "scaling" if isinstance(value, dict | Scaling) else "count"


Replicas = Annotated[
    Annotated[int | Literal["auto"], Tag("count")] | Annotated[Scaling, Tag("scaling")],
    Discriminator(_branch),
]
"""A number, one a device as far as memory allows, or bounds between which load decides."""
