"""The section ``models[].pipeline``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from loomserve.platform.config.base import Section


class Pipeline(Section):
    """One replica over all of the model's devices: consecutive layers on each (HELR)."""

    mode: Literal["he", "lr", "balanced"] = Field(
        "balanced",
        description="What the division into stages is for. balanced: throughput; lr: the latency "
        "of a lone request; he: the fewest devices.",
    )
    layers: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        description="How many layers each of the model's devices has, in their order; none given: "
        "HELR says, from what loomserve profile devices has measured.",
    )
    batch: int = Field(8, ge=1, description="Requests of a step that HELR plans for.")
    profile: str | None = Field(
        None,
        description="What loomserve profile devices wrote, relative to this file; null: devices in "
        "the user's cache folder.",
    )
