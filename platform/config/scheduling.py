"""The section ``models[].scheduling``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from loomserve.platform.config.base import Bytes, Section


class Scheduling(Section):
    """How an engine serves more requests than its KV memory holds (AdaptiveLLM)."""

    queue: Literal["fair", "fcfs", "deadline", "sjf"] | None = Field(
        None,
        description="Who is served first, and preempted last. fair: waiting time for each token; "
        "fcfs: first come; deadline: the earliest x-slo-ms; sjf: the shortest (long ones starve). "
        "null: fair where the model has lengths, else fcfs.",
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
