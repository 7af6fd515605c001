"""Preemption modes, which decide what happens to a preempted request's KV: policies by name.

The queue's order says which request leaves (:mod:`loomserve.platform.scheduling.policy.queue`): the
one of the lowest priority, until the next step fits (AdaptiveLLM, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class PreemptionMode(StrEnum):
    """How a request leaves the engine's memory and comes back."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Victim:
    """The request of the lowest priority, which is to be preempted.

    Attributes:
        swap_bytes: Bytes that its KV takes in swap space.
        swap_s: Predicted seconds to copy it out and in again.
        recompute_s: Predicted seconds to compute it again.
    """

    swap_bytes: int
    swap_s: float
    recompute_s: float


Preemption = Callable[[Victim, int], PreemptionMode]
"""Chooses the mode from a victim and the free bytes of swap space."""


def adaptive(victim: Victim, free_bytes: int) -> PreemptionMode:
    """Choose the mode that is predicted to be cheaper: AdaptiveLLM, algorithm 1."""
    if victim.swap_s < victim.recompute_s:
        return swap(victim, free_bytes)
    return PreemptionMode.RECOMPUTE


def swap(victim: Victim, free_bytes: int) -> PreemptionMode:
    """Swap whenever swap space has room."""
    return PreemptionMode.SWAP if victim.swap_bytes <= free_bytes else PreemptionMode.RECOMPUTE


def recompute(victim: Victim, free_bytes: int) -> PreemptionMode:
    """Compute again, as stock vLLM does."""
    return PreemptionMode.RECOMPUTE


PREEMPTIONS: Mapping[str, Preemption] = {
    "adaptive": adaptive,
    "swap": swap,
    "recompute": recompute,
}
