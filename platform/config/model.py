"""The section ``models``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from loomserve.platform.config.adapters import Adapters
from loomserve.platform.config.base import (
    AUTO,
    Bytes,
    FieldError,
    ModelName,
    Name,
    Revision,
    Section,
)
from loomserve.platform.config.elastic import Idle
from loomserve.platform.config.lending import Lending
from loomserve.platform.config.lengths import Lengths
from loomserve.platform.config.pipeline import Pipeline
from loomserve.platform.config.roles import Roles
from loomserve.platform.config.router import Router
from loomserve.platform.config.scaling import Replicas, Scaling
from loomserve.platform.config.scheduling import Scheduling

# Values that lending and borrowing allow for options of vLLM's engine, and why.
_ALLOWED_WITH_LENDING: dict[str, tuple[tuple[object, ...], str]] = {
    "tensor_parallel_size": ((1,), "a model whose attention is lent runs in one process"),
    "pipeline_parallel_size": ((1,), "a model whose attention is lent runs in one process"),
    "speculative_config": ((None,), "attention that is lent knows no speculative decoding"),
    "kv_cache_dtype": (("auto",), "attention that is lent knows no quantised KV"),
    "enforce_eager": ((True,), "a compiled model cannot look for tasks between its operators"),
    "distributed_executor_backend": (("mp",), "loans are opened through our own executor"),
    "worker_cls": ((), "a model that lends or borrows has a worker of ours"),
}


# Fields of a model that a pipeline does not allow, and why.
_REFUSED_WITH_PIPELINE = {
    "roles": "a pipeline is one replica, which both prefills and decodes",
    "lending": "a pipeline's attention is on several devices already",
    "adapters": "vLLM's adapters have been tried on engines of one device only",
}
# Options of vLLM's engine that say what adapters there are, and where that stands here.
_ADAPTER_OPTIONS = {
    "enable_lora": "adapters",
    "max_loras": "adapters.max_loras",
    "max_lora_rank": "adapters.max_lora_rank",
    "max_cpu_loras": "adapters.max_cpu_loras",
    "lora_modules": "adapters.load",
}
# Those of which requests would get adapters that they do not name, and KV that is not told apart.
_REFUSED_WITH_ADAPTERS = {
    "default_mm_loras": "requests name the adapters that they get",
    "enable_tower_connector_lora": "what a vision tower computes is not told apart by adapter",
}


class Model(Section):
    """One model as users see it: a name, where its weights are, and where it runs."""

    name: ModelName = Field(description="The name clients ask for.")
    source: str = Field(
        min_length=1,
        description="demo (the packaged SmolLM2-135M-Instruct), demo:NAME, a folder, a remote one "
        "(such as s3://BUCKET/MODEL, fetched on first use), or a hub id.",
    )
    revision: Revision | None = Field(
        None,
        description="Commit, tag or branch of a hub id; only a commit's hash is for good the same "
        "files. null: what the hub has when the model is loaded.",
    )
    devices: Annotated[tuple[Name, ...], AUTO] = Field(
        (),
        description="Where its replicas may run, one replica a device; or the stages of its one "
        "replica, with pipeline. auto: where there is room, and least to do.",
    )
    replicas: Replicas = Field(
        "auto",
        description="How many replicas to start; auto: one a device, as far as memory allows; "
        "where devices is auto, more than one only on devices that have no other model. min and "
        "max: as many between these as its load asks for.",
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
        default_factory=Scheduling,
        description="The order of its requests, and what preemption does with their KV.",
    )
    lengths: Lengths | None = Field(
        None,
        description="Predict its answers' lengths; null: answers may be as long as requests allow.",
    )
    roles: Roles | None = Field(
        None, description="Separate prefill from decode; null: every replica does both."
    )
    pipeline: Pipeline | None = Field(
        None, description="Divide its layers among its devices; null: each replica has them all."
    )
    lending: Lending | None = Field(
        None,
        description="Lend KV memory and attention, or borrow them; auto: both, as traffic has it; "
        "null: neither.",
    )
    adapters: Adapters | None = Field(
        None, description="LoRA adapters that it has, or may get; null: it takes none."
    )
    start: Literal["auto", "now", "on_demand"] = Field(
        "auto",
        description="now: with the platform; on_demand: with the first request for it; auto: now, "
        "but where devices is auto the first on each core or GPU only.",
    )
    idle: Idle | None = Field(
        None,
        description="What becomes of it without requests; null: it stays, but where start is "
        "on_demand, or devices auto, the fields' defaults hold.",
    )
    pinned: bool = Field(
        False, description="Once it is ready it stays, whoever needs its memory; idle has no say."
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of vLLM's engine under vLLM's own names, such as max_model_len; over "
        "HTTP none that names code or opens files.",
    )
    router: Router = Field(default_factory=Router, description="How requests are spread.")
    max_concurrent_requests: int = Field(
        512,
        ge=1,
        description="Requests beyond so many at once, over all replicas, are answered 429; each "
        "prompt of a request and each of its n answers counts.",
    )

    @field_validator("engine")
    @classmethod
    def _ours_stay_ours(cls, engine: dict[str, Any]) -> dict[str, Any]:
        owned = {
            "model": "source",
            "revision": "revision",
            "served_model_name": "name",
            "kv_cache_memory_bytes": "kv_cache_memory",
            "gpu_memory_utilization": "kv_cache_memory",
            "host": "server.host",
            "port": "server.port",
            "api_key": "server.api_keys",
            "allowed_media_domains": "server.media_hosts",
            "scheduler_cls": "scheduling",
            "scheduling_policy": "scheduling.queue",
            **_ADAPTER_OPTIONS,
        }
        for key in engine:
            if key in owned:
                raise FieldError(f"is set through {owned[key]!r}", key)
        return engine

    @model_validator(mode="after")
    def _replicas_fit_devices(self) -> Model:
        if len(set(self.devices)) != len(self.devices):
            raise FieldError(
                f"model {self.name!r} names a device twice; a device runs one replica of a model",
                "devices",
            )
        if isinstance(self.replicas, Scaling):
            self._check_scaling(self.replicas)
        elif not self.is_placed:
            if self.replicas != "auto" and self.replicas < 1:
                raise FieldError(
                    f"model {self.name!r} asks for {self.replicas} replicas: ask for 1 or more",
                    "replicas",
                )
            return self
        elif self.replicas != "auto" and not 1 <= self.replicas <= len(self.devices):
            raise FieldError(
                f"model {self.name!r} asks for {self.replicas} replicas on "
                f"{len(self.devices)} devices; a device runs one replica of a model, so give "
                f"1 to {len(self.devices)}",
                "replicas",
            )
        if self.roles is not None:
            self._check_roles(self.roles)
        return self

    @property
    def is_placed(self) -> bool:
        """Whether its devices are known; else the platform chooses them."""
        return bool(self.devices)

    @property
    def largest_share(self) -> float:
        """Share of a replica that the device has which has most of it: all, but of a pipeline."""
        if self.pipeline is None:
            return 1.0
        layers = self.pipeline.layers or (1,) * len(self.devices)
        return max(layers) / sum(layers)

    @property
    def most_replicas(self) -> int:
        return 1 if self.pipeline is not None else len(self.devices)

    @property
    def scaling(self) -> Scaling | None:
        """The bounds between which its load decides; None: it has as many as it is told."""
        return self.replicas if isinstance(self.replicas, Scaling) else None

    def _check_scaling(self, scaling: Scaling) -> None:
        if self.is_placed and self.pipeline is None and scaling.max > len(self.devices):
            raise FieldError(
                f"model {self.name!r} asks for up to {scaling.max} replicas on "
                f"{len(self.devices)} devices; a device runs one replica of a model, so give at "
                f"most {len(self.devices)}, or more devices",
                *("replicas", "max"),
            )
        if self.pinned and not scaling.min:
            raise FieldError(
                f"model {self.name!r} is pinned, so it is never put away: make this 1, or leave "
                "pinned out",
                *("replicas", "min"),
            )

    @model_validator(mode="after")
    def _pipeline_is_one_replica(self) -> Model:
        if self.pipeline is None:
            return self
        if self.replicas not in ("auto", 1):
            raise FieldError(
                f"model {self.name!r} is one pipeline over all its devices, so it has one "
                "replica: leave this out, or pipeline",
                "replicas",
            )
        if not self.is_placed:
            raise FieldError(
                f"model {self.name!r} has no devices for its stages: name them, or leave this out, "
                "and it is divided where no device holds it",
                "pipeline",
            )
        if self.pipeline.layers and len(self.pipeline.layers) != len(self.devices):
            raise FieldError(
                f"model {self.name!r} has {len(self.devices)} devices: give the layers of each, "
                "or leave this out",
                *("pipeline", "layers"),
            )
        for field, why in _REFUSED_WITH_PIPELINE.items():
            if getattr(self, field) is not None:
                raise FieldError(f"{why}: leave it out, or pipeline", field)
        for option in ("pipeline_parallel_size", "tensor_parallel_size"):
            if option in self.engine:
                raise FieldError("is set through 'pipeline'", "engine", option)
        return self

    @model_validator(mode="after")
    def _pinned_or_idle(self) -> Model:
        if self.pinned and self.idle is not None:
            raise FieldError(
                f"model {self.name!r} is pinned, so it is never put away: leave one of them out",
                "idle",
            )
        return self

    @property
    def idle_rules(self) -> Idle | None:
        """What holds of it without requests; None: it stays."""
        if self.pinned:
            return None
        comes_and_goes = self.start == "on_demand" or not self.is_placed
        given = self.idle or (Idle() if comes_and_goes else None)
        if self.scaling is None:
            return given
        if self.scaling.min:
            return given and Idle(sleep_after_s=given.sleep_after_s, unload_after_s=None)
        return self.idle or Idle(sleep_after_s=None, unload_after_s=self.scaling.downscale_delay_s)

    @model_validator(mode="after")
    def _adapters_reach_all_layers(self) -> Model:
        if self.adapters is None:
            return self
        if self.lending is not None:
            raise FieldError(
                "a model that lends or borrows has layers of ours, to which vLLM applies no "
                "adapter: leave it out, or lending",
                "adapters",
            )
        for option, why in _REFUSED_WITH_ADAPTERS.items():
            if self.engine.get(option):
                raise FieldError(f"{why}: leave it out", "engine", option)
        return self

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Of the adapters that it has from the start."""
        return tuple(each.name for each in self.adapters.load) if self.adapters else ()

    @model_validator(mode="after")
    def _engine_can_lend(self) -> Model:
        if self.lending is None:
            return self
        lent = self.lending.lend_memory
        if lent is not None and lent > self.kv_cache_memory:
            raise FieldError(
                f"model {self.name!r} has {self.kv_cache_memory} bytes of KV memory "
                "(kv_cache_memory) and cannot lend more",
                *("lending", "lend_memory"),
            )
        for option, (allowed, why) in _ALLOWED_WITH_LENDING.items():
            if option in self.engine and self.engine[option] not in allowed:
                raise FieldError(f"{why}: leave it out, or lending", "engine", option)
        if self.lending.among_replicas and len(self.devices) == 1:
            raise FieldError(
                f"model {self.name!r} lends and borrows, which its replicas do among themselves, "
                "and has one device: give it another, or leave lend_memory or borrow_memory out",
                "devices",
            )
        if self.lending.borrow_memory is not None or self.lending.auto:
            self._check_borrowers_scheduling()
        return self

    def _check_borrowers_scheduling(self) -> None:
        for option, refused in (("preemption", "swap"), ("chunked_recompute", False)):
            if getattr(self.scheduling, option) == refused:
                raise FieldError(
                    f"model {self.name!r} borrows memory, and KV that lies with a lender can "
                    "only be computed again, in chunks: leave this out, or borrow_memory",
                    *("scheduling", option),
                )

    def _check_roles(self, roles: Roles) -> None:
        needed = roles.prefill + roles.decode
        least = self.replicas.min if isinstance(self.replicas, Scaling) else self.replicas
        there = len(self.devices) if least == "auto" else least
        if needed > there:
            raise FieldError(
                f"model {self.name!r} asks for {needed} replicas to prefill or decode, and has "
                f"{there} {'devices' if self.replicas == 'auto' else 'replicas'}",
                "roles",
            )
