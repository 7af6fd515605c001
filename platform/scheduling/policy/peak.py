"""Admission by peak memory: pure, in tokens of KV.

A request that starts because there is room just now takes room that running requests are about to
grow into, and one of them is preempted soon after. So a request starts only if memory holds the
peak of all requests together, each ending when it is expected to (LightLLM's past-future scheduler:
Gong et al., ASPLOS 2025, section 4). Without predictions, answers are expected to be as long as
those that ended lately and were at least as long as this one is already.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

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
    """Count the candidates that may start, from the first on, in the order of their priority.

    One that is alone always may, and none overtakes one that may not. ``running`` are all requests
    that hold memory, ``room_tokens`` those that are free, held by them, or taken by swap space.
    """
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
        if none was longer.
        """
        if len(self._sorted) < _FEWEST:
            return 0
        shorter = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - shorter
        whole = (self._sums[-1] - self._sums[shorter]) // longer if longer else 2 * generated
        return max(0, min(whole, longest) - generated)
