"""The configuration: one YAML file, one strict and frozen tree.

Everything a user may write stands here with its description; vLLM's own options pass through
under vLLM's own names in ``models[].engine``. ``load`` is the only way in, and its errors name the
field and the line of the file.
"""

from __future__ import annotations

import ipaddress
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from yaml.constructor import ConstructorError
from yaml.error import MarkedYAMLError
from yaml.reader import ReaderError

from loomserve.platform.errors import ConfigError
from loomserve.platform.rebalancing.options import Rebalancing

_SIZE = re.compile(r"^\s*(\d{1,18}(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)?\s*$")
_UNITS = {
    None: 1, "B": 1,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip

LOCAL_PROMPT_TOKENS = 128
_SMALLEST_KV_STORE = 64 * 2**20
# vLLM's options that put a connector of their own where the store's is.
_KV_TRANSFER_OPTIONS = ("kv_transfer_config", "kv_offloading_size")
# What an engine that lends or borrows leaves of vLLM's options, and why.
_LENDING_LEAVES: dict[str, tuple[tuple[object, ...], str]] = {
    "tensor_parallel_size": ((1,), "a model whose attention is lent runs in one process"),
    "pipeline_parallel_size": ((1,), "a model whose attention is lent runs in one process"),
    "speculative_config": ((None,), "attention that is lent knows no speculative decoding"),
    "kv_cache_dtype": (("auto",), "attention that is lent knows no quantised KV"),
    "enforce_eager": ((True,), "a compiled model cannot look for tasks between its operators"),
    "distributed_executor_backend": (("mp",), "loans are opened through our own executor"),
    "worker_cls": ((), "a model that lends or borrows has a worker of ours"),
}


class _FieldError(ValueError):
    """What a validator of a whole node raises to point at the field that is wrong."""

    def __init__(self, message: str, *field: str | int) -> None:
        super().__init__(message)
        self.field = field


def parse_bytes(value: object) -> int:
    """``512MiB``, ``1.5 GiB`` or a plain number of bytes.

    Raises:
        ValueError: not a size, negative or zero.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("write a size such as 512MiB or 2GiB")
    match = _SIZE.match(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a size; write a positive one such as 512MiB or 2GiB")
    size = int(float(match[1]) * _UNITS[match[2]])
    if size <= 0:
        raise ValueError(f"{value!r} must be more than zero")
    return size


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,126}$")]


class _Node(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Device(_Node):
    """A place where an engine runs: some cores of this machine, or one GPU."""

    name: Name = Field(description="What models refer to.")
    kind: Literal["cpu", "cuda"] = Field("cpu", description="cpu: some cores; cuda: one GPU.")
    cores: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="The cores that an engine on this CPU device is bound to."
    )
    gpu: Annotated[int, Field(ge=0)] | None = Field(
        None, description="The GPU's number on its node, as nvidia-smi counts."
    )

    @model_validator(mode="after")
    def _kind_has_its_place(self) -> Device:
        wanted, unwanted = ("cores", "gpu") if self.kind == "cpu" else ("gpu", "cores")
        given = {"cores": bool(self.cores), "gpu": self.gpu is not None}
        what = f"device {self.name!r} is of kind {self.kind}"
        if given[unwanted]:
            raise _FieldError(f"{what}: give it {wanted}, and no {unwanted}", unwanted)
        if not given[wanted]:
            raise _FieldError(f"{what}: give it {wanted}", wanted)
        if len(set(self.cores)) != len(self.cores):
            raise _FieldError(f"device {self.name!r} names a core twice", "cores")
        return self


class Router(_Node):
    """How requests are spread over the replicas of a model."""

    policy: Literal["load_aware", "round_robin", "power_of_two", "prefix_aware"] = Field(
        "load_aware",
        description="load_aware: BanaServe's algorithm 4-2 on measured loads; prefix_aware: Ray's.",
    )
    load_limit: float = Field(
        1.6,
        gt=0,
        le=2,
        description="δ_L: a replica whose utilisation (0 to 2) is below this takes the request.",
    )
    stale_after_s: float = Field(
        10.0, gt=0, description="A load report older than this counts as unknown."
    )


class KvStore(_Node):
    """KV blocks that outlive the engine that made them, shared by all engines of a node."""

    memory: Bytes = Field(2**30, description="Shared memory for blocks (/dev/shm).")
    ssd: Bytes | None = Field(
        None, description="Space on SSD for blocks that leave memory; without it they are lost."
    )
    ssd_path: str | None = Field(
        None,
        description="Folder for them, relative to this file; null: kv in the user's cache folder.",
    )
    eviction: Literal["cost", "lru"] = Field(
        "cost",
        description="cost: what is cheap to compute again and seldom used leaves memory first; "
        "lru: what was not used for longest.",
    )
    isolate_tenants: bool = Field(
        False,
        description="Blocks of one API key are never read by another, in the store and in engines.",
    )

    @field_validator("memory")
    @classmethod
    def _holds_blocks(cls, memory: int) -> int:
        if memory < _SMALLEST_KV_STORE:
            raise ValueError(f"must be at least {_SMALLEST_KV_STORE // 2**20}MiB")
        return memory

    @model_validator(mode="after")
    def _path_has_its_space(self) -> KvStore:
        if self.ssd_path is not None and self.ssd is None:
            raise _FieldError("is of no use without ssd: say how much space to use", "ssd_path")
        return self


class Roles(_Node):
    """Prefill and decode on replicas of their own; the KV passes through the store."""

    prefill: int = Field(
        ge=1, description="Replicas that compute prompts: those on the model's first devices."
    )
    decode: int = Field(
        ge=1,
        description="Replicas that generate tokens: those on the next devices; any others do both.",
    )
    local_prompt_tokens: int = Field(
        LOCAL_PROMPT_TOKENS,
        ge=0,
        description="A prompt of at most this length is computed where it is decoded.",
    )


class Scheduling(_Node):
    """How an engine serves more requests than its KV memory holds (AdaptiveLLM)."""

    queue: Literal["fair", "fcfs", "deadline", "sjf"] = Field(
        "fair",
        description="Who is served first, and preempted last. fair: waiting time for each token; "
        "fcfs: first come; deadline: the earliest x-slo-ms; sjf: the shortest (long ones starve).",
    )
    preemption: Literal["adaptive", "swap", "recompute"] | None = Field(
        None,
        description="What becomes of the KV of a request that must make room. swap: it goes to the "
        "KV store and comes back, and no request starts that could make that impossible; "
        "recompute: as in stock vLLM; adaptive: what is predicted to be cheaper. null: adaptive "
        "with a KV store, else recompute.",
    )
    swap_space: Bytes | None = Field(
        None,
        description="The store's memory that preempted requests of a replica may occupy; null: a "
        "half of what the model may use there, divided among its devices.",
    )
    deadlines: bool = Field(
        True, description="A request's x-slo-ms raises its priority in a fair queue as it nears."
    )
    overlap_swap: bool = Field(
        True,
        description="KV is copied to the store beside the steps that compute it; false: only when "
        "a request is preempted, and nothing else of this model is kept.",
    )
    prefetch_swap_in: bool = Field(
        True,
        description="KV comes back beside steps of other requests; false: in the step that goes on "
        "with it.",
    )
    chunked_recompute: bool = Field(
        True,
        description="Prompts, and what is computed again, run in chunks beside decodes; false: in "
        "steps of their own, as in the paper.",
    )
    peak_admission: bool = Field(
        True,
        description="With preemption: adaptive, a request starts only where memory is expected to "
        "suffice until it and all that run have ended; false: where there is room just now.",
    )


class Lengths(_Node):
    """Predictions of how long answers will be, for queues, routing and refusals."""

    predictor: Name = Field(
        description="The name given to loomserve lengths train; one predictor for each model."
    )


class Lending(_Node):
    """Attention of hot models on cold models' engines, in whose memory their KV lies (Weaver)."""

    lend_memory: Bytes | None = Field(
        None,
        description="Of a cold model: the most of a replica's KV memory that it lends while its "
        "own requests do not need it; null: it lends none. With borrow_memory: its replicas have "
        "heads or layers of one another, as prefill and decode may want it.",
    )
    borrow_memory: Bytes | None = Field(
        None,
        description="Of a hot model: the most KV that a replica may have with its lenders, beside "
        "its own kv_cache_memory; null: it borrows none.",
    )
    lenders: tuple[ModelName, ...] = Field(
        (), description="The models that it may borrow from; none named means all that lend."
    )
    placement: Literal["adaptive", "ratio", "local"] = Field(
        "adaptive",
        description="Where its requests start. adaptive: by free memory and predicted attention "
        "time; ratio: a fixed share with lenders, as in the paper; local: none with lenders.",
    )
    lent_share: float = Field(
        0.5, ge=0, le=1, description="With placement ratio: the share that starts with lenders."
    )
    patience_ms: float = Field(
        100.0, gt=0, description="A lender that takes longer for one layer is given up."
    )
    tpot_budget: float = Field(
        1.15,
        gt=1,
        description="Of a lender: its p99 time per output token may be at most so many times "
        "the undisturbed one.",
    )

    @model_validator(mode="after")
    def _lends_or_borrows(self) -> Lending:
        if self.borrow_memory is None:
            if self.lenders:
                raise _FieldError("are of no use without borrow_memory", "lenders")
            if self.lend_memory is None:
                raise ValueError(
                    "give it lend_memory or borrow_memory, or leave it out: so it does neither"
                )
        elif self.lend_memory is not None and self.lenders:
            raise _FieldError(
                "are of no use with both borrow_memory and lend_memory: replicas then lend to one "
                "another, and to no other model's",
                "lenders",
            )
        return self

    @property
    def among_replicas(self) -> bool:
        """Whether replicas of the model lend to one another, and to nobody else."""
        return self.lend_memory is not None and self.borrow_memory is not None

    @property
    def lends_to_others(self) -> bool:
        """Whether other models may borrow from this one."""
        return self.lend_memory is not None and not self.among_replicas


class Pipeline(_Node):
    """One replica over all of the model's devices: consecutive layers on each (HELR)."""

    mode: Literal["he", "lr", "balanced"] = Field(
        "balanced",
        description="What the division into stages is for. balanced: throughput; lr: the latency "
        "of a lone request; he: the fewest devices.",
    )
    layers: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        description="How many layers each of the model's devices has, in their order; none given: "
        "HELR says, from what loomserve profile devices has measured.",
    )
    batch: int = Field(8, ge=1, description="Requests of a step that HELR plans for.")
    profile: str | None = Field(
        None,
        description="What loomserve profile devices wrote, relative to this file; null: devices in "
        "the user's cache folder.",
    )


