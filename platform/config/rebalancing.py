"""The section ``rebalancing``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from loomserve.platform.config.base import Section


def _off(value: Any) -> Any:
    # YAML 1.1 reads a bare off as false.
    return "off" if value is False else value


class Rebalancing(Section):
    """When work moves between devices (BanaServe, section 4.5.1), and what that may cost."""

    controller: Annotated[Literal["off", "advise", "auto"], BeforeValidator(_off)] = Field(
        "off",
        description="off: no plans; advise: plans are made, and a person carries them out; auto: "
        "the controller carries them out.",
    )
    period_s: float = Field(10.0, gt=0, description="Seconds between two looks at the fleet.")
    rising: float = Field(
        0.4,
        gt=0,
        le=2,
        description="δ↑: a device this much above the least loaded becomes hot, one this much "
        "below the most loaded cold; utilisations are compute and memory together, 0 to 2.",
    )
    falling: float = Field(
        0.2, gt=0, le=2, description="δ↓: where it is even again; plans aim at this."
    )
    confirm_periods: int = Field(
        3, ge=1, description="A device changes between hot and cold only if so many looks agree."
    )
    efficiency: float = Field(
        0.01,
        ge=0,
        description="The paper's rho: an action must narrow the gap between two devices by this "
        "much for each second that it costs.",
    )
    least_gain: float = Field(
        0.05, gt=0, le=2, description="An action must narrow the gap by this much."
    )
    pause_budget_ms: float = Field(
        100.0,
        gt=0,
        description="Milliseconds that a plan may halt an engine, all its actions together.",
    )
    duration_budget_s: float = Field(120.0, gt=0, description="Seconds that an action may take.")
    tpot_budget: float = Field(
        1.5,
        gt=1,
        description="The most by which a plan may multiply an engine's predicted time per output "
        "token, all its actions together.",
    )
    most_actions: int = Field(4, ge=1, description="Actions of a plan, at most.")
    headroom: float = Field(
        0.1, ge=0, lt=1, description="The share of memory that no action may fill."
    )
    stale_after_s: float = Field(
        10.0,
        gt=0,
        description="A device, engine or loan that was last measured longer ago than "
        "this prevents plans.",
    )
    links_stale_after_s: float = Field(
        86_400.0,
        gt=0,
        description="A link that was last measured longer ago prevents actions over it.",
    )
    settle_s: float = Field(
        20.0, ge=0, description="Seconds after a plan before measurements count again."
    )

    profile: str | None = Field(
        None,
        description="The file that loomserve profile devices wrote, relative to this one; null: "
        "the file that pipelines use.",
    )
    folder: str | None = Field(
        None,
        description="The folder of plans and their history, relative to this file; null: a folder "
        "by server.port in the user's cache folder ($LOOMSERVE_HOME).",
    )

    @model_validator(mode="after")
    def _falling_is_below_rising(self) -> Rebalancing:
        if self.falling >= self.rising:
            raise ValueError("falling must be less than rising, or devices flap between the two")
        return self
