"""Which waiting requests start in a step: pure, in KV blocks or tokens of the engine's memory.

With chunked prefill a prompt, or what is computed again, runs beside decodes, and waiting requests
simply start in the order of the queue. Without it, AdaptiveLLM's algorithm 2 chooses.

By peak memory a request starts only if memory holds the peak of all requests together, each ending
when it is expected to (LightLLM's past-future scheduler: Gong et al., ASPLOS 2025, section 4): else
it takes room that running requests are about to grow into, and one of them is preempted soon after.
Without predictions, answers are expected to be as long as those that ended lately and were at least
as long as this one is already.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple


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


# Answers that are remembered, and fewer of which say nothing.
_MOST, _FEWEST = 1000, 16


class Growing(NamedTuple):
    """A request that runs, or may start.

    Attributes:
        tokens: Tokens of KV that it holds, or needs to start beyond what others hold already.
        left: Tokens that it is expected to generate yet.
        background: Whether it makes way to those that are not, which therefore do not count it.
    """

    tokens: int
    left: int
    background: bool = False


def peak_tokens(requests: Iterable[Growing], block_tokens: int) -> int:
    """Most tokens that all requests hold at once, each with a last block that is half full."""
    held = peak = 0
    in_order = sorted(requests, key=lambda request: request.left, reverse=True)
    for number, request in enumerate(in_order, 1):
        held += request.tokens + block_tokens // 2
        # When this one ends, those before it are still there, and have grown by as much.
        peak = max(peak, held + number * request.left)
    return peak


def fitting(
    candidates: Iterable[Growing], running: Sequence[Growing], room_tokens: int, block_tokens: int
) -> int:
    """Count the candidates that may start, from the first on, in the order of their priority. One
    that is alone always may, and none overtakes one that may not. ``running`` are all requests that
    hold memory, ``room_tokens`` those that are free, held by them, or taken by swap space."""
    started = list(running)
    for number, candidate in enumerate(candidates):
        counted = [one for one in started if candidate.background or not one.background]
        if counted and peak_tokens([*counted, candidate], block_tokens) > room_tokens:
            return number
        started.append(candidate)
    return len(started) - len(running)


@dataclass(slots=True)
class PastAnswers:
    _latest: deque[int] = field(default_factory=deque)
    _sorted: list[int] = field(default_factory=list)
    _sums: list[int] = field(default_factory=list)

    def note(self, tokens: int) -> None:
        self._latest.append(tokens)
        insort(self._sorted, tokens)
        if len(self._latest) > _MOST:
            del self._sorted[bisect_right(self._sorted, self._latest.popleft()) - 1]
        self._sums = [0, *accumulate(self._sorted)]

    def left(self, generated: int, longest: int) -> int:
        """Estimate an answer's remaining tokens, of ``longest`` at most; 0 while little is known.
        The answer is expected to be as long as the mean of the longer ones, or twice ``generated``
        if none was longer."""
        if len(self._sorted) < _FEWEST:
            return 0
        shorter = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - shorter
        whole = (self._sums[-1] - self._sums[shorter]) // longer if longer else 2 * generated
        return max(0, min(whole, longest) - generated)
