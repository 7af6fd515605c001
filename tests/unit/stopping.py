"""Stops processes of tests by SIGSTOP, which a process follows some time after it was sent."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def stopped(pid: int) -> bool:
    """Whether no thread of a process runs any more; after the signal some may, for a while."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks]
    return set(states) == {"T"}


def stop(pid: int) -> None:
    """Stop a process, and wait until none of its threads runs."""
    os.kill(pid, signal.SIGSTOP)
    while not stopped(pid):
        time.sleep(0.01)
