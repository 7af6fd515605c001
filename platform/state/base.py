"""What all of it is: frozen, and open to fields that a newer version adds."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StateModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")
