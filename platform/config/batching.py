"""The section ``batch.offline_models[].batching``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from loomserve.platform.config.base import FieldError, Section
from loomserve.platform.config.policies import PolicyRegistry

BATCHING_POLICIES = PolicyRegistry(
    "batching policy",
    "loomserve.batching_policies",
    "loomserve.routers.static_batching.base:BatchingPolicy",
    {
        "s3": "loomserve.routers.static_batching.s3:S3",
        "wma": "loomserve.routers.static_batching.wma:Wma",
        "slo_odbs": "loomserve.routers.static_batching.slo_odbs:SloOdbs",
        "slo_dbs": "loomserve.routers.static_batching.slo_odbs:SloDbs",
        "odbs": "loomserve.routers.static_batching.slo_odbs:Odbs",
        "fifo": "loomserve.routers.static_batching.fifo:Fifo",
    },
)
BatchOrder = Literal["hrrn", "oldest", "deadline"]
_OPTIONS = ("size", "most_waste", "threshold", "slo_weight", "output_weight")
"""Fields of the section that are options of some of the platform's own policies."""


class Batching(Section):
    """Which lines run together in a static batch, and which batch is next."""

    policy: Annotated[str, BATCHING_POLICIES] = Field(
        "s3",
        description="Which lines run together. s3: bin packing by predicted lengths (S³); wma: "
        "those that waste the least memory accesses on each other (Magnus); slo_odbs, slo_dbs, "
        "odbs: in the order of deadlines, the ends of the lines' windows, a batch ending by "
        "deadlines and lengths, by lengths, by deadlines (UELLM); fifo: the next few.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Those of a policy that have no field of their own here."
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
        suits: BatchOrder = BATCHING_POLICIES.load(self.policy).suits
        return self.next or suits

    def batching_policy(self) -> Any:
        """A new :class:`~loomserve.routers.static_batching.base.BatchingPolicy`."""
        return BATCHING_POLICIES.make(self.policy, self._given())

    def _given(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in _OPTIONS if self.policy in _who_takes(name)}
        return own | self.options

    @model_validator(mode="after")
    def _fields_belong_to_the_policy(self) -> Batching:
        for name in _OPTIONS:
            unlike = getattr(self, name) != type(self).model_fields[name].default
            if unlike and self.policy not in _who_takes(name):
                raise FieldError(
                    f"{self.policy} does not have it: leave it out, or set policy to "
                    f"{' or '.join(_who_takes(name))}",
                    name,
                )
        fields = [name for name in _OPTIONS if name not in self.options]
        BATCHING_POLICIES.check(self.policy, self._given(), "options", but=fields)
        if self.next == "deadline" and BATCHING_POLICIES.load(self.policy).suits != "deadline":
            own = BATCHING_POLICIES.own
            others = [name for name in own if BATCHING_POLICIES.load(name).suits == "deadline"]
            raise FieldError(
                f"{self.policy} has no order of deadlines: write hrrn or oldest, or set policy to "
                f"{' or '.join(others)}",
                "next",
            )
        return self


def _who_takes(option: str) -> list[str]:
    """The platform's own policies that have an option; brought ones have theirs in ``options``."""
    own = BATCHING_POLICIES.own
    return [name for name in own if option in BATCHING_POLICIES.load(name).Options.model_fields]
