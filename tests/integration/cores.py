"""The cores of tests' engines where several processes run tests side by side."""

from __future__ import annotations

import os


def core(number: int = 0) -> int:
    """The machine's core for a test's core of this number; each process has its first by itself."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return (number + int(worker)) % (os.cpu_count() or 1)
