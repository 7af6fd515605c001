"""The directory, for the store's thread that asks and the threads that hear what peers announce."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence

from loomserve.kvstore.index.directory import Directory, Holding
from loomserve.kvstore.index.journal import Change
from loomserve.kvstore.index.radix import KEY_BYTES

_KEYS_AT_ONCE = 1000
"""Taken in while the store waits: a fraction of a millisecond."""


class SharedDirectory:
    """:class:`Directory` under a lock that nobody holds for long."""

    def __init__(self, most_blocks: int) -> None:
        self._directory = Directory(most_blocks)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._directory)

    @property
    def gaps(self) -> int:
        return self._directory.gaps

    def heard(self, node: str) -> tuple[int, int]:
        with self._lock:
            return self._directory.heard(node)

    def take_contents(self, node: str, epoch: int, seq: int, changes: Sequence[Change]) -> None:
        """All that a node has, which replaces what was known of it."""
        with self._lock:
            self._directory.begin(node, epoch, seq)
        for some in _parts(changes):
            with self._lock:
                self._directory.add(node, some)
            time.sleep(0)  # else this thread keeps the interpreter from the store's

    def apply(self, node: str, epoch: int, seq: int, changes: Sequence[Change]) -> bool:
        """See :meth:`Directory.apply`."""
        with self._lock:
            return self._directory.apply(node, epoch, seq, changes)

    def drop(self, node: str) -> None:
        with self._lock:
            self._directory.drop(node)

    def keep_only(self, nodes: Collection[str]) -> None:
        with self._lock:
            self._directory.keep_only(nodes)

    def holdings(self, namespace: bytes, keys: bytes) -> list[Holding]:
        with self._lock:
            return self._directory.holdings(namespace, keys)

    def holders(self, namespace: bytes, key: bytes) -> list[str]:
        with self._lock:
            return self._directory.holders(namespace, key)


def _parts(changes: Sequence[Change]) -> Iterator[list[Change]]:
    part: list[Change] = []
    keys = 0
    for change in changes:
        part.append(change)
        keys += len(change.keys) // KEY_BYTES
        if keys >= _KEYS_AT_ONCE:
            yield part
            part, keys = [], 0
    yield part
