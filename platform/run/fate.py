"""A process that ends with the one that started it, however that one ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

from loomserve.platform.run.folder import RUN_VARIABLE

_SET_PARENT_DEATH_SIGNAL = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent's thread that started it ends. For
    processes that ``multiprocessing`` started, by a thread that lives as long as their starter: a
    replica's event loop, EngineCore's main thread. Outside of a run it does nothing."""
    parent = multiprocessing.parent_process()
    if parent is None or RUN_VARIABLE not in os.environ:
        return
    end_with(parent.pid)


def end_with(parent: int | None, how: signal.Signals = signal.SIGKILL) -> None:
    """The same of a process that was started in another way, by the process with this id."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, how)
    if os.getppid() != parent:
        # It ended before the kernel was asked.
        os.kill(os.getpid(), how)
