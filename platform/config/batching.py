"""The section ``batch.offline_models[].batching``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from loomserve.platform.config.base import FieldError, Section

BatchingPolicy = Literal["s3", "wma", "slo_odbs", "slo_dbs", "odbs", "fifo"]
BatchOrder = Literal["hrrn", "oldest", "deadline"]
_BY_DEADLINE: tuple[BatchingPolicy, ...] = ("slo_odbs", "slo_dbs", "odbs")
_USED_BY: dict[str, tuple[BatchingPolicy, ...]] = {
    "size": ("fifo",),
    "most_waste": ("wma",),
    "threshold": _BY_DEADLINE,
    "slo_weight": ("slo_odbs", "odbs"),
    "output_weight": ("slo_odbs", "slo_dbs"),
}


class Batching(Section):
    """Which lines run together in a static batch, and which batch is next."""

    policy: BatchingPolicy = Field(
        "s3",
        description="Which lines run together. s3: bin packing by predicted lengths (S³); wma: "
        "those that waste the least memory accesses on each other (Magnus); slo_odbs, slo_dbs, "
        "odbs: in the order of deadlines, the ends of the lines' windows, a batch ending by "
        "deadlines and lengths, by lengths, by deadlines (UELLM); fifo: the next few.",
    )
    next: BatchOrder | None = Field(
        None,
        description="Which batch runs next. hrrn: that of the highest response ratio, by times "
        "learnt from batches that ran; oldest: that with the line that has waited the longest; "
        "deadline: the order of deadlines, for policies that have it; null: what suits the policy.",
    )
    size: int | None = Field(
        None,
        ge=1,
        description="Lines in a batch of fifo, which predicts nothing: so few that the longest fit "
        "into kv_cache_memory.",
    )
    most_waste: int = Field(
        4_000, ge=1, description="Φ of wma: memory accesses that a line may waste, in tokens read."
    )
    threshold: float = Field(
        4_000.0,
        gt=0,
        description="A batch of UELLM's policies ends where its cost would exceed this: its lines "
        "times the weighted sum of deadlines, in seconds, and answers, in tokens.",
    )
    slo_weight: float = Field(
        0.001, gt=0, description="Cost of a second that a deadline lies ahead, in tokens."
    )
    output_weight: float = Field(1.0, gt=0, description="Cost of a token of an answer.")

    @property
    def order(self) -> BatchOrder:
        """Which batch runs next, with what suits the policy where nothing is said."""
        if self.next is not None:
            return self.next
        if self.policy in _BY_DEADLINE:
            return "deadline"
        return "oldest" if self.policy == "fifo" else "hrrn"

    @model_validator(mode="after")
    def _fields_belong_to_the_policy(self) -> Batching:
        for name, policies in _USED_BY.items():
            unlike = getattr(self, name) != type(self).model_fields[name].default
            if unlike and self.policy not in policies:
                raise FieldError(
                    f"{self.policy} does not have it: leave it out, or set policy to "
                    f"{' or '.join(policies)}",
                    name,
                )
        if self.policy == "fifo" and self.size is None:
            raise FieldError(
                "fifo needs it: give the lines that fit into kv_cache_memory, however long", "size"
            )
        if self.next == "deadline" and self.policy not in _BY_DEADLINE:
            raise FieldError(
                f"{self.policy} has no order of deadlines: write hrrn or oldest, or set policy to "
                f"{' or '.join(_BY_DEADLINE)}",
                "next",
            )
        return self
