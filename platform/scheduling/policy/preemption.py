"""Preemption modes, which decide what happens to a preempted request's KV: policies by name.

The queue's order says which request leaves (:mod:`loomserve.platform.scheduling.policy.queue`): the
one of the lowest priority, until the next step fits (AdaptiveLLM, algorithm 1). Requests that go on
with another engine are chosen by :func:`leaving`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class PreemptionMode(StrEnum):
    """How a request leaves the engine's memory and comes back."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Victim:
    """The request of the lowest priority, which is to be preempted.

    ``swap_s`` are predicted seconds to copy its ``swap_bytes`` out and in again, ``recompute_s``
    those to compute it again.
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


PREEMPTIONS: Mapping[str, Preemption] = {"adaptive": adaptive, "swap": swap, "recompute": recompute}


@dataclass(frozen=True, slots=True)
class StayingRequest:
    """A request of an engine that could go on elsewhere."""

    id: str
    tokens: int
    """Tokens of prompt and answer, whose KV it needs where it goes on."""
    waits: bool
    arrived_at: float


def leaving(requests: Iterable[StayingRequest], most: int) -> list[str]:
    """Choose at most so many requests to go on elsewhere, those first that lose least; their ids.
    Waiting ones lose nothing: the newest go first, as they would be served last here. Then go
    running ones with the fewest tokens to be loaded or computed again."""
    ordered = sorted(
        requests,
        key=lambda each: (
            not each.waits,
            -each.arrived_at if each.waits else each.tokens,
            each.tokens,
            each.id,
        ),
    )
    return [each.id for each in ordered[: max(most, 0)]]
