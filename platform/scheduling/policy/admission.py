"""Which waiting requests start in a step: pure, in KV blocks of the engine's memory.

With chunked prefill a prompt, or what is computed again, runs beside decodes, and waiting requests
simply start in the order of the queue. Without it, AdaptiveLLM's algorithm 2 chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True)
class StartCandidate:
    """A waiting request that may start.

    Attributes:
        priority: Its priority in the queue; the greater goes first.
        blocks: Blocks that it needs to start: for its computed tokens and the next one.
        most_blocks: Blocks that it may come to hold.
        swapped: Whether its KV is in swap space, so that it needs no prefill.
    """

    priority: float
    blocks: int
    most_blocks: int
    swapped: bool


@dataclass(frozen=True, slots=True)
class StartChoice:
    """Candidates that start, by their places in the given sequence; whether these are prompts."""

    chosen: tuple[int, ...]
    prefill: bool


def start(candidates: Sequence[StartCandidate], free_blocks: int, places: int) -> StartChoice:
    """Choose between swapped requests and prompts: AdaptiveLLM, algorithm 2.

    ``candidates`` are in the order of their priority, and at most ``places`` may start. Of either
    kind the largest set that fits is formed. The set of the higher mean priority starts, the
    swapped requests if they are equal.
    """
    swapped = _fitting(candidates, free_blocks, places, swapped=True)
    prefill = _fitting(candidates, free_blocks, places, swapped=False)
    if not (swapped or prefill):
        return StartChoice((), prefill=False)
    if not swapped or (prefill and _mean(candidates, prefill) > _mean(candidates, swapped)):
        return StartChoice(prefill, prefill=True)
    return StartChoice(swapped, prefill=False)


def never_computed_twice(
    candidates: Iterable[StartCandidate],
    swapped: int,
    held: Iterable[int],
    blocks: int,
    swap_blocks: int,
) -> tuple[int, ...]:
    """Choose the candidates that may start such that swap space takes whatever must leave memory.

    Swapped requests may always come back. No other overtakes one that may not start. Returns places
    among the candidates.

    Args:
        candidates: In the order of their priority, read as far as needed.
        swapped: How many candidates are swapped out.
        held: Blocks that each started request, swapped ones too, may come to hold.
        blocks: Blocks of the engine's memory.
        swap_blocks: Blocks of swap space.
    """
    room = blocks + swap_blocks - sum(held)
    chosen: list[int] = []
    for at, candidate in enumerate(candidates):
        if candidate.swapped:
            swapped -= 1
        else:
            room -= candidate.most_blocks
        if candidate.swapped or room >= 0:
            chosen.append(at)
        elif not swapped:
            break
    return tuple(chosen)


def _fitting(
    candidates: Sequence[StartCandidate], free_blocks: int, places: int, *, swapped: bool
) -> tuple[int, ...]:
    chosen: list[int] = []
    for at, candidate in enumerate(candidates):
        if candidate.swapped is not swapped:
            continue
        free_blocks -= candidate.blocks
        if free_blocks < 0 or len(chosen) == places:
            break
        chosen.append(at)
    return tuple(chosen)


def _mean(candidates: Sequence[StartCandidate], chosen: Sequence[int]) -> float:
    return fmean(candidates[at].priority for at in chosen)
