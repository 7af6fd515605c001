"""Memory that was freed, given back to the system at once."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """glibc keeps what is freed below anything still in use, however large it is."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # other allocators give it back by themselves
        trim(0)
