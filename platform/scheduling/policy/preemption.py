"""What happens to the KV of a request that must leave the engine's memory: pure policies, by name.

Which request leaves is the queue's order (:mod:`loomserve.platform.scheduling.policy.queue`): that
of the lowest priority, one after the other, until the next step fits (AdaptiveLLM, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class PreemptionMode(StrEnum):
    """Out of the engine's memory, and back."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Victim:
    """The request of the lowest priority.

    Attributes:
        swap_bytes: What its KV takes in swap space.
        swap_s: Predicted seconds to copy it out and in again.
        recompute_s: Predicted seconds to compute it again.
    """

    swap_bytes: int
    swap_s: float
    recompute_s: float


Preemption = Callable[[Victim, int], PreemptionMode]
"""Of a victim and the free bytes of swap space."""


def adaptive(victim: Victim, free_bytes: int) -> PreemptionMode:
    """The way that is predicted to be the cheaper one: AdaptiveLLM, algorithm 1."""
    if victim.swap_s < victim.recompute_s:
        return swap(victim, free_bytes)
    return PreemptionMode.RECOMPUTE


def swap(victim: Victim, free_bytes: int) -> PreemptionMode:
    """Always to swap space, if there is room."""
    return PreemptionMode.SWAP if victim.swap_bytes <= free_bytes else PreemptionMode.RECOMPUTE


def recompute(victim: Victim, free_bytes: int) -> PreemptionMode:
    """As stock vLLM does."""
    return PreemptionMode.RECOMPUTE


PREEMPTIONS: Mapping[str, Preemption] = {
    "adaptive": adaptive,
    "swap": swap,
    "recompute": recompute,
}
