"""The base class of all states."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StateModel(BaseModel):
    """State that is frozen, and ignores fields that a newer version has added."""

    model_config = ConfigDict(frozen=True, extra="ignore")
