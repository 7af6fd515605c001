"""The section ``simulated`` of a model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from loomserve.platform.config.base import Bytes, FieldError, Section

SIMULATED = "simulated"
"""The source of a model whose engines compute nothing."""


# Which fields say how a fault goes, beside when.
_SAID_BY = {"hang": {"seconds"}, "slow_down": {"seconds", "factor"}, "die": set[str]()}


class Fault(Section):
    """What goes wrong with a simulated engine, again and again."""

    what: Literal["hang", "slow_down", "die"] = Field(
        description="hang: it takes no steps, though its process answers; slow_down: its steps "
        "take longer; die: its process is killed, and its replica starts again."
    )
    after_s: float | None = Field(
        None,
        gt=0,
        description="Seconds from the engine's start, and from each end of the fault, until it "
        "comes; either this or after_requests.",
    )
    after_requests: int | None = Field(
        None, ge=1, description="How many requests come to the engine until the fault does."
    )
    spread: float = Field(
        0.0,
        ge=0,
        le=1,
        description="By what share of after_s or after_requests it may come sooner or later; seed "
        "and the engine's device decide by how much it does, the same in each run.",
    )
    seconds: float | None = Field(
        None, gt=0, description="How long it hangs, or is slow; null: for good."
    )
    factor: float | None = Field(
        None, gt=1, description="Of slow_down: how many times as long a step takes."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.after_s is None) == (self.after_requests is None):
            raise FieldError("a fault needs either after_s or after_requests", "what")
        for field in ("seconds", "factor"):
            if getattr(self, field) is not None and field not in _SAID_BY[self.what]:
                raise FieldError(f"is of no use with {self.what}: leave it out", field)
        if self.what == "slow_down" and self.factor is None:
            raise FieldError("slow_down needs a factor, such as 5", "what")
        return self


class Simulated(Section):
    """What the engines of a model with ``source: simulated`` do, and how long it takes them.

    A step takes ``step_ms``, and for each request in it ``request_ms``, for each token that it
    computes ``token_ms``, and so on. The defaults are those of a small model on a core.
    """

    seed: int = Field(0, description="Its answers are those of its seed and their prompts.")
    answer_tokens: int = Field(
        128,
        ge=1,
        description="Mean length of answers that end by themselves: from 1 to twice as many.",
    )
    start_s: float = Field(0.0, ge=0, description="How long an engine takes to start.")
    kv_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens that its KV memory holds; null: kv_cache_memory, in blocks of a small "
        "model.",
    )
    memory: Bytes | None = Field(
        None,
        description="What a replica is taken to need of its device, where devices.memory bounds "
        "that; null: next to nothing, which is what it needs.",
    )
    step_ms: float = Field(10.0, ge=0, description="Milliseconds of a step, whatever is in it.")
    token_ms: float = Field(1.0, ge=0, description="For each token, of a prompt or an answer.")
    request_ms: float = Field(0.1, ge=0, description="For each request in the step.")
    context_token_ms: float = Field(
        1e-4, ge=0, description="For each token that those requests have in KV memory."
    )
    attention_pair_ms: float = Field(
        1e-4, ge=0, description="For each pair of a token and one that it attends to."
    )
    faults: tuple[Fault, ...] = Field(
        (), description="What goes wrong with its engines, to see how the platform takes it."
    )
