"""The section ``models[].scheduling``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from loomserve.platform.config.base import Bytes, FieldError, Section
from loomserve.platform.config.policies import PolicyRegistry

QUEUE_ORDERS = PolicyRegistry(
    "queue order",
    "loomserve.queue_orders",
    "loomserve.platform.scheduling.policy.queue:QueuePolicy",
    {
        "fair": "loomserve.platform.scheduling.queue_orders.fair:Fair",
        "fcfs": "loomserve.platform.scheduling.queue_orders.fcfs:Fcfs",
        "deadline": "loomserve.platform.scheduling.queue_orders.deadline:Deadline",
        "sjf": "loomserve.platform.scheduling.queue_orders.sjf:Sjf",
    },
)
QueueName = Annotated[str, QUEUE_ORDERS]


class Scheduling(Section):
    """How an engine serves more requests than its KV memory holds (AdaptiveLLM)."""

    queue: QueueName | None = Field(
        None,
        description="Who is served first, and preempted last. fair: waiting time for each token; "
        "fcfs: first come; deadline: the earliest x-slo-ms; sjf: the shortest (long ones starve). "
        "null: fair where the model has lengths, else fcfs.",
    )
    queue_options: dict[str, Any] = Field(
        default_factory=dict, description="Those of a queue order that a package brings."
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

    @model_validator(mode="after")
    def _queue_takes_the_options(self) -> Scheduling:
        if self.queue is None and self.queue_options:
            raise FieldError("are those of a queue: name it", "queue_options")
        if self.queue is not None:
            QUEUE_ORDERS.check(self.queue, self.queue_options, "queue_options")
        return self
