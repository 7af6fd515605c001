"""The seam between plans and the mechanisms that carry out their actions: one mover a kind.

What a mover knows of an action under way is its *order*, which is saved before anything is done
and each time it changes; so a mover keeps nothing that a restart would lose. Each call may come
again, after a restart or because its answer was lost, and then does what is left to be done.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.rebalancing.policy.actions import Action

Order = Mapping[str, Any]
"""Of JSON values."""


class ActionOutcome(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # all is as it was before
    ABORTED = "aborted"  # all is as it was before


class Progress(BaseModel):
    """
    Attributes:
        order: To be saved, and given from now on; None: as before.
        moved_bytes: So far.
        paused_s: That an engine stood still for it so far.
        message: For a person: why it failed, or what it waits for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    outcome: ActionOutcome = ActionOutcome.RUNNING
    order: dict[str, Any] | None = None
    moved_bytes: int = Field(0, ge=0)
    paused_s: float = Field(0.0, ge=0)
    message: str = ""


class Actuator(Protocol):
    """Carries out actions of one kind, one at a time."""

    def movable(self, engine: str) -> bool:
        """Whether it can move this part of a live replica; asked for moves only."""
        ...

    def order(self, name: str, action: Action) -> dict[str, Any]:
        """The order of an action that is about to begin; changes nothing.

        Args:
            name: the action's, unique among all.
            action: of the mover's kind.

        Raises:
            RequestError: it cannot be carried out; the message says why.
        """
        ...

    async def begin(self, order: Order) -> None:
        """
        Raises:
            RequestError: it cannot be carried out; the message says why.
        """
        ...

    async def abort(self, order: Order) -> None:
        """Take it back, if it is not too late; ``progress`` tells."""
        ...

    async def progress(self, order: Order) -> Progress:
        """How far it is; asked about once a second, and the place to get on with it."""
        ...
