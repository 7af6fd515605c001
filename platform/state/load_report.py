"""Load report that an engine pushes to its clients: with each batch of outputs, or alone.

A frame of its own, before those of vLLM's outputs or alone. It counts the requests of all clients,
and says how many of the receiver's are among them, so that nobody counts its own twice and no clock
is read.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import NamedTuple

LOAD = b"LOAD"
"""How the frame begins; vLLM's own begin with a byte of msgpack that none of these is."""
LOAD_PERIOD_S = 0.05
"""A client without outputs gets reports no more often than that."""

_FRAME = struct.Struct("!4sQQIIdQ")


class LoadReport(NamedTuple):
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
    waiting_tokens: int = 0
    """Tokens of requests for which they have no KV memory yet."""

    def frame(self) -> bytes:
        return _FRAME.pack(LOAD, *self)


def read_load_report(frame: bytes | memoryview) -> LoadReport | None:
    """What a frame says; None: it is no load."""
    if len(frame) != _FRAME.size or frame[:4] != LOAD:
        return None
    return LoadReport(*_FRAME.unpack(frame)[1:])


class LoadBook:
    """An engine's load reports. The engine's thread writes; any may ask for a frame."""

    def __init__(self) -> None:
        self.version = 0
        """Another one after each change."""
        self._taken: Counter[int] = Counter()
        self._refused: Counter[int] = Counter()
        self._last: tuple[int, int, int, float, int] = (0, 0, 0, 0.0, 0)
        self._counted: dict[int, int] = {}

    def took(self, client: int) -> None:
        """A request of the client with this index is in the scheduler."""
        self._taken[client] += 1

    def refused(self, client: int) -> None:
        """One never comes there; told by the thread that receives."""
        self._refused[client] += 1

    def gone(self, client: int) -> None:
        self._taken.pop(client, None)
        self._refused.pop(client, None)

    def measured(
        self, steps: int, running: int, waiting: int, kv_usage: float, waiting_tokens: int = 0
    ) -> None:
        """Take in the load after a step, or after requests have left."""
        self._counted = dict(self._taken)
        self._last = steps, running, waiting, kv_usage, waiting_tokens
        self.version += 1

    def frame(self, client: int) -> bytes:
        """The last load, for the client with this index."""
        steps, *load = self._last
        counted = self._counted.get(client, 0) + self._refused.get(client, 0)
        return _FRAME.pack(LOAD, steps, counted, *load)