# What an engine of several stages leaves of a model's fields and of vLLM's options, and why.
_PIPELINE_LEAVES = {
    "roles": "a pipeline is one replica, which both prefills and decodes",
    "lending": "a pipeline's attention is on several devices already",
}


class Model(_Node):
    """One model as users see it: a name, where its weights are, and where it runs."""

    name: ModelName = Field(description="The name clients ask for.")
    source: str = Field(
        min_length=1,
        description="demo (the packaged SmolLM2-135M-Instruct), demo:NAME, a folder, or a hub id.",
    )
    devices: tuple[Name, ...] = Field(
        min_length=1,
        description="Where its replicas may run, one replica a device; or the stages of its one "
        "replica, with pipeline.",
    )
    replicas: int | Literal["auto"] = Field(
        "auto",
        description="How many replicas to start; auto: one a device, as far as memory allows.",
    )
    kv_cache_memory: Bytes = Field(
        512 * 2**20, description="Memory for KV blocks, for each replica, such as 512MiB."
    )
    kvstore: bool = Field(
        True,
        description="Keep its KV blocks in the store, if there is one; false for models with other "
        "state than attention's, such as Mamba.",
    )
    kvstore_quota: Bytes | None = Field(
        None, description="The store's memory that its blocks may take at most; null: all of it."
    )
    scheduling: Scheduling = Field(
        default_factory=Scheduling, description="Who is served first, and who makes room how."
    )
    lengths: Lengths | None = Field(
        None, description="Predict its answers' lengths; null: a request may be as long as it may."
    )
    roles: Roles | None = Field(
        None, description="Separate prefill from decode; null: every replica does both."
    )
    pipeline: Pipeline | None = Field(
        None, description="Divide its layers among its devices; null: each replica has them all."
    )
    lending: Lending | None = Field(
        None, description="Lend KV memory and attention, or borrow them; null: neither."
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of vLLM's engine under vLLM's own names, such as max_model_len.",
    )
    router: Router = Field(default_factory=Router, description="How requests are spread.")
    max_concurrent_requests: int = Field(
        512, ge=1, description="More than this at once over all replicas are answered 429."
    )

    @field_validator("engine")
    @classmethod
    def _ours_stay_ours(cls, engine: dict[str, Any]) -> dict[str, Any]:
        owned = {
            "model": "source",
            "served_model_name": "name",
            "kv_cache_memory_bytes": "kv_cache_memory",
            "gpu_memory_utilization": "kv_cache_memory",
            "host": "server.host",
            "port": "server.port",
            "api_key": "server.api_keys",
            "scheduler_cls": "scheduling",
            "scheduling_policy": "scheduling.queue",
        }
        for key in engine:
            if key in owned:
                raise _FieldError(f"is set through {owned[key]!r}", key)
        return engine

    @model_validator(mode="after")
    def _replicas_fit_devices(self) -> Model:
        if len(set(self.devices)) != len(self.devices):
            raise _FieldError(
                f"model {self.name!r} names a device twice; a device runs one replica of a model",
                "devices",
            )
        if self.replicas != "auto" and not 1 <= self.replicas <= len(self.devices):
            raise _FieldError(
                f"model {self.name!r} asks for {self.replicas} replicas on "
                f"{len(self.devices)} devices; a device runs one replica of a model, so give "
                f"1 to {len(self.devices)}",
                "replicas",
            )
        if self.roles is not None:
            self._check_roles(self.roles)
        return self

    @property
    def most_replicas(self) -> int:
        return 1 if self.pipeline is not None else len(self.devices)

    @model_validator(mode="after")
    def _pipeline_is_one_replica(self) -> Model:
        if self.pipeline is None:
            return self
        if self.replicas not in ("auto", 1):
            raise _FieldError(
                f"model {self.name!r} is one pipeline over all its devices, so it has one "
                "replica: leave this out, or pipeline",
                "replicas",
            )
        if self.pipeline.layers and len(self.pipeline.layers) != len(self.devices):
            raise _FieldError(
                f"model {self.name!r} has {len(self.devices)} devices: give the layers of each, "
                "or leave this out",
                *("pipeline", "layers"),
            )
        for field, why in _PIPELINE_LEAVES.items():
            if getattr(self, field) is not None:
                raise _FieldError(f"{why}: leave it out, or pipeline", field)
        for option in ("pipeline_parallel_size", "tensor_parallel_size"):
            if option in self.engine:
                raise _FieldError("is set through 'pipeline'", "engine", option)
        return self

    @model_validator(mode="after")
    def _engine_can_lend(self) -> Model:
        if self.lending is None:
            return self
        lent = self.lending.lend_memory
        if lent is not None and lent > self.kv_cache_memory:
            raise _FieldError(
                f"model {self.name!r} has {self.kv_cache_memory} bytes of KV memory "
                "(kv_cache_memory) and cannot lend more",
                *("lending", "lend_memory"),
            )
        for option, (allowed, why) in _LENDING_LEAVES.items():
            if option in self.engine and self.engine[option] not in allowed:
                raise _FieldError(f"{why}: leave it out, or lending", "engine", option)
        if self.lending.among_replicas and len(self.devices) < 2:
            raise _FieldError(
                f"model {self.name!r} lends and borrows, which its replicas do among themselves, "
                "and has one device: give it another, or leave lend_memory or borrow_memory out",
                "devices",
            )
        if self.lending.borrow_memory is not None:
            self._check_borrowers_scheduling()
        return self

    def _check_borrowers_scheduling(self) -> None:
        for option, refused in (("preemption", "swap"), ("chunked_recompute", False)):
            if getattr(self.scheduling, option) == refused:
                raise _FieldError(
                    f"model {self.name!r} borrows memory, and KV that lies with a lender can "
                    "only be computed again, in chunks: leave this out, or borrow_memory",
                    *("scheduling", option),
                )

    def _check_roles(self, roles: Roles) -> None:
        needed = roles.prefill + roles.decode
        there = len(self.devices) if self.replicas == "auto" else self.replicas
        if needed > there:
            raise _FieldError(
                f"model {self.name!r} asks for {needed} replicas to prefill or decode, and has "
                f"{there} {'devices' if self.replicas == 'auto' else 'replicas'}",
                "roles",
            )


