"""Messages between the controller, gateways, the batch lane and engine replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.adapters.messages import Adapter, AdapterReport, AdapterRoute
from loomserve.platform.config import (
    LOCAL_NODE,
    Alias,
    Device,
    Model,
    OfflineModel,
    Server,
    plain_name,
)
from loomserve.platform.run.engine_address import EngineAddress
from loomserve.platform.scheduling.options import SchedulerOptions
from loomserve.platform.state import (
    BorrowingState,
    FootprintState,
    LentState,
    LoanState,
    ModelStatus,
    StageState,
)
from loomserve.platform.state.lending_options import LendingOptions, ShardSpec
from loomserve.platform.state.parsers import ChatParsers
from loomserve.platform.state.roles import Role
from loomserve.routers.snapshot import RoutingStats

# The Serve applications. Those of a model are named after it, so that it can be loaded, scaled and
# unloaded without touching any other.
GATEWAY_APP = "loomserve-gateway"
CONTROLLER_APP = "loomserve-controller"
MODEL_APP_PREFIX = "model:"
BATCH_APP = "loomserve-batch"
READY_APP = "loomserve-ready"
ENGINES_APP_PREFIX = "loomserve-engines"
GATEWAY_DEPLOYMENT = "Gateway"
CONTROLLER_DEPLOYMENT = "Controller"
ENGINE_DEPLOYMENT = "Engine"
ENGINES_DEPLOYMENT = "Engines"
# No name of a model or a device has it.
_ON = "@"
BATCH_DEPLOYMENT = "BatchLane"
READY_DEPLOYMENT = "Ready"

# Where borrowers open and end loans, on a lender replica's own socket.
LOANS_PATH = "/loomserve/loans"
# Where gateways ask for a replica's load, on its own socket.
LOAD_PATH = "/loomserve/load"
# Where the controller has a replica's engine sleep or wake, on its own socket.
AWAKE_PATH = "/loomserve/awake"
# Where the controller gives a replica's engine adapters, on its own socket.
ADAPTERS_PATH = "/loomserve/adapters"
# Where a gateway tells a replica, on its own socket, whether its engine has answered a request.
FIRST_ANSWER_PATH = "/loomserve/first-answer"

# Gateways and replicas show it to engines, whose ports any local user can reach.
INTERNAL_TOKEN_HEADER = "x-loomserve-internal"
# Gateways tell the batch lane the name of the request's API key, or nothing, and sign it.
OWNER_HEADER = "x-loomserve-owner"


def model_app(model: str) -> str:
    """What the names of a model's Serve applications begin with. It is unique."""
    return MODEL_APP_PREFIX + plain_name(model)


def replica_app(model: str, device: str) -> str:
    """The Serve application that has a model's replica on a device. Serve places all replicas of
    one alike, and those of a model belong on a device each."""
    return f"{model_app(model)}{_ON}{device}"


def engines_app(node: str) -> str:
    """The Serve application of the actor that has a node's engines."""
    return f"{ENGINES_APP_PREFIX}{_ON}{node}"


def gateway_app(node: str) -> str:
    """The Serve application of a node's gateways, but of the one that has ``GATEWAY_APP``."""
    return f"{GATEWAY_APP}{_ON}{node}"


def nodes_with_gateways(apps: Iterable[str]) -> frozenset[str]:
    beginning = GATEWAY_APP + _ON
    return frozenset(app.removeprefix(beginning) for app in apps if app.startswith(beginning))


def is_ours(app: str) -> bool:
    once = (GATEWAY_APP, CONTROLLER_APP, BATCH_APP, READY_APP)
    several = (MODEL_APP_PREFIX, GATEWAY_APP + _ON, ENGINES_APP_PREFIX)
    return app in once or app.startswith(several)


def devices_with_replicas(model: str, apps: Mapping[str, Any]) -> dict[str, Any]:
    """The devices of a model's replicas, with what is known of the Serve application of each."""
    beginning = model_app(model) + _ON
    return {
        name.removeprefix(beginning): known
        for name, known in apps.items()
        if name.startswith(beginning)
    }


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True)


