"""An engine's load as front ends are told of it: with each of their outputs, and by itself.

A frame of its own, before those of vLLM's outputs or alone. It counts the requests of all front
ends, and says how many of the receiver's are among them, so that nobody counts its own twice and
no clock is read.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import NamedTuple

LOAD = b"LOAD"
"""How the frame begins; vLLM's own begin with a byte of msgpack that none of these is."""
LOAD_PERIOD_S = 0.05
"""A front end without outputs is told no more often than that."""

_FRAME = struct.Struct("!4sQQIId")


class ToldLoad(NamedTuple):
    """An engine's load after a step."""

    steps: int
    """Steps of the engine since its start."""
    counted: int
    """Requests that the receiver has sent on its connection, and that this load has counted."""
    running: int
    waiting: int
    """Requests in the queue, those that wait for KV or a grammar among them."""
    kv_usage: float
    """Share of KV blocks in use, 0 to 1."""

    def frame(self) -> bytes:
        return _FRAME.pack(LOAD, *self)


def load_of(frame: bytes | memoryview) -> ToldLoad | None:
    """What a frame says; None: it is no load."""
    if len(frame) != _FRAME.size or frame[:4] != LOAD:
        return None
    return ToldLoad(*_FRAME.unpack(frame)[1:])


class LoadBook:
    """What an engine tells of its load. The engine's thread writes; any may ask for a frame."""

    def __init__(self) -> None:
        self.version = 0
        """Another one after each change."""
        self._taken: Counter[int] = Counter()
        self._refused: Counter[int] = Counter()
        self._last: tuple[int, int, int, float] = (0, 0, 0, 0.0)
        self._counted: dict[int, int] = {}

    def took(self, front_end: int) -> None:
        """A request of the front end with this index is in the scheduler."""
        self._taken[front_end] += 1

    def refused(self, front_end: int) -> None:
        """One never comes there; told by the thread that receives."""
        self._refused[front_end] += 1

    def gone(self, front_end: int) -> None:
        self._taken.pop(front_end, None)
        self._refused.pop(front_end, None)

    def measured(self, steps: int, running: int, waiting: int, kv_usage: float) -> None:
        """Take in the load after a step, or after requests have left."""
        self._counted = dict(self._taken)
        self._last = steps, running, waiting, kv_usage
        self.version += 1

    def frame(self, front_end: int) -> bytes:
        """The last load, for the front end with this index."""
        steps, *load = self._last
        counted = self._counted.get(front_end, 0) + self._refused.get(front_end, 0)
        return _FRAME.pack(LOAD, steps, counted, *load)
