"""A model's ``adapters``: LoRA adapters, which clients ask for by name as they ask for models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from loomserve.platform.config.base import FieldError, ModelName, Section


class AdapterSource(Section):
    """One adapter of the configuration."""

    name: ModelName = Field(description="The name clients ask for.")
    source: str = Field(
        min_length=1,
        description="A PEFT folder (adapter_config.json and adapter_model.safetensors), a remote "
        "one (such as s3://BUCKET/ADAPTER), or a hub id.",
    )


class Adapters(Section):
    """How many adapters a model takes, how large, and which it has from the start."""

    max_loras: int = Field(
        4,
        ge=1,
        le=256,
        description="vLLM's: adapters that one step computes; requests of more wait for the next "
        "steps. Each takes memory for max_lora_rank, used or not.",
    )
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = Field(
        16, description="vLLM's: the largest rank that an adapter may have."
    )
    max_cpu_loras: int = Field(
        16,
        ge=1,
        le=4096,
        description="vLLM's: adapters that are loaded at once, in the host's memory; no more can "
        "be loaded.",
    )
    load: tuple[AdapterSource, ...] = Field(
        (), description="Adapters that are loaded with the model."
    )

    @model_validator(mode="after")
    def _counts_agree(self) -> Adapters:
        if self.max_cpu_loras < self.max_loras:
            raise FieldError(
                f"is {self.max_cpu_loras} and max_loras {self.max_loras}: what a step computes is "
                "loaded, so make it no less",
                "max_cpu_loras",
            )
        if len(self.load) > self.max_cpu_loras:
            raise FieldError(
                f"names {len(self.load)} adapters, and max_cpu_loras is {self.max_cpu_loras}: "
                "raise that, or load fewer",
                "load",
            )
        names: set[str] = set()
        for index, adapter in enumerate(self.load):
            if adapter.name in names:
                raise FieldError(
                    f"two adapters are named {adapter.name!r}; names must differ",
                    ("load", index, "name"),
                )
            names.add(adapter.name)
        return self
