"""What operators wish of a fleet, as it is kept for a controller that is started anew."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.adapters.table import AdapterWish
from loomserve.platform.config import Alias, Model
from loomserve.platform.state import Presence
from loomserve.platform.state.roles import Role


class _Wish(BaseModel):
    model_config = ConfigDict(frozen=True)


class ModelWish(_Wish):
    """A model that shall be there, or be unloaded."""

    model: Model
    replicas: int
    unload_by: float | None = Field(
        None, description="It is being unloaded, by then, in monotonic seconds; None: it stays."
    )
    presence: Presence = Field(Presence.READY, description="Whether it sleeps, or has no engine.")
    roles: dict[str, Role] = Field(description="By device, where an operator has changed it.")
    fixed: bool = Field(
        False, description="Whether an operator has set the number of replicas, not its load."
    )
    berth: tuple[str, ...] = Field(
        (), description="Its devices, where the platform chooses; none: the configuration says."
    )
    berth_why: str = Field("", description="For a person.")


class Wishes(_Wish):
    """All of one run of the platform."""

    models: tuple[ModelWish, ...] = ()
    drained: tuple[str, ...] = Field((), description="Replicas that take no new requests.")
    leaving: tuple[str, ...] = Field((), description="Replicas that are drained to be ended.")
    ending: tuple[str, ...] = Field((), description="Those that were drained so.")
    drained_nodes: tuple[str, ...] = Field((), description="Nodes that are to have nothing.")
    left_nodes: tuple[str, ...] = Field((), description="Those of them that Ray was told to leave.")
    pairs_off: tuple[tuple[str, str], ...] = Field(
        (), description="Borrower and lender, where the first may not borrow from the second."
    )
    aliases: dict[str, Alias] | None = Field(
        None, description="All that there are; None: those of the configuration."
    )
    adapters: tuple[AdapterWish, ...] = ()
    last_adapter: int = Field(0, description="The highest number that an adapter has had.")
    draining_loans: tuple[str, ...] = Field((), description="Names of loans that are to end.")
