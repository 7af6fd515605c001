"""What an actuator remembers of an action that is under way.

A record is saved before its action begins, so that a restarted controller can go on with
the action, or take it back.
"""

from __future__ import annotations

from pydantic import Field

from loomserve.platform.base.frozen import Frozen
from loomserve.platform.state.lending_options import ShardSpec
from loomserve.platform.state.roles import Role


class ActionRecord(Frozen):
    """What every actuator remembers; each adds what it sets, and what was there before."""

    name: str = Field(description="Unique among all actions: the plan's id and the step's number.")


class RequestsRecord(ActionRecord):
    """A new limit on the KV that a borrower's replica has with a lender."""

    borrower: str
    lender: str = Field(description="The lender's model.")
    limit: int = Field(description="Bytes.")
    limit_before: int | None
    bytes_before: int = Field(description="KV of the borrower that was with the lender.")


class RunningRecord(ActionRecord):
    """Requests that should go on with another replica; the order has the action's name."""

    engine: str
    to: str
    requests: int


class RoleRecord(ActionRecord):
    """A new role of a replica."""

    replica: str
    role: Role
    role_before: Role


class ReplicasRecord(ActionRecord):
    """A new number of a model's replicas."""

    model: str
    replicas: int
    replicas_before: int
    there_before: tuple[str, ...] = Field(description="Replicas that were alive.")
    leaving: str | None = Field(description="The replica that shall end; null: one starts.")


class ShardRecord(ActionRecord):
    """Heads or layers of an engine that a lender should compute; a null shard is home."""

    engine: str
    lender: str = Field(description="The lender's model.")
    device: str
    shard: ShardSpec | None
    shard_before: ShardSpec | None


AnyRecord = (
    ActionRecord | RequestsRecord | RunningRecord | RoleRecord | ReplicasRecord | ShardRecord
)
"""Records differ in their fields, which tell them apart when they are read."""
