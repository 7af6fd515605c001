"""A clock that does not step, as the time of day does."""

from __future__ import annotations

import time
from collections.abc import Callable


def steady_unix_clock() -> Callable[[], float]:
    """A clock in Unix seconds that takes the time of day once, and goes on by itself. It counts the
    time in which the machine sleeps, and follows no step of the machine's clock."""
    began = time.time() - _since_boot()
    return lambda: began + _since_boot()


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
