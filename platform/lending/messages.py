"""Messages of loans: what two replicas, and a replica and its own engine, tell each other.

An engine's answers cross vLLM's RPC as JSON: each end makes or reads them by these classes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import Field

from loomserve.platform.base.frozen import Frozen
from loomserve.platform.lending.policy.slicing import SlicingPlan
from loomserve.platform.state import ShardState

EngineRpc = Callable[..., Awaitable[Any]]
"""Calls a method of the engine's ``EngineLoanCalls`` between two steps, by name."""


class HostedModel(Frozen):
    """Layers of a borrower that its lender loads and computes."""

    of: tuple[int, int] = Field(description="Decoder layers: the first, and the one behind.")
    model: str = Field(description="Folder or hub id of the weights.")
    options: dict[str, Any] = Field(description="vLLM's, so that the lender computes the same.")


class BorrowerEngine(Frozen):
    """A borrower's engine as its lender has to know it."""

    geometry: str = Field(description="JSON of the attention's Geometry that is lent.")
    blocks: int = Field(description="KV blocks that it would hold with the lender at most.")
    least: int = Field(description="Fewer blocks are of no use to it.")
    max_tokens: int = Field(description="Of a step.")
    max_requests: int = Field(description="Of a step.")
    max_blocks: int = Field(description="Of a request.")
    layers: HostedModel | None = None


class LendRequest(Frozen):
    """A borrower's replica asks a lender's replica for a loan."""

    name: str
    ring: str = Field(description="Path in shared memory at which the lender makes the task ring.")
    borrower: str = Field(description="The model that borrows.")
    engine: BorrowerEngine


class LendAnswer(Frozen):
    """The lender's replica has opened a loan."""

    blocks: int = Field(description="KV blocks of the borrower's that may come to lie there.")


class TaskCounts(Frozen):
    """Of a loan's tasks, as its engine reads them from the ring
    (:class:`~loomserve.platform.lending.ring.words.RingStats`); times are in ns."""

    tasks: int = 0
    post_ns: int = 0
    wait_ns: int = 0
    wait_max_ns: int = 0
    polled: int = Field(0, description="Tasks computed within the lender's steps.")
    idled: int = Field(0, description="Tasks computed while the lender had nothing to do.")
    service_ns: int = 0
    pickup_ns: int = 0

    @property
    def served(self) -> int:
        return self.polled + self.idled


class LoanReport(TaskCounts):
    """One loan, as the borrower's engine counts it: blocks are its own."""

    name: str
    partition: int
    usable_blocks: int
    free_blocks: int
    requests: int
    open: bool
    phase: str
    shard: ShardState | None = Field(description="How far it has moved, whichever it is.")
    most_tokens: int


class BorrowerReport(Frozen):
    """All that an engine has borrowed."""

    own_blocks: int
    own_free_blocks: int
    moved: int = Field(description="Running requests whose KV was copied to another partition.")
    broken: dict[str, int] = Field(description="Loans that ended by themselves, by reason.")
    loans: tuple[LoanReport, ...]


class LentReport(TaskCounts):
    """One loan, as the lender's engine counts it: blocks are its own."""

    name: str
    blocks: int
    most_blocks: int
    taken_back_blocks: int
    closed: str = Field(description="Why the task ring is closed; OPEN while it is not.")
    slicing: dict[str, SlicingPlan] = Field(description="By kind of step.")

    @property
    def is_open(self) -> bool:
        return self.closed == "OPEN"
