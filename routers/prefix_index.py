"""Index of the prompts that replicas were sent lately, by the keys of their blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from threading import Lock


class PrefixIndex:
    """Keys of the blocks that each replica was sent, the least recently sent forgotten first.

    It tells what an engine may still have in its KV cache, which forgets in the same order.
    Replicas are not asked: of a burst's first request no report is there in time for the next.
    Thread-safe, and without a clock.

    Keys are chained (:mod:`loomserve.routers.block_keys`), and a prompt's last block is forgotten
    before those that it follows. So with a key a replica has all keys before it.
    """

    def __init__(self, most_keys: int = 2**16) -> None:
        """``most_keys``: bound for each replica; a key takes about 150 bytes."""
        self._most_keys = most_keys
        self._lock = Lock()
        self._sent: dict[str, OrderedDict[bytes, None]] = {}

    def sent(self, replica_id: str, keys: Sequence[bytes], most_keys: int | None = None) -> None:
        """Note that a replica was sent a prompt.

        ``most_keys`` is a tighter bound, such as the blocks that the replica's KV cache holds.
        """
        most = self._most_keys if most_keys is None else min(most_keys, self._most_keys)
        with self._lock:
            known = self._sent.setdefault(replica_id, OrderedDict())
            for key in reversed(keys[:most]):
                known[key] = None
                known.move_to_end(key)
            while len(known) > most:
                known.popitem(last=False)

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Blocks at the prompt's beginning that each replica was sent; without those with none."""
        with self._lock:
            found = {id_: _longest(keys, known) for id_, known in self._sent.items()}
        return {id_: blocks for id_, blocks in found.items() if blocks}

    def retain(self, replica_ids: Collection[str]) -> None:
        """Forget all replicas but these."""
        with self._lock:
            for gone in self._sent.keys() - set(replica_ids):
                del self._sent[gone]

    def sizes(self) -> dict[str, int]:
        """Keys that are known of each replica."""
        with self._lock:
            return {id_: len(known) for id_, known in self._sent.items()}


def _longest(keys: Sequence[bytes], known: Collection[bytes]) -> int:
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] in known:
            low = middle
        else:
            high = middle - 1
    return low
