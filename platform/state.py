"""What an operator sees: the snapshot behind ``GET /admin/v1/state`` and ``loomserve status``."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class _Snapshot(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ReplicaLoad(_Snapshot):
    """What an engine measured about itself."""

    running: int = Field(description="Requests in the running batch.")
    waiting: int = Field(description="Requests in the engine's queue.")
    kv_cache_usage: float = Field(description="Share of KV blocks in use, 0 to 1.")
    step_time_s: float = Field(description="Mean time of recent steps; 0 before the first.")
    measured_at: float = Field(description="Unix time of the measurement, seconds.")


class ModelStatus(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DEGRADED = "degraded"  # it answers, with fewer replicas than asked for
    UNLOADING = "unloading"
    FAILED = "failed"


class ReplicaState(_Snapshot):
    id: str = Field(description="Ray Serve's replica id.")
    device: str = Field(description="The device its engine is bound to.")
    address: str = Field(description="host:port of the engine's own HTTP server.")
    pid: int = Field(description="Process of the replica; its engine is a child.")
    draining: bool = Field(description="True: finishes its requests and takes no new ones.")
    in_flight: int = Field(description="Requests that gateways have open on it.")
    load: ReplicaLoad | None = Field(description="None until the engine has reported.")


class ModelState(_Snapshot):
    name: str
    source: str
    status: ModelStatus
    message: str = Field("", description="Why it is not ready, for a person.")
    target_replicas: int
    router: str = Field(description="The routing policy in use.")
    max_model_len: int | None = Field(None, description="Tokens of context, once known.")
    replicas: tuple[ReplicaState, ...] = ()


class DeviceState(_Snapshot):
    name: str
    kind: str
    place: str = Field(description="cores 0,1 or gpu 0.")
    models: tuple[str, ...] = Field((), description="Models with a replica on it.")


class Versions(_Snapshot):
    loomserve: str
    vllm: str
    ray: str
    python: str


class State(_Snapshot):
    versions: Versions
    uptime_s: float
    devices: tuple[DeviceState, ...]
    models: tuple[ModelState, ...]
