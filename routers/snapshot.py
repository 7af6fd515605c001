"""The snapshot of a replica that it tells those that route requests."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.roles import Role


class RoutingStats(BaseModel):
    """A replica's report to those that route requests.

    Clocks of two machines have nothing to do with each other, so a report says what its teller's
    clock shows as it is told, and whoever is told it takes all its times as so long ago.
    """

    model_config = ConfigDict(frozen=True)

    load: ReplicaLoad | None
    max_running: int
    kv_capacity_tokens: int | None
    draining: bool
    role: Role
    told_at: float = Field(
        description="The moment at which it is told, by the monotonic clock of its other times.",
    )

    def received(self, at: float) -> Self:
        """The same by the receiver's monotonic clock, which showed ``at`` when it was told."""
        load, later_s = self.load, at - self.told_at
        if load is not None:
            load = load.model_copy(update={"measured_at": load.measured_at + later_s})
        return self.model_copy(update={"load": load, "told_at": at})