class EngineSpec(_Message):
    """An engine that a replica starts."""

    model: Model
    devices: tuple[Device, ...] = Field(description="Where it runs; of a pipeline, its stages.")
    stage_layers: tuple[int, ...] = ()
    """Layers of each device of a pipeline; else none."""
    path: str = Field(description="Local folder or hub id of the weights, once they are resolved.")
    base: str = Field("", description="Folder to which the model's source is relative.")
    parsers: ChatParsers | None = Field(None, description="Once the path is resolved.")
    internal_token: str
    server: Server
    kv_transfer_config: dict[str, Any] | None
    """vLLM's option that connects to the KV store; None: blocks are not stored."""
    scheduling: SchedulerOptions
    lending: LendingOptions | None = Field(description="None: it neither lends nor borrows.")


class FrontEndSpec(_Message):
    """What a gateway builds a model's front end of, as the engines were started."""

    path: str = Field(description="Local folder or hub id of the weights.")
    engine_options: dict[str, Any] = Field(description="vLLM's, all that were set.")
    parsers: ChatParsers | None = Field(None, description="Those among the options, and why.")


class EngineOrder(_Message):
    """An engine that a node is to have.

    Attributes:
        device: Whose replica it is of; of a pipeline, the first of the model's.
        options: vLLM's, of the engine alone.
        environment: Variables of the engine's processes.
    """

    spec: EngineSpec
    device: str
    options: dict[str, Any]
    environment: dict[str, str]
    front_end: FrontEndSpec


class AwakeOrder(_Message):
    """Whether a replica's engine is to be awake, to which the replica answers once it is so."""

    awake: bool
    generation: int = Field(0, description="The controller's.")


class MoveOrder(_Message):
    """Requests of a replica that should go on with another one of its model."""

    id: str = Field(description="Each order is carried out once.")
    to: str = Field(description="The other replica.")
    requests: int = Field(description="At most.")


class MovedRequests(_Message):
    """What came of a replica's last order."""

    order: str
    requests: int = Field(description="Those that left.")
    problem: str = Field("", description="Why none could leave, if none could.")


class Heartbeat(_Message):
    """State of a replica, which it sends to the controller every two seconds."""

    model: Model
    replica_id: str
    device: str
    stages: tuple[StageState, ...] = Field((), description="Of a pipeline, all stages; else none.")
    address: str
    pid: int
    engine_pid: int
    held: bool = Field(True, description="Whether a replica of Serve's holds its engine.")
    max_model_len: int
    in_flight: int
    memory_used: float = Field(0.0, description="Share of its node's, or of its container's.")
    stats: RoutingStats
    borrowing: BorrowingState | None = None
    lent: tuple[LentState, ...] = ()
    footprint: FootprintState | None = Field(None, description="None until it is measured.")
    engine: EngineAddress
    front_end: FrontEndSpec
    moved: MovedRequests | None = Field(None, description="None: it has had no order to move any.")
    adapters: tuple[AdapterReport, ...] = ()
    ends: str = Field("", description="Why it kills its engine and ends with it; empty: it stays.")
    answers: bool = Field(True, description="Whether its engine has answered a request.")
    problem: str = Field("", description="Why it has not, as a gateway has found out.")

    @property
    def loans(self) -> tuple[LoanState, ...]:
        return self.borrowing.loans if self.borrowing else ()

    def received(self, at: float) -> Self:
        """The same by the receiver's monotonic clock, which shows ``at``."""
        stats, footprint, later_s = self.stats, self.footprint, at - self.stats.told_at
        if footprint is not None:
            footprint = footprint.model_copy(
                update={
                    "memory_measured_at": footprint.memory_measured_at + later_s,
                    "ready_at": footprint.ready_at + later_s,
                }
            )
        return self.model_copy(update={"stats": stats.received(at), "footprint": footprint})


class FirstAnswer(_Message):
    """What came of the first request to a replica's engine, which a gateway sent."""

    problem: str = Field(description="Why there was no answer; empty: there was.")


class OfflineSpec(_Message):
    """An offline model, as the batch lane starts it."""

    model: OfflineModel
    source: str = Field(description="A folder, or a hub id.")
    cores: tuple[int, ...]
    resources: dict[str, float] = Field(description="What it asks Ray for, to be on its device.")


class ServedModel(_Message):
    """A model of the platform, for the batch lane, which admits each line to an engine that has
    room."""

    max_model_len: int | None
    engines: dict[str, RoutingStats] = Field(description="Those that take requests, by id.")
    predictor: str | None = Field(None, description="What predicts its answers' lengths, if any.")
    on_demand: bool = Field(
        False, description="Whether it comes with a line, where it has no engine."
    )

    def received(self, at: float) -> Self:
        """The same by the receiver's monotonic clock, which showed ``at`` as it was told."""
        engines = {id_: stats.received(at) for id_, stats in self.engines.items()}
        return self.model_copy(update={"engines": engines})


