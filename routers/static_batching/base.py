"""Types of batching policies: requests with predicted lengths in, batches out.

A static batch is padded to its longest prompt and runs until its longest answer is done, so its
time and its memory depend on its longest members. Lengths are in tokens, times in seconds of
one clock. The names L, G, β, Δ and Θ are those of Magnus (Cheng et al., ICWS 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from loomserve.platform.config.batching import BatchOrder
from loomserve.platform.config.policies import PolicyOptions


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A waiting request.

    Attributes:
        id: Unique among waiting requests.
        input_tokens: L(p), tokens of its prompt; at least 1.
        predicted_tokens: G'(p), predicted tokens of its answer; at least 1.
        deadline_s: When its whole answer is wanted; None: it names no deadline.
    """

    id: str
    arrived_s: float
    input_tokens: int
    predicted_tokens: int
    deadline_s: float | None = None


def in_order_of_arrival(requests: Iterable[BatchRequest]) -> list[BatchRequest]:
    return sorted(requests, key=lambda one: (one.arrived_s, one.id))


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """Requests that run together, at least one."""

    requests: tuple[BatchRequest, ...]

    @property
    def length(self) -> int:
        """L(B): the longest prompt, to which the others are padded."""
        return max(one.input_tokens for one in self.requests)

    @property
    def generation(self) -> int:
        """G(B): the longest predicted answer, for which the others wait."""
        return max(one.predicted_tokens for one in self.requests)

    @property
    def arrived_s(self) -> float:
        """Arrival of the member that has waited the longest."""
        return min(one.arrived_s for one in self.requests)


@dataclass(frozen=True, slots=True)
class KvBudget:
    """Memory that a batch's KV may take.

    Attributes:
        bytes: Θ, of the whole batch.
        token_bytes: Δ, of one token; above 0.
    """

    bytes: int
    token_bytes: int

    def holds(self, size: int, length: int, generation: int) -> bool:
        """Whether MEM(B) = β·(L(B) + G(B))·Δ fits: padding takes memory like tokens."""
        return size * (length + generation) * self.token_bytes <= self.bytes


class FormingBatch:
    """A batch that others may join."""

    def __init__(self, first: BatchRequest) -> None:
        self.requests = [first]
        self.length, self.generation = first.input_tokens, first.predicted_tokens

    def holds(self, request: BatchRequest, memory: KvBudget) -> bool:
        """Whether it fits into memory with one more."""
        length = max(self.length, request.input_tokens)
        generation = max(self.generation, request.predicted_tokens)
        return memory.holds(len(self.requests) + 1, length, generation)

    def add(self, request: BatchRequest) -> None:
        self.requests.append(request)
        self.length = max(self.length, request.input_tokens)
        self.generation = max(self.generation, request.predicted_tokens)

    def formed(self) -> StaticBatch:
        return StaticBatch(tuple(self.requests))


class BatchingPolicy:
    """A rule that forms batches, and what it keeps for that; every request comes into exactly one.

    A batch of several requests fits into memory by their predicted lengths. A request that does not
    fit even alone has a batch of its own: its prediction may be wrong. Each offline model has one.
    """

    class Options(PolicyOptions):
        """Reads ``batching.options``; a policy that takes some has its own."""

    suits: ClassVar[BatchOrder] = "hrrn"
    """Which batch is next if nothing is said. ``deadline``: the first, for batches are formed in
    the order of deadlines; only then may that be asked for."""

    def __init__(self, options: Any) -> None:
        self.options = options

    def form(
        self, requests: Sequence[BatchRequest], memory: KvBudget, now: float
    ) -> list[StaticBatch]:
        """Batches of all these; it is asked whenever the model is idle, and one batch is taken."""
        raise NotImplementedError

    def ran(self, batch: StaticBatch, generated: int, seconds: float) -> None:
        """Note that a batch has run for so long; ``generated``: tokens of its longest answer."""
