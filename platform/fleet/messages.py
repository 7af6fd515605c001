"""What crosses between gateways, engine replicas and the controller. No Ray, no vLLM."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.config import Device, Model, OfflineModel
from loomserve.platform.scheduling.options import SchedulerOptions
from loomserve.platform.state import (
    BorrowingState,
    FootprintState,
    LentState,
    LoanState,
    ModelStatus,
    StageState,
)
from loomserve.platform.state.lending_options import LendingOptions
from loomserve.platform.state.roles import Role
from loomserve.routers.snapshot import RoutingStats

# The Serve applications. A model's application is named after the model, so that it can be loaded,
# scaled and unloaded without touching any other.
GATEWAY_APP = "loomserve-gateway"
CONTROLLER_APP = "loomserve-controller"
MODEL_APP_PREFIX = "model:"
BATCH_APP = "loomserve-batch"
GATEWAY_DEPLOYMENT = "Gateway"
CONTROLLER_DEPLOYMENT = "Controller"
ENGINE_DEPLOYMENT = "Engine"
BATCH_DEPLOYMENT = "BatchLane"

# Where decode replicas have prompts computed, on a prefill replica's own port.
PREFILL_PATH = "/loomserve/prefill"
# Where borrowers open and end loans, on a lender replica's own port.
LOANS_PATH = "/loomserve/loans"

# Gateways and other replicas show this to engines, whose ports any local user could reach.
INTERNAL_TOKEN_HEADER = "x-loomserve-internal"
# Gateways tell the batch lane whose request it is: the name of an API key, or nothing.
OWNER_HEADER = "x-loomserve-owner"


def model_app(model: str) -> str:
    """The Serve application that serves a model. Model names are unique after this mapping."""
    return MODEL_APP_PREFIX + model.replace("/", "--")


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True)


class EngineSpec(_Message):
    """Everything a replica needs to start its engine."""

    model: Model
    devices: tuple[Device, ...] = Field(description="In the order they are to be claimed.")
    stage_layers: tuple[int, ...] = Field(
        (), description="Of a pipeline: how many layers each of the devices has; else none."
    )
    path: str = Field(description="Local folder or hub id of the weights, once they are resolved.")
    internal_token: str
    drain_timeout_s: float
    kv_transfer_config: dict[str, Any] | None = Field(
        description="vLLM's option that connects to the KV store; None: it keeps nothing there."
    )
    scheduling: SchedulerOptions
    lending: LendingOptions | None = Field(description="None: it neither lends nor borrows.")


class Heartbeat(_Message):
    """What a replica tells the controller every two seconds."""

    model: Model
    replica_id: str
    device: str
    stages: tuple[StageState, ...] = Field((), description="Of a pipeline, its first device's too.")
    address: str
    pid: int
    max_model_len: int
    in_flight: int
    stats: RoutingStats
    borrowing: BorrowingState | None = None
    lent: tuple[LentState, ...] = ()
    footprint: FootprintState | None = Field(None, description="None before it was measured.")

    @property
    def loans(self) -> tuple[LoanState, ...]:
        """Those that it has borrowed."""
        return self.borrowing.loans if self.borrowing else ()


class LiveReplica(_Message):
    """A live replica, as another of its model needs to know it."""

    id: str
    address: str
    stats: RoutingStats


class OfflineSpec(_Message):
    """An offline model, as the batch lane starts it."""

    model: OfflineModel
    source: str = Field(description="A folder, or a hub id.")
    cores: tuple[int, ...]


class ModelEngines(_Message):
    """A model's live replicas, as the batch lane needs to know them."""

    max_model_len: int | None
    predictor: str | None = Field(description="What predicts its answers' lengths, if any.")
    replicas: tuple[LiveReplica, ...]


class ServedEngines(_Message):
    """All models, ready or not."""

    models: dict[str, ModelEngines]


class LenderReplica(_Message):
    """A live replica that a borrower's replica may borrow from."""

    model: str
    id: str
    address: str


class DesiredState(_Message):
    """The controller's answer to a report."""

    draining: bool = Field(description="Take no new requests.")
    stop_timeout_s: float = Field(description="When stopped, wait this long for open requests.")
    role: Role
    peers: tuple[LiveReplica, ...] = Field(
        description="All live replicas of the model; only decode replicas are told."
    )
    lenders: tuple[LenderReplica, ...] = Field(
        (), description="Whom it may borrow from, the best first; all other loans are to end."
    )
    lenders_off: tuple[str, ...] = Field(
        (), description="Models that an operator does not let it borrow from."
    )
    lender_limits: dict[str, int] = Field(
        default_factory=dict,
        description="Bytes of KV that it may have with a lender's model, at most; 0: no loan.",
    )
    shards: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Heads or layers that a lender's model is to compute for all requests.",
    )
    drain_loans: tuple[str, ...] = Field((), description="Loans of its that are to end.")
    loans: tuple[str, ...] = Field(
        (), description="Of what it lends: the loans that live borrowers know of."
    )


class KvAccess(_Message):
    """What a gateway knows of the KV store."""

    address: str = Field(description="Its socket, as ZMQ writes it.")
    isolated_tenants: tuple[str, ...] = Field(
        description="The API keys whose blocks are kept apart; none: all share."
    )


class LineRequest(_Message):
    """A batch's line, which the lane asks a gateway to have computed."""

    owner: str = Field(description="The name of the API key; empty where none is needed.")
    path: str
    body: dict[str, Any]
    request_id: str
    engine: str | None = Field(description="The replica that has room for it, if any is known.")


class ReplicaRoute(_Message):
    """Where a live engine is."""

    id: str
    device: str
    address: str


class ModelRoute(_Message):
    """What a gateway knows of a model."""

    name: str
    app: str
    status: ModelStatus
    policy: str
    max_concurrent_requests: int
    max_model_len: int | None
    kvstore: bool = Field(description="Whether its blocks go to the KV store, if there is one.")
    predictor: str | None = Field(None, description="What predicts its answers' lengths, if any.")
    replicas: tuple[ReplicaRoute, ...]


class Routes(_Message):
    """All models, with a version that grows whenever anything in it changes."""

    version: int
    models: tuple[ModelRoute, ...]
