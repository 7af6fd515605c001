"""Waiting for what happens soon, in another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable

_LOOK_S = 0.01


def within(seconds: float, holds: Callable[[], bool]) -> None:
    """Wait until it holds; it fails the test if it does not in time."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"it does not hold after {seconds:g} s"
        time.sleep(_LOOK_S)
