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


class Pace(_Snapshot):
    """How fast an engine served the requests that ended lately, as its load then was."""

    prefill_token_s: float = Field(description="Time for each prompt token that was computed.")
    output_token_s: float = Field(description="Mean time between two tokens of an answer.")
    request_s: float = Field(description="Mean time from a request's start to its end.")


class WorkState(_Snapshot):
    """What an engine has done since it started; two of them tell what a while took."""

    prefill_s: float = Field(description="Seconds that prompts took.")
    attention_s: float = Field(description="Seconds that decoding's attention took.")
    linear_s: float = Field(description="Seconds that all else in decoding took.")
    tokens: int = Field(description="Whose KV was written, of prompts and generated.")


class FootprintState(_Snapshot):
    """What an engine is made of, and what it takes."""

    layers: int
    layer_bytes: int = Field(description="Weights of a layer; 0 where its files tell nothing.")
    kv_heads: int = Field(description="Of a layer.")
    block_bytes: int = Field(description="Of a KV block, all layers.")
    block_tokens: int
    memory_bytes: int | None = Field(
        description="Its processes' own memory, KV included; None on a GPU, where nobody measures."
    )
    memory_measured_at: float = Field(description="Unix time, seconds.")
    start_s: float = Field(description="That it took from its first line until it served.")
    ready_at: float = Field(description="When that was: Unix time, seconds.")


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
    pace: Pace | None = Field(None, description="None before a request has ended.")
    scheduling: SchedulingState | None = Field(
        None, description="None for an engine without the KV store."
    )
    work: WorkState | None = Field(None, description="None for an engine that counts none.")
    measured_at: float = Field(description="Unix time of the measurement, seconds.")


class PartState(_Snapshot):
    """Heads or layers of a replica that a lender computes for all its requests."""

    heads: int = Field(0, description="KV heads of every layer that move.")
    layers: tuple[int, int] | None = Field(
        None, description="Layers that move: first, behind last."
    )
    phase: str = Field(
        description="leaving: copied while steps compute it here; away; returning: copied back; "
        "home."
    )
    pause_s: float = Field(description="The longest that steps stood still for it.")
    copied_bytes: int
    why: str = Field("", description="It comes home, once it does.")

    @property
    def is_away(self) -> bool:
        return self.phase in ("away", "returning")


class LoanState(_Snapshot):
    """What a replica keeps with a lender, as the borrower measured it; blocks are its own."""

    name: str
    borrower: str
    borrower_replica: str
    lender: str
    lender_replica: str
    draining: bool = Field(description="True: no request starts there any more.")
    phase: str = Field(
        description="open; stopped: no request starts there, for it is slow; eject: those there "
        "are computed elsewhere; probing: a few start there again."
    )
    most_tokens: int = Field(description="Of context that the borrower lets lie there.")
    age_s: float
    usable_blocks: int = Field(description="What the lender grants at this moment.")
    free_blocks: int
    requests: int = Field(description="Running requests whose KV is there.")
    tasks: int = Field(description="Layers' attention that the lender computed.")
    wait_mean_us: float = Field(description="Waits for the lender's results, a task.")
    wait_max_us: float
    wait_share: float = Field(description="Share of the loan's time that the borrower waited.")
    service_share: float = Field(description="Share of it that the lender computed for it.")
    part: PartState | None = Field(None, description="None where whole requests lie.")


class BorrowingState(_Snapshot):
    """What a replica of a hot model borrows."""

    own_blocks: int = Field(description="KV blocks in its own memory.")
    own_free_blocks: int
    loans: tuple[LoanState, ...]
    broken: dict[str, int] = Field(description="Loans that ended by themselves, by reason.")
    moved: int = Field(0, description="Running requests whose KV was copied to another side.")
    problems: dict[str, str] = Field(
        description="Of each lender without a loan: why the last attempt failed."
    )
    switched_off: tuple[str, ...] = Field(description="Lenders that an operator switched off.")
    limits: dict[str, int] = Field(
        {}, description="Bytes of KV that a plan lets it have, at most, by the lender's model."
    )
    parts: dict[str, dict[str, int | list[int]]] = Field(
        {}, description="Heads or layers that a plan gives a lender's model to compute."
    )


class SplitState(_Snapshot):
    """How a lender's operators are cut in one kind of step, so that guests' tasks wait little."""

    parts: dict[str, int] = Field(description="By operator, where there is more than one.")
    wait_whole_us: float = Field(description="Predicted mean wait of a task were none cut.")
    wait_us: float = Field(description="Predicted mean wait of a task.")