class ServedEngines(_Message):
    """All models, ready or not, and aliases, for the batch lane."""

    models: dict[str, ServedModel]
    aliases: dict[str, Alias] = Field(default_factory=dict)


class LenderReplica(_Message):
    """A live replica from which a borrower's replica may borrow."""

    model: str
    id: str
    address: str


class DesiredState(_Message):
    """State that the controller wants a replica to be in: its answer to a heartbeat."""

    generation: int = Field(0, description="The controller's.")
    draining: bool = Field(description="True: take no new requests.")
    gives_back: str = Field("", description="Why it is to end, and give its memory back.")
    stop_timeout_s: float = Field(description="Seconds to wait for open requests when stopped.")
    role: Role
    lenders: tuple[LenderReplica, ...] = ()
    """Replicas from which it may borrow, the best first; all other loans end."""
    lenders_off: tuple[str, ...] = ()
    """Models from which an operator does not let it borrow."""
    lender_limits: dict[str, int] = Field(default_factory=dict)
    """Most bytes of KV that it may keep with a lender's model; 0: no loan."""
    shards: dict[str, ShardSpec] = Field(default_factory=dict)
    """Shards that a lender's model computes, by its name."""
    drain_loans: tuple[str, ...] = Field((), description="Names of its loans that end.")
    move: MoveOrder | None = Field(None, description="None: nothing is to go on elsewhere.")
    adapters: tuple[Adapter, ...] = Field((), description="All that it shall have.")
    loans: tuple[str, ...] = ()
    """Names of the loans with it that live borrowers know of."""


class KvAccess(_Message):
    """The KV store, for gateways."""

    address: str = Field(description="Its socket, as ZMQ writes it.")
    each_node: bool = Field(False, description="Whether each node has one, at this address there.")


class LanePlace(NamedTuple):
    """Where the batch lane's API is, for gateways."""

    address: str
    now_s: float
    """What the monotonic clock of its node shows as it says so."""


class LineRequest(_Message):
    """A batch's line, which the lane asks a gateway to have computed."""

    generation: int = Field(0, description="The lane's.")
    owner: str = Field(description="The name of the API key; empty where none is needed.")
    path: str
    body: dict[str, Any]
    request_id: str
    model: str | None = None
    """Which of its alias's models the lane has chosen; else its own."""
    engine: str | None = Field(description="The replica that has room for it, if any is known.")
    timeout_s: float = Field(inf, description="Most seconds in which an engine gives it no token.")


class ReplicaRoute(_Message):
    """Address of a live replica."""

    id: str
    device: str
    address: str
    engine: EngineAddress
    node: str = Field(LOCAL_NODE, description="Where it is.")
    draining: bool = Field(False, description="True: its requests go on elsewhere.")
    answers: bool = Field(True, description="False: a gateway has to find out whether it does.")


class ModelRoute(_Message):
    """A model and its replicas, for gateways."""

    model: Model
    status: ModelStatus
    on_demand: bool = False
    """Whether requests wait for it where it is not ready, and have it come."""
    problem: str = Field("", description="Why it is not ready, if it failed.")
    max_model_len: int | None = Field(description="Tokens of context, once a replica has said.")
    kv_token_bytes: float = Field(0.0, description="KV of a token; 0: no replica has said.")
    front_end: FrontEndSpec | None = Field(None, description="None: no replica has reported.")
    replicas: tuple[ReplicaRoute, ...]
    adapters: tuple[AdapterRoute, ...] = ()
    adapter: str | None = None
    """The adapter that a request asks for; None: the model itself."""

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def asked(self) -> str:
        """The name that its requests ask for."""
        return self.adapter or self.name


class Routes(_Message):
    """All models and aliases; the version grows with each change of any of them."""

    generation: int = Field(0, description="The controller's.")
    version: int
    models: tuple[ModelRoute, ...]
    aliases: dict[str, Alias] = Field(default_factory=dict)
    drained_nodes: tuple[str, ...] = ()
    """Nodes whose gateways are to get no more clients."""

    @property
    def adapters(self) -> tuple[AdapterRoute, ...]:
        """Those of all models."""
        return tuple(each for model in self.models for each in model.adapters)