class ApiKey(_Node):
    """A client's key, of which only the hash is kept (``loomserve key create`` prints both)."""

    name: Name = Field(description="Who uses the key; the label in metrics and logs.")
    hash: str = Field(
        pattern=r"^sha256:[0-9a-f]{64}$", description="What loomserve key create printed."
    )
    models: tuple[ModelName, ...] = Field(
        (), description="The models this key may use; none named means all."
    )
    requests_per_minute: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Requests over this rate are answered 429."
    )
    max_concurrent: Annotated[int, Field(ge=1)] | None = Field(
        None, description="More requests than this at once are answered 429."
    )
    refuse_late: bool = Field(
        False,
        description="Answer 429 at once where a request is predicted to miss its x-slo-ms; of "
        "models with lengths.",
    )


class Server(_Node):
    """The front door."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on.")
    api_keys: tuple[ApiKey, ...] = Field((), description="Without keys, anyone may ask.")
    admin_token_hash: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] | None = Field(
        None,
        description="Hash of the admin token; without it the admin API is open on loopback only.",
    )
    allow_unauthenticated: bool = Field(
        False, description="Serve without keys although the address is not loopback."
    )
    max_body: Bytes = Field(8 * 2**20, description="Larger request bodies are answered 413.")
    request_timeout_s: float = Field(
        600.0, gt=0, description="A request that takes longer is ended with 408."
    )
    header_timeout_s: float = Field(
        10.0, gt=0, description="A client must have sent its whole request by then."
    )
    max_connections: int = Field(
        1024, ge=1, description="A client that connects beyond these is answered 503."
    )
    cors_origins: tuple[str, ...] = Field((), description="Origins browsers may call from.")
    drain_timeout_s: float = Field(
        60.0, gt=0, description="How long unload, drain and stop wait for running requests."
    )

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @model_validator(mode="after")
    def _open_only_at_home(self) -> Server:
        if self.is_loopback or self.allow_unauthenticated:
            return self
        missing = [
            what
            for what, there in (
                ("api_keys", self.api_keys),
                ("admin_token_hash", self.admin_token_hash),
            )
            if not there
        ]
        if missing:
            raise _FieldError(
                f"{self.host!r} can be reached from other machines, so "
                f"{' and '.join(missing)} must be set (loomserve key create); "
                "or set allow_unauthenticated: true",
                "host",
            )
        return self

    @field_validator("api_keys")
    @classmethod
    def _keys_differ(cls, keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
        for what in ("name", "hash"):
            values = [getattr(key, what) for key in keys]
            for index, value in enumerate(values):
                if value in values[:index]:
                    raise _FieldError(f"two API keys have the same {what}", index, what)
        return keys


class StaticModel(_Node):
    """A model that answers batches only: transformers computes it, in static batches."""

    name: ModelName = Field(description="The name that lines of batches ask for.")
    source: str = Field(min_length=1, description="As in models[]: weights that transformers runs.")
    device: Name = Field(
        description="The CPU device on whose cores it computes while engines leave them idle."
    )
    kv_cache_memory: Bytes = Field(
        512 * 2**20,
        description="Memory for the KV of one batch, such as 512MiB; a batch that outgrows it is "
        "split in two.",
    )
    lengths: Lengths | None = Field(
        None, description="Predict its answers' lengths; null: by lines that have finished."
    )


class Batch(_Node):
    """OpenAI's files and batches, computed while online requests leave room."""

    folder: str | None = Field(
        None,
        description="Where files and answers are kept, relative to this file; null: batch in the "
        "user's cache folder ($LOOMSERVE_HOME).",
    )
    max_file_bytes: Bytes = Field(
        200 * 2**20, description="Larger input files are answered 413, such as 200MiB."
    )
    max_lines: int = Field(50_000, ge=1, description="Requests in one batch.")
    concurrency: int = Field(
        256,
        ge=1,
        description="Lines that engines have at once, of all batches and models; each of "
        "static_models takes as many again into its queue.",
    )
    retention_days: float = Field(
        30.0, gt=0, description="Files and ended batches are removed when they are so old."
    )
    static_models: tuple[StaticModel, ...] = Field(
        (),
        description="Models for batches only, run by transformers: those that vLLM does not serve, "
        "or that need not answer online.",
    )


