"""The base class of values that are kept or sent as JSON."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """A value that nobody changes, and that has no other fields than its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")
