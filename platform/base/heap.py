"""What a process that lives long keeps: objects for Python's collector, and freed memory."""

from __future__ import annotations

import ctypes
import gc

# Requests leave little behind that only the collector finds, and each of its young collections
# goes through all objects of those that are open.
_YOUNG = 20_000
_MIDDLE = 20
_OLD = 20


def keep_heap() -> None:
    """Have the collector leave alone what is there now, and look at what comes less often.

    Otherwise it goes through a model's front end, some hundreds of thousands of objects, again and
    again, half a second each time. To be called after something large has come; it takes no time.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)


def settle_heap() -> None:
    """Collect what was kept and is used no more, and keep the rest. To be called after something
    large has gone: the process waits for half a second or more."""
    gc.unfreeze()
    gc.collect()
    keep_heap()


def give_back_freed() -> None:
    """Have the allocator return to the operating system what is free. glibc's keeps what lies below
    the last allocation in use, in an arena for every few threads."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # others return it by themselves
        trim(0)
