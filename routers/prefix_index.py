"""Index of the prompts that replicas were sent lately, by the keys of their blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from threading import Lock

import numpy as np

from loomserve.routers.base import Bools, Candidates, Ints


class Held:
    """What a table's replicas were sent of a prompt, by their rows, at this moment."""

    def __init__(self, levels: Sequence[tuple[int, int]], slots: Ints, size: int) -> None:
        """
        Args:
            levels: Numbers of blocks, the most first, and the replicas that were sent so many as
                the bits of a number, one for each slot.
            slots: Of the rows.
            size: So many slots there are.
        """
        self._levels, self._slots, self._size = levels, slots, size

    @property
    def levels(self) -> list[int]:
        """The numbers of blocks that some were sent, the most first."""
        return [blocks for blocks, _ in self._levels]

    def blocks(self, row: int) -> int:
        """Blocks at the prompt's beginning that one was sent."""
        slot = int(self._slots[row])
        return next((blocks for blocks, bits in self._levels if bits >> slot & 1), 0)

    def column(self, rows: Ints) -> Ints:
        """The same of many."""
        found, slots = np.zeros(len(rows), np.int64), self._slots[rows]
        for blocks, bits in reversed(self._levels):
            found[self._mask(bits)[slots]] = blocks
        return found

    def rows(self, level: int) -> Ints:
        """Those that were sent as much as that level, or more."""
        return np.flatnonzero(self._mask(self._levels[level][1])[self._slots])

    def some_have_less(self, candidates: Candidates, blocks: int) -> bool:
        """Whether a candidate was sent fewer blocks than one of these levels."""
        there = next(bits.bit_count() for at, bits in self._levels if at == blocks)
        return there < len(candidates) or bool(self.column(candidates.rows).min() < blocks)

    def _mask(self, bits: int) -> Bools:
        packed = np.frombuffer(bits.to_bytes(self._size // 8 + 1, "little"), np.uint8)
        return np.unpackbits(packed, bitorder="little").view(np.bool_)


class PrefixIndex:
    """Keys of the blocks that each replica was sent, the least recently sent forgotten first.

    It tells what an engine may still have in its KV cache, which forgets in the same order.
    Replicas are not asked: of a burst's first request no report is there in time for the next.
    Thread-safe, and without a clock.

    Keys are chained (:mod:`loomserve.routers.block_keys`), and a prompt's last block is forgotten
    before those that it follows. So with a key a replica has all keys before it, and the replicas
    that have a key are among those that have the key before. Sets of replicas are kept as the bits
    of a number, a bit for each replica's slot.
    """

    def __init__(self, most_keys: int = 2**16) -> None:
        """``most_keys``: bound for each replica; a key takes some 150 bytes, shared or not."""
        self._most_keys = most_keys
        self._lock = Lock()
        self._sent: dict[str, OrderedDict[int, None]] = {}
        self._holders: dict[int, int] = {}
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._ordered: tuple[tuple[str, ...], Ints] = (), np.zeros(0, np.int64)

    def sent(self, replica_id: str, keys: Sequence[int], most_keys: int | None = None) -> None:
        """Note that a replica was sent a prompt.

        ``most_keys`` is a tighter bound, such as the blocks that the replica's KV cache holds.
        """
        most = self._most_keys if most_keys is None else min(most_keys, self._most_keys)
        with self._lock:
            known, bit = self._known(replica_id), 1 << self._slots[replica_id]
            for key in reversed(keys[:most]):
                if key in known:
                    known.move_to_end(key)
                else:
                    known[key] = None
                    self._holders[key] = self._holders.get(key, 0) | bit
            while len(known) > most:
                key, _ = known.popitem(last=False)
                self._forget(key, bit)

    def match(self, keys: Sequence[int], replica_ids: tuple[str, ...]) -> Held | None:
        """What each of the replicas was sent of a prompt; None: none of all was sent any."""
        with self._lock:
            levels = list(self._levels(keys))
            if not levels:
                return None
            slots = self._slots_of(replica_ids)
            return Held(levels, slots, len(self._slots) + len(self._free))

    def retain(self, replica_ids: Collection[str]) -> None:
        """Forget all replicas but these."""
        with self._lock:
            for gone in self._slots.keys() - set(replica_ids):
                slot = self._slots.pop(gone)
                for key in self._sent.pop(gone, ()):
                    self._forget(key, 1 << slot)
                self._free.append(slot)
                self._ordered = (), np.zeros(0, np.int64)

    def sizes(self) -> dict[str, int]:
        """Keys that are known of each replica."""
        with self._lock:
            return {id_: len(known) for id_, known in self._sent.items()}

    def _known(self, replica_id: str) -> OrderedDict[int, None]:
        known = self._sent.get(replica_id)
        if known is None:
            known = self._sent[replica_id] = OrderedDict()
            self._slot_of(replica_id)
        return known

    def _slot_of(self, replica_id: str) -> int:
        slot = self._slots.get(replica_id)
        if slot is None:
            slot = self._free.pop() if self._free else len(self._slots)
            self._slots[replica_id] = slot
        return slot

    def _forget(self, key: int, bit: int) -> None:
        holders = self._holders[key] & ~bit
        if holders:
            self._holders[key] = holders
        else:
            del self._holders[key]

    def _levels(self, keys: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Numbers of blocks, the most first, each with the replicas that were sent so many.

        Of the replicas that have no more than the beginning of another's, each number comes once.
        """
        holders = self._holders
        blocks = _last(len(keys), lambda count: keys[count - 1] in holders)
        while blocks:
            bits = holders[keys[blocks - 1]]
            yield blocks, bits
            blocks = _last(blocks - 1, _differs(holders, keys, bits))

    def _slots_of(self, replica_ids: tuple[str, ...]) -> Ints:
        """The slots of replicas; those that were sent nothing get theirs, too."""
        ordered, slots = self._ordered
        if ordered is not replica_ids:
            slots = np.array([self._slot_of(id_) for id_ in replica_ids], np.int64)
            self._ordered = replica_ids, slots
        return slots


def _last(most: int, holds: Callable[[int], bool]) -> int:
    """The last of the numbers up to ``most`` for which it holds, as for all before; else 0."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _differs(holders: Mapping[int, int], keys: Sequence[int], bits: int) -> Callable[[int], bool]:
    return lambda count: holders[keys[count - 1]] != bits
