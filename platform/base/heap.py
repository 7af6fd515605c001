"""Python's garbage collector in a process that serves many requests."""

from __future__ import annotations

import gc

# Requests leave little behind that only the collector finds, and each of its young collections
# goes through all objects of those that are open.
_YOUNG = 20_000
_MIDDLE = 20
_OLD = 20


def settle_heap() -> None:
    """Have the collector leave alone what is there now, and look at what comes less often.

    What a model's front end is made of, some hundreds of thousands of objects, is gone through
    again and again otherwise, half a second each time. This takes as long once: it collects first.
    To be called after something large has come or gone.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