class LentState(_Snapshot):
    """What a replica of a cold model lends to one borrower; blocks are the lender's own."""

    name: str = Field(description="The loan's.")
    lender: str
    lender_replica: str
    borrower: str
    blocks: int = Field(description="What the borrower has at this moment.")
    most_blocks: int = Field(description="What it may come to have.")
    taken_back_blocks: int = Field(description="What the lender's own requests have taken back.")
    tasks: int = Field(0, description="Layers' attention computed for the borrower.")
    wait_us: float = Field(0.0, description="Measured mean wait of a task until it was begun.")
    service_us: float = Field(0.0, description="Measured mean time that a task itself took.")
    splits: dict[str, SplitState] = Field(
        default_factory=dict, description="For steps that decode, and for those that prefill."
    )


class ModelStatus(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DEGRADED = "degraded"  # it answers, with fewer replicas than asked for
    UNLOADING = "unloading"
    FAILED = "failed"


class StageState(_Snapshot):
    """A part of a replica that is a pipeline."""

    device: str
    layers: int


class ReplicaState(_Snapshot):
    id: str = Field(description="Ray Serve's replica id.")
    device: str = Field(description="The device its engine is bound to; of a pipeline, the first.")
    stages: tuple[StageState, ...] = Field(
        (), description="Of a pipeline, in the order of its layers; else none."
    )
    address: str = Field(description="host:port of the engine's own HTTP server.")
    pid: int = Field(description="Process of the replica; its engine is a child.")
    draining: bool = Field(description="True: finishes its requests and takes no new ones.")
    role: Role = Field(description="unified, or what is sent to it: prefill or decode.")
    in_flight: int = Field(description="Requests that gateways have open on it.")
    load: ReplicaLoad | None = Field(description="None until the engine has reported.")
    borrowing: BorrowingState | None = Field(None, description="None: its model borrows nothing.")


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


class LendingModelState(_Snapshot):
    """What the configuration allows a model that lends or borrows; bytes of each replica."""

    model: str
    lend_memory: int | None
    borrow_memory: int | None
    tpot_budget: float | None = Field(
        description="Of a lender: its p99 time per output token over the undisturbed one, at most."
    )


class LendingPairState(_Snapshot):
    """A borrower and a lender that it may borrow from."""

    borrower: str
    lender: str
    enabled: bool = Field(description="False: an operator switched the pair off.")
    problem: str | None = Field(description="Why a replica has no loan: the last attempt's.")
    limits: dict[str, int] = Field(
        default_factory=dict,
        description="Bytes of KV that a plan lets the borrower's replicas have, by device.",
    )


class LendingState(_Snapshot):
    """Who lends to whom: behind ``GET /admin/v1/lending`` and ``loomserve admin lending``."""

    models: tuple[LendingModelState, ...]
    pairs: tuple[LendingPairState, ...]
    loans: tuple[LoanState, ...]
    lent: tuple[LentState, ...]


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


class BatchState(_Snapshot):
    """A batch as operators see it; times are Unix seconds."""

    id: str
    api_key: str = Field(description="The name of the key that it belongs to; empty: no key.")
    status: str = Field(description="As in OpenAI's API.")
    endpoint: str
    created_at: int
    expires_at: int
    total: int = Field(description="Lines; 0 before they are validated.")
    completed: int
    failed: int
    in_flight: int = Field(description="Lines that engines have at this moment.")
    eta_s: float | None = Field(
        description="Seconds until it is done at the present pace; null while nothing tells."
    )
    late: bool = Field(description="True: it is about to miss the end of its window.")


class StaticModelState(_Snapshot):
    """A model for batches only; counts are since the lane started."""

    name: str
    ready: bool = Field(description="False: its process is starting, or starting again.")
    problem: str | None = Field(description="Why its process ended last, until it is ready.")
    batches: int = Field(description="Static batches that were completed.")
    splits: int = Field(description="Static batches that ran out of KV memory.")


class BatchLaneState(_Snapshot):
    """What the batch lane does: behind ``GET /admin/v1/batches`` and ``loomserve batch``."""

    batches: tuple[BatchState, ...] = Field(description="Those that have not ended.")
    by_status: dict[str, int] = Field(description="Batches that are remembered, ended ones too.")
    answered_lines: int = Field(description="Lines answered well since the lane started.")
    failed_lines: int = Field(description="Lines answered with an error since then.")
    retries: int = Field(description="Attempts that engines failed on since then.")
    static_models: tuple[StaticModelState, ...] = ()
