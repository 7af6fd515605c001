"""State of devices, models and replicas."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from loomserve.platform.state.base import StateModel
from loomserve.platform.state.lending import BorrowingState
from loomserve.platform.state.load import ReplicaLoad
from loomserve.platform.state.parsers import ChatParsers
from loomserve.platform.state.roles import Role


class ModelStatus(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DEGRADED = "degraded"  # it answers, with fewer replicas than asked for
    ASLEEP = "asleep"  # its engines run, and have given memory back
    WAKING = "waking"  # they take it again
    UNLOADED = "unloaded"  # it is known, and has no engine
    UNLOADING = "unloading"  # it will not be known any more
    FAILED = "failed"


class Presence(StrEnum):
    """What a model is to be, by its requests, its idle rules or an operator."""

    READY = "ready"
    ASLEEP = "asleep"
    UNLOADED = "unloaded"


class NodeStatus(StrEnum):
    UP = "up"
    DRAINING = "draining"  # what is open on it ends or goes on elsewhere
    DRAINED = "drained"  # nothing is open on it, nothing is started, and Ray has left it
    DOWN = "down"


class NodeState(StateModel):
    """A node of the platform."""

    name: str = Field(description="As loomserve node --name says; local: of no cluster.")
    status: NodeStatus
    gateways: int = Field(description="Gateways that report from it; of a cluster.")
    replicas: int = Field(description="Live replicas on it.")


class StageState(StateModel):
    """Stage of a replica that is a pipeline."""

    device: str
    layers: int


class ReplicaState(StateModel):
    """A live replica."""

    id: str = Field(description="Ray Serve's replica id.")
    device: str = Field(description="Device of the engine; of a pipeline, the first.")
    node: str = Field("local", description="Node of the device; local: of no cluster.")
    stages: tuple[StageState, ...] = Field(
        (), description="Stages of a pipeline, in the order of layers; else none."
    )
    address: str = Field(description="Its socket's name and its node's address: NAME.NODE.")
    pid: int = Field(description="Process of the replica.")
    engine_pid: int = Field(description="Process of its engine, which computes.")
    draining: bool = Field(description="True: it finishes its requests and takes no new ones.")
    message: str = Field("", description="Why it ends, for a person; empty: it stays.")
    asleep: bool = Field(False, description="True: its engine has given memory back.")
    role: Role = Field(description="unified, prefill or decode.")
    in_flight: int = Field(description="Requests that gateways have open on it.")
    load: ReplicaLoad | None = Field(description="None until the engine has measured.")
    borrowing: BorrowingState | None = Field(None, description="None: its model borrows nothing.")


class AdapterState(StateModel):
    """A LoRA adapter of a model."""

    name: str = Field(description="What clients ask for.")
    source: str
    rank: int | None = Field(None, description="None: it could not be loaded.")
    digest: str = Field("", description="Of its files, as they were when it was loaded.")
    replicas: tuple[str, ...] = Field((), description="Ids of the live replicas that have it.")
    message: str = Field("", description="Why some do not have it, for a person.")


class ScalingState(StateModel):
    """How a model whose load decides on its replicas is scaled."""

    min: int
    max: int
    fixed: bool = Field(description="True: an operator has set the number, and load has no say.")
    why: str = Field(description="What was decided last, for a person; empty: nothing yet.")


class ModelState(StateModel):
    """A model and its live replicas."""

    name: str
    source: str
    status: ModelStatus
    message: str = Field("", description="Why it is not ready, for a person.")
    target_replicas: int
    scaling: ScalingState | None = Field(None, description="None: load has no say in its replicas.")
    router: str = Field(description="Routing policy.")
    max_model_len: int | None = Field(None, description="Tokens of context, once known.")
    devices: tuple[str, ...] = Field(
        (), description="Those that it may use, in the order in which its replicas get them."
    )
    placement: str = Field(
        "", description="Why it is there, for a person; empty: the configuration says where."
    )
    parsers: ChatParsers | None = Field(
        None, description="What its tool calls and its reasoning are read by; null: not yet known."
    )
    replicas: tuple[ReplicaState, ...] = ()
    adapters: tuple[AdapterState, ...] = ()


class DeviceState(StateModel):
    """A device and the models on it."""

    name: str
    kind: str
    node: str = Field("local", description="Where it is; local: of no cluster.")
    place: str = Field(description="cores 0,1 or gpu 0.")
    models: tuple[str, ...] = Field((), description="Models with a replica on it.")
    memory: int | None = Field(
        None, description="Bytes that models on it may take together; null: no bound."
    )


class AliasState(StateModel):
    """A name that stands for models."""

    name: str
    models: dict[str, int] = Field(description="Weight of each.")
    sticky: str | None = Field(
        description="What keeps its model: key or user; null: each request is by itself."
    )


class SoftwareVersions(StateModel):
    """Versions that the controller runs on."""

    loomserve: str
    vllm: str
    ray: str
    python: str


class PlatformState(StateModel):
    """The platform: behind ``GET /admin/v1/state`` and ``loomserve status``."""

    versions: SoftwareVersions
    uptime_s: float
    nodes: tuple[NodeState, ...] = ()
    devices: tuple[DeviceState, ...]
    models: tuple[ModelState, ...]
    aliases: tuple[AliasState, ...] = ()


class ModelEvent(StateModel):
    """A change of what a model is to be, which it is as soon as it can."""

    at: float = Field(description="Seconds since 1970.")
    model: str
    presence: Presence = Field(description="What it is to be from then on.")
    why: str


class ModelEvents(StateModel):
    events: tuple[ModelEvent, ...] = Field(description="The newest first.")
