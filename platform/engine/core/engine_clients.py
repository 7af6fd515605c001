"""Engine clients, such as front ends, by identity and by index; pure, seconds of one clock."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

NOBODY = 0
"""vLLM's index for statistics of a step in which no client has an output."""


@dataclass
class _EngineClient:
    index: int
    connection: bytes
    heard_at: float
    sent_at: float = -math.inf
    sent: int = 0
    probed_at: float = -math.inf


@dataclass(frozen=True)
class Heard:
    """What a ``HELLO`` was: a client's ``first``, or one more. ``replaced`` is the index of its
    earlier connection, whose requests nobody awaits."""

    first: bool
    replaced: int | None = None


class EngineClients:
    """Registry of clients. An index is given once, so that late outputs reach nobody. One thread
    changes it; ``index_of`` may be asked by another."""

    def __init__(self, silence_s: float) -> None:
        """Without a ``HELLO`` for ``silence_s``, a client is gone."""
        self._silence_s = silence_s
        self._known: dict[bytes, _EngineClient] = {}
        self._identities: dict[int, bytes] = {}
        self._last_index = NOBODY

    def hello(self, identity: bytes, connection: bytes, now: float) -> Heard:
        """Take in a ``HELLO``; ``connection`` identifies the sockets that it came from."""
        known = self._known.get(identity)
        if known is not None and known.connection == connection:
            known.heard_at = now
            return Heard(first=False)
        replaced = self.retire(identity)
        self._last_index += 1
        self._identities[self._last_index] = identity
        self._known[identity] = _EngineClient(self._last_index, connection, now)
        return Heard(first=True, replaced=replaced)

    def retire(self, identity: bytes) -> int | None:
        """Forget a client; returns the index that it had, None if it is not known."""
        known = self._known.pop(identity, None)
        if known is None:
            return None
        del self._identities[known.index]
        return known.index

    def silent(self, now: float) -> list[bytes]:
        return [
            identity
            for identity, known in self._known.items()
            if now - known.heard_at > self._silence_s
        ]

    def probe(self, now: float, period_s: float) -> list[bytes]:
        """Clients that have neither been heard nor probed for ``period_s``, and now are. What waits
        for one that reads nothing stays short, so that its next ``HELLO`` is answered."""
        quiet = [
            (identity, known)
            for identity, known in self._known.items()
            if now - max(known.heard_at, known.probed_at) > period_s
        ]
        for _, known in quiet:
            known.probed_at = now
        return [identity for identity, _ in quiet]

    def sent(self, identity: bytes, version: int, now: float) -> None:
        """Note that a client was sent this version of the engine's load."""
        known = self._known.get(identity)
        if known is not None:
            known.sent, known.sent_at = version, now

    def unsent(self, version: int, now: float, period_s: float) -> list[bytes]:
        """Clients that were not sent this version, nor any for ``period_s``."""
        return [
            identity
            for identity, known in self._known.items()
            if known.sent != version and now - known.sent_at >= period_s
        ]

    def excuse(self, now: float) -> None:
        """Count silence from now on: it was the listener who was away."""
        for known in self._known.values():
            known.heard_at = now

    def index_of(self, identity: bytes) -> int | None:
        known = self._known.get(identity)
        return None if known is None else known.index

    def identity_of(self, index: int) -> bytes | None:
        """Who has outputs of this index; for ``NOBODY`` the one that has been there longest."""
        if index == NOBODY:
            return next(iter(self._known), None)
        return self._identities.get(index)

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._known))

    def __len__(self) -> int:
        return len(self._known)
