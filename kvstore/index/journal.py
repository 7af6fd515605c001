"""What changes in an index, for those who keep a copy of which blocks it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple, Protocol


class Tier(IntEnum):
    """Where a node has a block: the faster place, if it has it in two."""

    GONE = 0
    SSD = 1
    MEMORY = 2


class Change(NamedTuple):
    """Blocks of a namespace, and where they are from now on; ``keys`` of 16 bytes each."""

    namespace: bytes
    tier: Tier
    keys: bytes


Run = tuple[bytes, bytes, int]
"""Namespace and keys of blocks that follow each other, and so many bytes of the keys: those of
blocks in memory, which come first. The others are on SSD only."""


def as_changes(runs: Iterable[Run]) -> Iterator[Change]:
    """What brings blocks to where they are, for whoever knows of none."""
    for namespace, keys, in_memory in runs:
        if in_memory:
            yield Change(namespace, Tier.MEMORY, keys[:in_memory])
        if in_memory < len(keys):
            yield Change(namespace, Tier.SSD, keys[in_memory:])


class Journal(Protocol):
    """Is told of each change, in order. A block's ancestors come before it, and go after it."""

    def there(self, namespace: bytes, keys: bytes, *, in_memory: bool) -> None:
        """These blocks are in memory; or only on SSD."""

    def gone(self, namespace: bytes, keys: bytes) -> None:
        """These blocks are in neither place."""


class ChangeList:
    """Journal that keeps what it is told until it is taken."""

    def __init__(self) -> None:
        self._changes: list[Change] = []

    def __len__(self) -> int:
        return len(self._changes)

    def there(self, namespace: bytes, keys: bytes, *, in_memory: bool) -> None:
        self._changes.append(Change(namespace, Tier.MEMORY if in_memory else Tier.SSD, keys))

    def gone(self, namespace: bytes, keys: bytes) -> None:
        self._changes.append(Change(namespace, Tier.GONE, keys))

    def take(self) -> list[Change]:
        """All changes since the last call."""
        changes, self._changes = self._changes, []
        return changes
