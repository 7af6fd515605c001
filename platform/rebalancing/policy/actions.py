"""Actions that a plan may consist of; an actuator carries each out or rolls it back."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from loomserve.platform.base.frozen import Frozen
from loomserve.platform.rebalancing.policy.snapshot import MoveKind
from loomserve.platform.state.roles import Role


class ActionKind(StrEnum):
    """Kinds of actions, each with costs and corrections of its own."""

    REQUESTS = "requests"
    HEADS = "heads"
    LAYERS = "layers"
    ROLE = "role"
    REPLICAS = "replicas"
    RUNNING = "running"
    """Requests that go on with another replica."""


class Move(Frozen):
    """Move work of an engine to a lender's device, or home."""

    action: Literal["move"] = "move"
    kind: MoveKind
    engine: str = Field(description="The borrower, which keeps scheduling the requests.")
    lender: str
    amount: int = Field(gt=0, description="Bytes of KV, KV heads or layers, by kind.")
    back: bool = Field(False, description="True: home again; the last of it closes the loan.")


class MoveRequests(Frozen):
    """Have requests of an engine go on with another replica of its model (Llumnix)."""

    action: Literal["move_requests"] = "move_requests"
    engine: str
    to: str
    requests: int = Field(gt=0, description="Those that wait come first.")


class SetRole(Frozen):
    action: Literal["set_role"] = "set_role"
    engine: str
    role: Role


class AddReplica(Frozen):
    action: Literal["add_replica"] = "add_replica"
    model: str
    device: str


class RemoveReplica(Frozen):
    action: Literal["remove_replica"] = "remove_replica"
    engine: str


Action = Annotated[
    Move | MoveRequests | SetRole | AddReplica | RemoveReplica, Field(discriminator="action")
]


def kind_of(action: Action) -> ActionKind:
    match action:
        case Move():
            return ActionKind(action.kind.value)
        case MoveRequests():
            return ActionKind.RUNNING
        case SetRole():
            return ActionKind.ROLE
        case _:
            return ActionKind.REPLICAS
