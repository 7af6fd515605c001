"""Copies of blocks into memory: threads fill reserved slots, and then the index learns of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

from loomserve.kvstore.index.radix import key_at
from loomserve.kvstore.server.grants import Reservation
from loomserve.kvstore.server.memory_tier import MemoryTier


class Copy(NamedTuple):
    """Blocks on their way into reserved slots, in parts side by side.

    The result of a part is the number of its first block that is not whole, or of all blocks.
    """

    reservation: Reservation
    ready_at: float
    recompute_s: float
    parts: Sequence[Future[int]]
    ended: Callable[[int, float], None]
    """Gets the number of whole blocks, from the first on, and the time."""

    @property
    def start(self) -> tuple[bytes, bytes]:
        reservation = self.reservation
        return reservation.namespace, key_at(reservation.keys, reservation.first)


class CopyQueue:
    """Copies under way. A chain's blocks are copied once, however many ask for them."""

    def __init__(self, memory: MemoryTier, threads: Executor) -> None:
        self._memory = memory
        self._threads = threads
        self._copies: dict[tuple[bytes, bytes], Copy] = {}

    @property
    def busy(self) -> bool:
        return bool(self._copies)

    def under_way(self, namespace: bytes, key: bytes) -> Copy | None:
        return self._copies.get((namespace, key))

    def begin(
        self,
        reservation: Reservation,
        parts: Sequence[Callable[[], int]],
        ended: Callable[[int, float], None],
        *,
        recompute_s: float,
        ready_at: float,
    ) -> Copy:
        futures = [self._threads.submit(part) for part in parts]
        copy = Copy(reservation, ready_at, recompute_s, futures, ended)
        self._copies[copy.start] = copy
        return copy

    def take_in(self, now: float) -> None:
        """Put what was copied into the index."""
        for copy in list(self._copies.values()):
            if all(part.done() for part in copy.parts):
                del self._copies[copy.start]
                whole = min(part.result() for part in copy.parts)
                self._memory.fill(copy.reservation, whole, now, copy.recompute_s)
                copy.ended(whole, now)

    def close(self) -> None:
        """Wait for the copies that have begun."""
        self._threads.shutdown(cancel_futures=True)
