"""What an operator sees: the snapshot behind ``GET /admin/v1/state`` and ``loomserve status``."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.roles import Role


class _Snapshot(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SchedulingState(_Snapshot):
    """What an engine's scheduler did with its memory since it started."""

    queue: str = Field(description="The policy of who is served first.")
    preemption: str = Field(description="The policy of how a request leaves memory.")
    swapped_out: int = Field(description="Requests preempted to swap space.")
    swapped_in: int = Field(description="Requests that came back from there.")
    recomputed: int = Field(description="Requests preempted to be computed again.")
    swap_used_bytes: int
    swap_capacity_bytes: int
    step_time_error: float | None = Field(
        description="Mean absolute error of predicted step times, a share; None before any."
    )
    swap_time_error: float | None = Field(description="The same of predicted swap times.")


class ReplicaLoad(_Snapshot):
    """What an engine measured about itself."""

    running: int = Field(description="Requests in the running batch.")
    waiting: int = Field(description="Requests in the engine's queue.")
    kv_cache_usage: float = Field(description="Share of KV blocks in use, 0 to 1.")
    step_time_s: float = Field(description="Mean time of recent steps; 0 before the first.")
    oldest_waiting_s: float = Field(
        0.0, description="Age of the oldest request that waits; 0 if none does."
    )
    weighted_turnaround: float | None = Field(
        None,
        description="Mean of recent requests: time in the engine over time since first scheduled.",
    )
    scheduling: SchedulingState | None = Field(
        None, description="None for an engine without the KV store."
    )
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
    role: Role = Field(description="unified, or what is sent to it: prefill or decode.")
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


class KvModelState(_Snapshot):
    """What a model holds in the KV store; hits, misses and evictions since the store started."""

    model: str
    blocks_in_memory: int
    blocks_on_ssd: int
    bytes_in_memory: int
    bytes_on_ssd: int
    hit_blocks: int = Field(description="Blocks that engines looked up and found.")
    missed_blocks: int = Field(description="Blocks that engines looked up and did not find.")
    evicted_blocks: int = Field(description="Blocks that left memory to make room.")


class KvState(_Snapshot):
    """What the KV store holds: the snapshot behind ``GET /admin/v1/kv`` and ``loomserve kv``."""

    capacity_bytes: int = Field(description="Shared memory for blocks.")
    used_bytes: int
    ssd_capacity_bytes: int = Field(description="0 without an SSD tier.")
    ssd_used_bytes: int
    leases: int = Field(description="Requests that are about to read blocks.")
    writers: int = Field(description="Engines that are writing blocks.")
    corrupt_blocks: int = Field(description="Blocks whose checksum failed.")
    models: tuple[KvModelState, ...]
