"""What changes in an index, for those who keep a copy of which blocks it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple


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


Journal = list[Change]
"""Collects changes, in order: a block's ancestors come before it, and go after it."""
Run = tuple[bytes, bytes, int]
"""Namespace and keys of blocks that follow each other, and so many bytes of the keys: those of
blocks in memory, which come first. The others are on SSD only."""


def as_changes(runs: Iterable[Run]) -> Iterator[Change]:
    """What brings blocks to where they are, for one who knows of none."""
    for namespace, keys, in_memory in runs:
        if in_memory:
            yield Change(namespace, Tier.MEMORY, keys[:in_memory])
        if in_memory < len(keys):
            yield Change(namespace, Tier.SSD, keys[in_memory:])
