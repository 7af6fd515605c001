"""Waiting for what happens soon, in another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 240.0
"""How long a test waits for what comes at once where nobody else is busy: far longer than it takes
where others have most of the cores, so that only who waits for ever fails."""
_LOOK_S, _LONGEST_LOOK_S = 0.01, 0.2


def within(seconds: float, holds: Callable[[], object]) -> None:
    """Wait until it holds; it fails the test if it does not, though others had the cores.

    Args:
        seconds: how long it may take by itself, on a machine that has nothing else to do.
    """
    until, look_s = time.monotonic() + seconds + PATIENCE_S, _LOOK_S
    while not holds():
        assert time.monotonic() < until, f"it does not hold after {seconds + PATIENCE_S:g} s"
        time.sleep(look_s)
        # What takes long is looked at less often: each look may ask a whole platform.
        look_s = min(1.2 * look_s, _LONGEST_LOOK_S)


def fastest(what: Callable[[], object], times: int = 20) -> float:
    """The seconds of the fastest of several runs, all of which no neighbour delays."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        what()
        took.append(time.perf_counter() - began)
    return min(took)