class Config(_Node):
    """The whole file."""

    devices: tuple[Device, ...] = Field(min_length=1, description="Where engines may run.")
    models: tuple[Model, ...] = Field(description="What is served from the start.")
    kvstore: KvStore | None = Field(
        None, description="The store of KV blocks; without it engines forget theirs when full."
    )
    batch: Batch | None = Field(
        None, description="The batch lane; without it there are no files and no batches."
    )
    server: Server = Field(default_factory=Server, description="The front door.")
    rebalancing: Rebalancing = Field(
        default_factory=Rebalancing, description="What moves from hot devices to cold ones."
    )

    @model_validator(mode="after")
    def _models_fit_the_kv_store(self) -> Config:
        for index, model in enumerate(self.models):
            in_store = self.kvstore is not None and model.kvstore
            if model.kvstore_quota is not None and not in_store:
                raise _FieldError(
                    f"model {model.name!r} keeps nothing in a KV store: add a kvstore section to "
                    "the file and do not set the model's kvstore to false, or set no quota",
                    *("models", index, "kvstore_quota"),
                )
            if model.pipeline is not None and in_store:
                raise _FieldError(
                    f"model {model.name!r} is a pipeline, whose stages' blocks the KV store does "
                    "not keep: set its kvstore to false",
                    *("models", index, "pipeline"),
                )
            if model.roles is not None and not in_store:
                raise _FieldError(
                    f"model {model.name!r} hands its KV from prefill to decode through the KV "
                    "store: add a kvstore section to the file and do not set the model's kvstore "
                    "to false, or set no roles",
                    *("models", index, "roles"),
                )
            for option in ("preemption", "swap_space") if not in_store else ():
                if getattr(model.scheduling, option) not in (None, "recompute"):
                    raise _FieldError(
                        f"model {model.name!r} has no KV store to swap to: add a kvstore section "
                        "to the file and do not set the model's kvstore to false, or leave this "
                        "out",
                        *("models", index, "scheduling", option),
                    )
            for option in _KV_TRANSFER_OPTIONS if in_store else ():
                if option in model.engine:
                    raise _FieldError(
                        f"model {model.name!r} keeps its KV blocks in the store: set its kvstore "
                        "to false to use another connector",
                        *("models", index, "engine", option),
                    )
        return self

    @model_validator(mode="after")
    def _borrowers_have_lenders(self) -> Config:
        lend = {model.name: _lends(model) for model in self.models}
        for index, model in enumerate(self.models):
            lending = model.lending
            if lending is None or lending.borrow_memory is None or lending.among_replicas:
                continue
            if not any(lend.values()):
                raise _FieldError(
                    f"model {model.name!r} has nobody to borrow from: give another model "
                    "lending.lend_memory, and no borrow_memory",
                    *("models", index, "lending", "borrow_memory"),
                )
            for position, name in enumerate(lending.lenders):
                if not lend.get(name):
                    what = "lends nothing" if name in lend else "is not under models"
                    raise _FieldError(
                        f"model {model.name!r} cannot borrow from {name!r}, which {what}; "
                        f"those that lend: {', '.join(n for n in lend if lend[n])}",
                        *("models", index, "lending", "lenders", position),
                    )
        return self

    @model_validator(mode="after")
    def _names_agree(self) -> Config:
        _refuse_duplicates("devices", [device.name for device in self.devices])
        # Serve application names are made of model names with "/" replaced.
        _refuse_duplicates("models", [model.name.replace("/", "--") for model in self.models])
        for index, model in enumerate(self.models):
            self._check_model_devices(index, model)
        self._check_static_models()
        self._check_predictors()
        owner: dict[tuple[str, int], str] = {}
        for index, device in enumerate(self.devices):
            places = [("cores", core) for core in device.cores]
            places += [("gpu", device.gpu)] if device.gpu is not None else []
            for place in places:
                if place in owner:
                    raise _FieldError(
                        f"devices {owner[place]!r} and {device.name!r} both claim "
                        f"{place[0].removesuffix('s')} {place[1]}",
                        *("devices", index, place[0]),
                    )
                owner[place] = device.name
        return self

    @property
    def static_models(self) -> tuple[StaticModel, ...]:
        return self.batch.static_models if self.batch is not None else ()

    def _check_static_models(self) -> None:
        kinds = {device.name: device.kind for device in self.devices}
        taken = [model.name.replace("/", "--") for model in self.models]
        for index, model in enumerate(self.static_models):
            place = ("batch", "static_models", index)
            name = model.name.replace("/", "--")
            if name in taken:
                raise _FieldError(
                    f"two models are named {model.name!r}; names must differ, under models too",
                    *(*place, "name"),
                )
            taken.append(name)
            if kinds.get(model.device) != "cpu":
                there = ", ".join(sorted(name for name, kind in kinds.items() if kind == "cpu"))
                raise _FieldError(
                    f"model {model.name!r} names device {model.device!r}, which is no CPU device "
                    f"under devices ({there or 'there is none'})",
                    *(*place, "device"),
                )

    def _check_predictors(self) -> None:
        predictors: dict[str, str] = {}
        models: list[tuple[tuple[str | int, ...], Model | StaticModel]] = [
            *((("models", index), model) for index, model in enumerate(self.models)),
            *(
                (("batch", "static_models", index), model)
                for index, model in enumerate(self.static_models)
            ),
        ]
        for place, model in models:
            if model.lengths is None:
                continue
            name = model.lengths.predictor
            if name in predictors:
                raise _FieldError(
                    f"models {predictors[name]!r} and {model.name!r} both name it: answers of two "
                    "models differ in length, so train a predictor for each",
                    *(*place, "lengths", "predictor"),
                )
            predictors[name] = model.name

    def _check_model_devices(self, index: int, model: Model) -> None:
        kinds = {device.name: device.kind for device in self.devices}
        for position, name in enumerate(model.devices):
            if name not in kinds:
                raise _FieldError(
                    f"model {model.name!r} names device {name!r}, which is not under devices "
                    f"({', '.join(sorted(kinds))})",
                    *("models", index, "devices", position),
                )
        if len({kinds[name] for name in model.devices}) > 1:
            raise _FieldError(
                f"model {model.name!r} mixes CPU and GPU devices; use one kind",
                *("models", index, "devices"),
            )
        if model.lending is not None and kinds[model.devices[0]] == "cuda":
            raise _FieldError(
                f"model {model.name!r} runs on GPUs, and lending works on CPU devices only, "
                "not yet on GPUs: leave it out",
                *("models", index, "lending"),
            )

    def device(self, name: str) -> Device:
        return next(device for device in self.devices if device.name == name)


