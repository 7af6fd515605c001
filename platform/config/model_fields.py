"""The fields of the section ``models``, with ``models[].roles`` and ``models[].pipeline``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from loomserve.platform.config.adapters import Adapters
from loomserve.platform.config.base import (
    AUTO,
    Bytes,
    FieldError,
    ModelName,
    Name,
    Revision,
    Section,
    parse_count,
)
from loomserve.platform.config.elastic import Idle
from loomserve.platform.config.lending import Lending
from loomserve.platform.config.lengths import Lengths
from loomserve.platform.config.router import Router
from loomserve.platform.config.scaling import Replicas, Scaling
from loomserve.platform.config.scheduling import Scheduling
from loomserve.platform.config.simulated import SIMULATED, Simulated

LOCAL_PROMPT_TOKENS = 128
# Options of vLLM's engine that say what adapters there are, and where that stands here.
_ADAPTER_OPTIONS = {
    "enable_lora": "adapters",
    "max_loras": "adapters.max_loras",
    "max_lora_rank": "adapters.max_lora_rank",
    "max_cpu_loras": "adapters.max_cpu_loras",
    "lora_modules": "adapters.load",
}


# Those of vLLM's that its command line reads 8k of, and engines as numbers only.
_COUNTS = ("max_model_len", "max_num_batched_tokens", "max_num_scheduled_tokens")


class Roles(Section):
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


class Pipeline(Section):
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


class ModelFields(Section):
    """What a model has, each field by itself."""

    name: ModelName = Field(description="The name clients ask for.")
    source: str = Field(
        min_length=1,
        description="demo (the packaged SmolLM2-135M-Instruct), demo:NAME (gemma3-270m; "
        "all-minilm-l6-v2, for embeddings), a folder, a remote one (such as s3://BUCKET/MODEL, "
        "fetched on first use), or a hub id; simulated: no weights, and engines that compute "
        "nothing.",
    )
    simulated: Simulated | None = Field(
        None,
        description="Of source: simulated, what its engines answer and how long it takes them; "
        "null: the fields' defaults.",
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
        description="Keep its KV blocks in the store, if there is one. Nothing is kept of models "
        "with other state than attention's, such as Mamba, whatever this says.",
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
        description="Lend KV memory and attention, or borrow them; auto: both, as traffic has it, "
        "as a model without devices does if nothing is said; null: neither.",
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
        "HTTP sizes, data types, parsers and switches only.",
    )
    model_runner: Literal[1, 2] | None = Field(
        None,
        description="Which of vLLM's model runners an engine on a GPU has; without it vLLM "
        "chooses: the second, unless that lacks what the options ask for.",
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
        return engine | _counts(engine)

    @property
    def is_simulated(self) -> bool:
        return self.source == SIMULATED

    @property
    def kv_bytes(self) -> int:
        """What its KV takes of a device; of a simulated model, all that it is taken to need."""
        if not self.is_simulated:
            return self.kv_cache_memory
        return self.simulated.memory or 0 if self.simulated is not None else 0

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
    def predictor(self) -> str | None:
        """What predicts its answers' lengths, if any."""
        return self.lengths.name_for(self.name) if self.lengths is not None else None

    @property
    def most_replicas(self) -> int:
        return 1 if self.pipeline is not None else len(self.devices)

    @property
    def scaling(self) -> Scaling | None:
        """The bounds between which its load decides; None: it has as many as it is told."""
        return self.replicas if isinstance(self.replicas, Scaling) else None

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

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Of the adapters that it has from the start."""
        return tuple(each.name for each in self.adapters.load) if self.adapters else ()


def _counts(engine: dict[str, Any]) -> dict[str, int]:
    counts = {}
    for option in _COUNTS:
        value = engine.get(option)
        if isinstance(value, str):
            if option == "max_model_len" and value.strip().lower() == "auto":
                counts[option] = -1  # as vLLM's command line has it
                continue
            try:
                counts[option] = parse_count(value)
            except ValueError as error:
                raise FieldError(str(error), option) from None
    return counts
