"""Engines that write blocks into reserved slots, and the time they have for it."""

from __future__ import annotations

import secrets
from collections import defaultdict
from dataclasses import dataclass

from loomserve.kvstore.index.radix import KEY_BYTES, key_at
from loomserve.kvstore.server.allocator import Reservation
from loomserve.kvstore.server.leases import ID_BITS
from loomserve.kvstore.server.protocol import WRITE_S


@dataclass(frozen=True)
class _Write:
    reservation: Reservation
    expires_at: float


class Writers:
    """Writes under way, by random ids, so that only who was given one can end it.

    Nor can an engine that outlives a store end a write of the next one.
    """

    def __init__(self) -> None:
        self._writes: dict[int, _Write] = {}
        self._being_written: dict[bytes, set[bytes]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._writes)

    def begin(self, reservation: Reservation, now: float) -> int:
        """Give the reserved slots to a writer, for ``WRITE_S`` seconds; returns its id."""
        writer = 1 + secrets.randbits(ID_BITS - 1)
        self._writes[writer] = _Write(reservation, now + WRITE_S)
        self._being_written[reservation.namespace].update(reservation.block_keys())
        return writer

    def end(self, writer: int) -> Reservation | None:
        """What the writer had reserved; None if it has ended, or is another store's."""
        write = self._writes.pop(writer, None)
        if write is None:
            return None
        reservation = write.reservation
        self._being_written[reservation.namespace].difference_update(reservation.block_keys())
        return reservation

    def end_expired(self, now: float) -> list[Reservation]:
        """End the writers whose time is up, and return what they had reserved."""
        late = [id_ for id_, write in self._writes.items() if write.expires_at <= now]
        ended = [self.end(id_) for id_ in late]
        return [reservation for reservation in ended if reservation is not None]

    def first_unwritten(self, namespace: bytes, keys: bytes, first: int) -> int:
        """Position of the first block of ``keys`` from ``first`` on that nobody is writing."""
        others = self._being_written[namespace]
        while first < len(keys) // KEY_BYTES and key_at(keys, first) in others:
            first += 1
        return first