def _lends(model: Model) -> bool:
    return model.lending is not None and model.lending.lends_to_others


def _refuse_duplicates(field: str, names: list[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            message = f"two {field} are named {name!r}; names must differ"
            raise _FieldError(message, field, index, "name")


def load(path: Path) -> Config:
    """Read and check a configuration file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or a field is wrong; one line an error,
            each ``file:line: field: what is wrong``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    return parse(text, str(path))


def parse(text: str, source: str = "config") -> Config:
    """Check a configuration's text; see :func:`load`."""
    root, data = _read_yaml(text, source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source}:1: must be a mapping with devices, models and server")
    try:
        # As JSON, because pydantic's strict mode takes lists for tuples only from there.
        return Config.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, root, source))) from None


class _Loader(yaml.SafeLoader):
    """YAML of what JSON can say too: no dates, sets or binary data, which no field takes."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = node.tag.rpartition(":")[2]
        try:
            if kind not in {"bool", "float", "int", "map", "null", "seq", "str"}:
                raise ValueError
            value = super().construct_object(node, deep)
            if isinstance(value, str):
                value.encode()  # "\\ud800" is no character
        except ValueError:
            what = repr(node.value[:40]) if isinstance(node, yaml.ScalarNode) else "this"
            raise ConstructorError(
                None,
                None,
                f"{what} is no valid value ({kind}); put text in quotes",
                node.start_mark,
            ) from None
        return value


def _read_yaml(text: str, source: str) -> tuple[yaml.Node | None, Any]:
    try:
        root = yaml.compose(text, Loader=_Loader)
        _refuse_repeated_keys(root, source)
        return root, yaml.load(text, Loader=_Loader)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = " ".join(filter(None, (error.context, error.problem)))
        hint = "; indent with spaces" if r"'\t'" in problem else ""
        raise ConfigError(f"{where}: not valid YAML: {problem}{hint}") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{source}:{line}: not valid YAML: character U+{error.character:04X} is not allowed"
        ) from None
    except RecursionError:
        raise ConfigError(f"{source}:1: not valid YAML: nested too deeply") from None


def _refuse_repeated_keys(node: yaml.Node | None, source: str) -> None:
    # YAML keeps the last of two equal keys, so half of what the user wrote would vanish.
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{source}:{line}: the name of a field must be text")
            if key.value in seen:
                raise ConfigError(f"{source}:{line}: {key.value!r} is given twice")
            seen.add(key.value)
            _refuse_repeated_keys(value, source)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(item, source)


# Pydantic's types of errors whose messages speak of JSON or Python rather than of YAML.
_MESSAGES = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "extra_forbidden": "unknown field",
    "missing": "must be given",
    "model_type": "must be a mapping",
    "string_type": "must be text; put it in quotes",
    "tuple_type": "must be a list",
}


def _explain(error: ValidationError, root: yaml.Node | None, source: str) -> list[str]:
    problems: dict[str, list[str]] = {}
    for problem in error.errors():
        cause = problem.get("ctx", {}).get("error")
        within = cause.field if isinstance(cause, _FieldError) else ()
        field, line = _locate((*problem["loc"], *within), root)
        message = _MESSAGES.get(problem["type"], problem["msg"].removeprefix("Value error, "))
        # A field that may be of two types has a problem for each.
        place = f"{source}:{line}: {field}" if field else f"{source}:{line}"
        problems.setdefault(place, []).append(message)
    return [f"{place}: {', or '.join(messages)}" for place, messages in problems.items()]


def _locate(loc: tuple[int | str, ...], root: yaml.Node | None) -> tuple[str, int]:
    """The dotted name of a field and the line of the nearest thing the user wrote."""
    field, node = "", root
    line = root.start_mark.line + 1 if root else 1
    for part in loc:
        child = _child(node, part)
        if child is not None:
            line = child[0].start_mark.line + 1
        elif _is_union_tag(part):
            continue
        node = child[1] if child else None
        if isinstance(part, int):
            field += f"[{part}]"
        else:
            field += f".{part}" if field else part
    return field, line


def _is_union_tag(part: int | str) -> bool:
    # Pydantic adds the tried branch of a union ("int", "literal['auto']") to an error's place.
    return isinstance(part, str) and (part == "int" or part.startswith("literal["))


def _child(node: yaml.Node | None, part: int | str) -> tuple[yaml.Node, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        return next(((k, v) for k, v in node.value if k.value == str(part)), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    return None
