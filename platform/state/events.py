"""What became of models, for people."""

from __future__ import annotations

from pydantic import Field

from loomserve.platform.state.base import StateModel
from loomserve.platform.state.platform import Presence


class ModelEvent(StateModel):
    """A change of what a model is to be, which it is as soon as it can."""

    at: float = Field(description="Seconds since 1970.")
    model: str
    presence: Presence = Field(description="What it is to be from then on.")
    why: str


class ModelEvents(StateModel):
    events: tuple[ModelEvent, ...] = Field(description="The newest first.")
