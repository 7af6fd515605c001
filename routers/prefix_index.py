"""Index of the prompts that replicas were sent lately, by the keys of their blocks.

A key is the hash of its block and of the key before it, so two prompts have a key in common only if
they are the same up to the end of its block. The first is hashed with the model, its adapter and
the tenant's cache salt: an engine shares KV blocks within these only, and so do keys.

They are hashes of 64 bits by xxh3, which tells at each block's end what it is of all so far. Only
the process that routes has them. Should two differing blocks have the same, a prompt goes to a
replica that has less of it than was thought, and computes it there.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from threading import Lock

import numpy as np
from xxhash import xxh3_64

from loomserve.routers.base import Candidates, Ints

BLOCK_TOKENS = 64
"""Several of vLLM's blocks (16 tokens): less to hash, and shorter prefixes save nothing."""
MOST_BLOCKS = 2048
"""A prompt's blocks beyond have no keys."""


def token_keys(
    tokens: Iterable[int],
    *,
    model: str,
    salt: str | None,
    adapter: str | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> tuple[int, ...]:
    """A key for each full block of a prompt's tokens, the last token's block only if it is full.
    Raises OverflowError if a token is below 0, or above 2³² - 1."""
    packed = array("I", tokens)
    size = block_tokens * packed.itemsize
    blocks = memoryview(packed).cast("B")
    hashed = xxh3_64(repr((block_tokens, model, adapter, salt)).encode())
    keys = []
    for start in range(0, min(len(blocks), MOST_BLOCKS * size) - size + 1, size):
        hashed.update(blocks[start : start + size])
        keys.append(hashed.intdigest())
    return tuple(keys)


Level = tuple[int, Collection[str]]
"""A number of blocks, and the replicas that were sent so many."""


class Held:
    """What a table's replicas were sent of a prompt, by their rows, at this moment."""

    def __init__(
        self, levels: Sequence[Level], ids: Sequence[str], row_of: Mapping[str, int]
    ) -> None:
        """``levels``: the most blocks first, each with all that were sent so many or more."""
        self._ids, self._row_of = ids, row_of
        self.levels = [blocks for blocks, _ in levels]
        """The numbers of blocks that some were sent, the most first."""
        self.holders = [ids for _, ids in levels]

    def level(self, row: int) -> int:
        """The place of one's number of blocks in the levels; their number if it was sent none."""
        id_, holders = self._ids[row], self.holders
        if id_ not in holders[-1]:
            return len(holders)
        return next((at for at, there in enumerate(holders) if id_ in there), len(holders))

    def column(self, rows: Ints) -> Ints:
        """The blocks at the prompt's beginning that each was sent."""
        found = np.zeros(len(self._ids), np.int64)
        for level in reversed(range(len(self.levels))):
            found[self.rows(level)] = self.levels[level]
        return found[rows]

    def rows(self, level: int) -> list[int]:
        """Those that were sent as much as that level, or more."""
        row_of = self._row_of
        return [row_of[id_] for id_ in tuple(self.holders[level]) if id_ in row_of]

    def some_have_less(self, candidates: Candidates, level: int) -> bool:
        """Whether a candidate was sent less than that level."""
        holders, ids = self.holders[level], self._ids
        if len(holders) < len(candidates):
            return True
        others = sum(ids[row] in holders for row in candidates.not_among())
        return len(holders) - others < len(candidates)


class PrefixIndex:
    """Keys of the blocks that each replica was sent, the least recently sent forgotten first.

    It tells what an engine may still have in its KV cache, which forgets in the same order: of a
    burst's first request no report is there in time for the next. Thread-safe, without a clock.

    Keys are chained (:mod:`loomserve.routers.prefix_index`), and a prompt's last block is forgotten
    before those that it follows. So with a key a replica has all keys before it, and the replicas
    that have a key are among those that have the key before: where these are as many, they are the
    same.
    """

    def __init__(self, most_keys: int = 2**16) -> None:
        """``most_keys``: bound for each replica; a key takes some 150 bytes, or 200 if shared."""
        self._most_keys = most_keys
        self._lock = Lock()
        self._sent: dict[str, OrderedDict[int, None]] = {}
        self._holders: dict[int, str | set[str]] = {}
        """The only replica that has a key, or all that have."""

    def sent(self, replica_id: str, keys: Sequence[int], most_keys: int | None = None) -> None:
        """Note that a replica was sent a prompt. ``most_keys`` is a tighter bound, such as the
        blocks that the replica's KV cache holds."""
        most = self._most_keys if most_keys is None else min(most_keys, self._most_keys)
        keys, holders = keys[:most], self._holders
        with self._lock:
            known = self._sent.get(replica_id)
            if known is None:
                known = self._sent[replica_id] = OrderedDict()
            shared = _last(len(keys), lambda count: keys[count - 1] in holders)
            has = _last(shared, lambda count: keys[count - 1] in known) if known else 0
            for key in reversed(keys[shared:]):
                known[key] = None
                holders[key] = replica_id
            for key in reversed(keys[has:shared]):
                known[key] = None
                there = holders[key]
                if isinstance(there, str):
                    holders[key] = {there, replica_id}
                else:
                    there.add(replica_id)
            for key in reversed(keys[:has]):
                known.move_to_end(key)
            while len(known) > most:
                key, _ = known.popitem(last=False)
                self._forget(key, replica_id)

    def match(self, keys: Sequence[int]) -> list[Level]:
        """The numbers of blocks at a prompt's beginning that replicas were sent, the most first,
        with sets of the index's own, which change with what is sent."""
        holders, levels = self._holders, list[Level]()
        with self._lock:
            blocks = _last(len(keys), lambda count: keys[count - 1] in holders)
            while blocks:
                there = holders[keys[blocks - 1]]
                some = (there,) if isinstance(there, str) else there
                levels.append((blocks, some))
                blocks = self._held_by_more(keys[: blocks - 1], len(some))
        return levels

    def retain(self, replica_ids: Collection[str]) -> None:
        """Forget all replicas but these."""
        with self._lock:
            for gone in self._sent.keys() - set(replica_ids):
                for key in self._sent.pop(gone):
                    self._forget(key, gone)

    def _forget(self, key: int, replica_id: str) -> None:
        there = self._holders[key]
        if isinstance(there, str):
            del self._holders[key]
            return
        there.remove(replica_id)
        if len(there) == 1:
            self._holders[key] = next(iter(there))

    def _held_by_more(self, keys: Sequence[int], than: int) -> int:
        """How many of the keys at a prompt's beginning more replicas have."""

        def more(count: int) -> bool:
            there = self._holders[keys[count - 1]]
            return not isinstance(there, str) and len(there) > than

        return _last(len(keys), more) if keys and more(1) else 0


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
