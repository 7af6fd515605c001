"""Directory: which other nodes have which blocks, as far as they have said so.

Entries are hints: a holder looks for itself, so a wrong one costs a recomputation and no wrong
byte. A key stands for its block and all before it, and what a node has is closed under prefixes. So
a chain's length on a node is found by bisection.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from loomserve.kvstore.index.journal import Change, Tier
from loomserve.kvstore.index.radix import KEY_BYTES


class Holding(NamedTuple):
    """Lengths, in blocks, of a chain's longest prefixes on a node (SSD included), in memory."""

    node: str
    resident: int
    in_memory: int


@dataclass
class _Node:
    """Blocks of a node as of its message ``seq`` of this ``epoch``: the tier by key."""

    epoch: int
    seq: int
    blocks: dict[bytes, dict[bytes, Tier]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.blocks.values()))


class Directory:
    """Blocks of other nodes as they announce them; beyond ``most_blocks`` nothing is noted. For any
    number of threads, none of which holds it for long."""

    def __init__(self, most_blocks: int) -> None:
        self._most_blocks = most_blocks
        # Its methods call each other.
        self._lock = threading.RLock()
        self._nodes: dict[str, _Node] = {}
        self._count = 0
        self.gaps = 0
        """Messages that were missed, since the start."""

    def __len__(self) -> int:
        """Entries: a block of two nodes counts twice."""
        return self._count

    def heard(self, node: str) -> tuple[int, int]:
        """Epoch and number of the last message that was taken in; zeros: none was."""
        with self._lock:
            known = self._nodes.get(node)
            return (known.epoch, known.seq) if known is not None else (0, 0)

    def begin(self, node: str, epoch: int, seq: int) -> None:
        """All contents of a node follow, as of its message ``seq``: what was known is forgotten."""
        with self._lock:
            self.drop(node)
            self._nodes[node] = _Node(epoch, seq)

    def add(self, node: str, changes: Iterable[Change]) -> None:
        with self._lock:
            known = self._nodes.get(node)
            if known is not None:
                for change in changes:
                    self._apply(known, change)

    def apply(self, node: str, epoch: int, seq: int, changes: Iterable[Change]) -> bool:
        """Take a message in; one that was taken in before changes nothing. False, and the node's
        entries are gone, if a message is missing: all contents are wanted."""
        with self._lock:
            known = self._nodes.get(node)
            if known is not None and known.epoch == epoch and seq <= known.seq:
                return True
            if known is None or known.epoch != epoch or seq != known.seq + 1:
                self.gaps += known is not None and known.epoch == epoch
                self.drop(node)
                return False
            known.seq = seq
            for change in changes:
                self._apply(known, change)
            return True

    def drop(self, node: str) -> None:
        """Forget a node: it is gone, or what is known of it is not to be trusted."""
        with self._lock:
            known = self._nodes.pop(node, None)
            if known is not None:
                self._count -= len(known)

    def keep_only(self, nodes: Collection[str]) -> None:
        with self._lock:
            for node in [node for node in self._nodes if node not in nodes]:
                self.drop(node)

    def holdings(self, namespace: bytes, keys: bytes) -> list[Holding]:
        """What each node has of a chain, of those that have something."""
        with self._lock:
            found: list[Holding] = []
            length = len(keys) // KEY_BYTES
            for name, node in self._nodes.items():
                tiers = node.blocks.get(namespace)
                if not tiers or keys[:KEY_BYTES] not in tiers:
                    continue
                resident = _prefix(tiers, keys, length, Tier.SSD)
                found.append(Holding(name, resident, _prefix(tiers, keys, resident, Tier.MEMORY)))
            return found

    def holders(self, namespace: bytes, key: bytes) -> list[str]:
        """Nodes that have a block in memory."""
        with self._lock:
            return [
                name
                for name, node in self._nodes.items()
                if node.blocks.get(namespace, {}).get(key) == Tier.MEMORY
            ]

    def _apply(self, node: _Node, change: Change) -> None:
        keys, gone = change.keys, change.tier is Tier.GONE
        blocks = node.blocks.setdefault(change.namespace, {})
        before = len(blocks)
        room = self._most_blocks - self._count
        for at in range(0, len(keys), KEY_BYTES):
            key = keys[at : at + KEY_BYTES]
            if gone:
                blocks.pop(key, None)
            elif len(blocks) - before < room or key in blocks:
                blocks[key] = change.tier
        self._count += len(blocks) - before
        if not blocks:
            del node.blocks[change.namespace]


def _prefix(tiers: Mapping[bytes, Tier], keys: bytes, length: int, least: Tier) -> int:
    """Length of the longest prefix, of the first ``length`` blocks, that is in such a tier."""

    def too_slow(position: int) -> bool:
        at = position * KEY_BYTES
        return tiers.get(keys[at : at + KEY_BYTES], Tier.GONE) < least

    if length and not too_slow(length - 1):
        return length
    return bisect_left(range(length), True, key=too_slow)
