"""A radix tree over sequences of block keys, whose nodes are runs of consecutive blocks.

Invariants of every tree:

* Blocks in memory are closed under prefixes: the first ``len(node.slots)`` blocks of a node have a
  slot, and if one of its blocks has none, no block below the node has one.
* A block without a slot has a location on SSD. So resident blocks, which are all blocks in the
  tree, are closed under prefixes too.
* A locked node is in memory as a whole, and so are its ancestors, which carry its locks too.

Where paths part, a node is split, and the object becomes its lower part. So the last node of a path
still stands for the whole path after any number of splits.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from loomserve.kvstore.index.journal import Change, Journal, Run, Tier

KEY_BYTES = 16
NOWHERE = -1
"""Location of a block that is not on SSD."""


class Freed(NamedTuple):
    """Slots and locations that the index no longer refers to; the caller may use them again."""

    slots: list[int]
    locations: list[int]

    def add(self, other: Freed) -> None:
        self.slots.extend(other.slots)
        self.locations.extend(other.locations)


def _integers() -> array[int]:
    return array("q")


@dataclass(eq=False, slots=True)
class RadixNode:
    """A run of consecutive blocks that share their statistics.

    Its first blocks have ``slots``, possibly none or all; each has one of ``locations``, which is
    ``NOWHERE`` if it is not on SSD. ``children`` follow, by their first keys. ``locks`` are leases
    and pins whose path has this node, ``below`` the number of children with slots. ``floor`` is
    what the index had evicted last at ``last_used``. A ``detached`` node was cut from the tree, so
    that only locks keep its slots. ``turn`` is its entry in the order of eviction, if any.
    """

    keys: bytes = b""
    slots: array[int] = field(default_factory=_integers)
    locations: array[int] = field(default_factory=_integers)
    parent: RadixNode | None = None
    children: dict[bytes, RadixNode] = field(default_factory=dict)
    locks: int = 0
    below: int = 0
    uses: int = 0
    last_used: float = 0.0
    floor: float = 0.0
    recompute_s: float = 0.0
    detached: bool = False
    turn: tuple[float, float, int, RadixNode] | None = None

    def __len__(self) -> int:
        return len(self.locations)

    @property
    def may_go(self) -> bool:
        """Whether it has a block that nothing keeps in memory."""
        return bool(self.slots) and not (self.below or self.locks or self.detached)

    def touch(self, now: float, floor: float) -> None:
        self.last_used = now
        self.floor = floor

    def path(self) -> Iterator[RadixNode]:
        """This node and its ancestors but the root, upwards."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def chain(self) -> bytes:
        """Keys of all blocks from the root to the end of this node."""
        return b"".join([node.keys for node in self.path()][::-1])

    def subtree(self) -> Iterator[RadixNode]:
        """This node and its descendants, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class RadixTree:
    """Blocks of one namespace.

    ``in_memory`` counts blocks that have a slot, ``by_location`` has the node of every block on
    SSD, and ``journal`` gets blocks that come, move and go. ``changed`` has nodes that may leave
    memory, or are worth less, since somebody has emptied it.
    """

    def __init__(self, namespace: bytes, block_bytes: int, journal: Journal | None = None) -> None:
        self.namespace = namespace
        self.block_bytes = block_bytes
        self.journal = journal
        self.root = RadixNode()
        self.in_memory = 0
        self.by_location: dict[int, RadixNode] = {}
        self.changed: dict[RadixNode, None] = {}

    def nodes(self) -> Iterator[RadixNode]:
        for child in self.root.children.values():
            yield from child.subtree()

    def contents(self) -> list[Run]:
        runs: list[Run] = []
        stack = list(self.root.children.values())
        # As little as can be for each node: nobody is served meanwhile.
        while stack:
            node = stack.pop()
            runs.append((self.namespace, node.keys, len(node.slots) * KEY_BYTES))
            if node.children:
                stack.extend(node.children.values())
        return runs

    def walk(self, keys: bytes) -> list[RadixNode]:
        """Path of the longest prefix of ``keys`` in the tree; splits its last node at its end."""
        path: list[RadixNode] = []
        node, at = self.root, 0
        while (child := node.children.get(keys[at : at + KEY_BYTES])) is not None:
            if not keys.startswith(child.keys, at):
                path.append(self.split(child, _shared_blocks(child.keys, keys, at)))
                break
            path.append(child)
            node, at = child, at + len(child.keys)
        return path

    def path_in_memory(self, keys: bytes, blocks: int) -> list[RadixNode] | None:
        """Path of the first ``blocks`` blocks; None if one of them is not in memory."""
        path = self.walk(keys[: blocks * KEY_BYTES])
        return path if blocks_in_memory(path) == blocks else None

    def split(self, node: RadixNode, blocks: int) -> RadixNode:
        """Move the first ``blocks`` blocks, some but not all, to a new parent, and return it."""
        head = replace(
            node,
            keys=node.keys[: blocks * KEY_BYTES],
            slots=node.slots[:blocks],
            locations=node.locations[:blocks],
            children={},
            turn=None,
        )
        node.keys = node.keys[blocks * KEY_BYTES :]
        del node.slots[:blocks], node.locations[:blocks]
        head.below = int(bool(node.slots))
        self.changed[head] = None
        self._link(head, node.parent)
        self._link(node, head)
        self._locate(head, head.locations)
        return head

    def join(self, node: RadixNode) -> None:
        """Join ``node`` with its child, if they differ in nothing and no path ends at ``node``."""
        if node.detached or len(node.children) != 1:
            return
        (child,) = node.children.values()
        alike = all(
            getattr(node, name) == getattr(child, name)
            for name in ("locks", "uses", "last_used", "floor", "recompute_s")
        )
        # As many locks as the child has: no path ends at the node, so none holds it as its last.
        if not alike:
            return
        child.keys = node.keys + child.keys
        child.slots = node.slots + child.slots
        child.locations = node.locations + child.locations
        node.turn = None
        self.changed.pop(node, None)
        self.changed[child] = None
        self._link(child, node.parent)
        self._locate(child, node.locations)

    def grow(self, node: RadixNode, run: RadixNode) -> None:
        """Add ``run``, which is in no tree yet, after ``node``, a node or the root. No child of
        ``node`` starts with the same key. If ``run`` has slots, ``node`` is in memory."""
        self.in_memory += len(run.slots)
        self._note_there(run.keys, in_memory=bool(run.slots))
        # A reply that is saved block by block must not become a chain of nodes of one block.
        if node is not self.root and _extensible(node, run):
            node.keys += run.keys
            node.slots.extend(run.slots)
            node.locations.extend(run.locations)
            # Eviction begins with these blocks, so theirs is the time that counts.
            node.recompute_s = run.recompute_s
            node.floor = run.floor
            run = node
        else:
            self._link(run, node)
            node.below += bool(run.slots)
        self.changed[run] = None
        self._locate(run, run.locations)

    def fill(self, node: RadixNode, slots: Sequence[int]) -> None:
        """Assign these slots to the first blocks of ``node`` that are only on SSD."""
        filled = len(node.slots) * KEY_BYTES
        self._note_there(node.keys[filled : filled + len(slots) * KEY_BYTES], in_memory=True)
        if slots and not node.slots:
            assert node.parent is not None
            node.parent.below += 1
        node.slots.extend(slots)
        self.in_memory += len(slots)
        self.changed[node] = None

    def cut(self, node: RadixNode, at: int) -> Freed:
        """Remove the blocks of ``node`` from its ``at``-th on, and all below, from the tree.

        Locations are free at once. Slots of locked nodes are free when :meth:`unlock` returns them.
        """
        if at:
            self.split(node, at)
        assert node.parent is not None
        del node.parent.children[node.keys[:KEY_BYTES]]
        if node.slots:
            self._left_memory(node)
        freed = Freed([], [])
        for gone in node.subtree():
            gone.detached, gone.turn = True, None
            self.changed.pop(gone, None)
            if self.journal is not None:
                self.journal.append(Change(self.namespace, Tier.GONE, gone.keys))
            self.in_memory -= len(gone.slots)
            freed.locations.extend(where for where in gone.locations if where != NOWHERE)
            if not gone.locks:
                freed.slots.extend(gone.slots)
        for location in freed.locations:
            del self.by_location[location]
        return freed

    def cut_from(self, keys: bytes, position: int) -> Freed:
        """Cut the block at ``position`` of ``keys``, if it is in the tree, and all below it."""
        path = self.walk(first_keys(keys, position))
        above = path[-1] if path else self.root
        key = first_keys(keys, position + 1)[-KEY_BYTES:]
        if sum(map(len, path)) < position or key not in above.children:
            return Freed([], [])
        return self.cut(above.children[key], 0)

    def evict(self, node: RadixNode, blocks: int) -> Freed:
        """Take the last ``blocks`` slots from ``node``, the last slot first. ``node`` is not
        locked, and no block below it is in memory. Of these blocks, the first one that is not on
        SSD leaves the tree with all that follow it."""
        kept = len(node.slots) - blocks
        evicted = range(kept, len(node.slots))
        freed = Freed(list(node.slots[kept:])[::-1], [])
        del node.slots[kept:]
        self.in_memory -= blocks
        if blocks and not kept:
            self._left_memory(node)
        lost = next((at for at in evicted if node.locations[at] == NOWHERE), None)
        on_ssd = len(node.slots) + blocks if lost is None else lost
        self._note_there(node.keys[kept * KEY_BYTES : on_ssd * KEY_BYTES], in_memory=False)
        if lost is not None:
            freed.locations.extend(self.cut(node, lost).locations)
        return freed

    def lock(self, node: RadixNode) -> None:
        """Keep the slots of the path to ``node``, which is in memory, until :meth:`unlock`."""
        for locked in node.path():
            locked.locks += 1

    def unlock(self, node: RadixNode) -> list[int]:
        """End a lock; returns slots of nodes that were cut meanwhile and have no other lock."""
        freed: list[int] = []
        for locked in node.path():
            locked.locks -= 1
            if locked.detached and not locked.locks:
                freed.extend(locked.slots)
            elif locked.may_go:
                self.changed[locked] = None
        self.join(node)
        return freed

    def _left_memory(self, node: RadixNode) -> None:
        """None of its blocks is in memory any more."""
        assert node.parent is not None
        node.parent.below -= 1
        self.changed[node.parent] = None

    def _note_there(self, keys: bytes, *, in_memory: bool) -> None:
        if self.journal is not None and keys:
            tier = Tier.MEMORY if in_memory else Tier.SSD
            self.journal.append(Change(self.namespace, tier, keys))

    def _link(self, node: RadixNode, parent: RadixNode | None) -> None:
        assert parent is not None
        node.parent = parent
        parent.children[node.keys[:KEY_BYTES]] = node

    def _locate(self, node: RadixNode, locations: Sequence[int]) -> None:
        for location in locations:
            if location != NOWHERE:
                self.by_location[location] = node


def blocks_in_memory(path: Sequence[RadixNode]) -> int:
    return sum(len(node.slots) for node in path)


def key_at(keys: bytes, position: int) -> bytes:
    return keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]


def first_keys(keys: bytes, blocks: int) -> bytes:
    """The keys of the first ``blocks`` blocks of a chain; ``ValueError`` if it is shorter."""
    if len(keys) < blocks * KEY_BYTES:
        raise ValueError(f"{len(keys)} bytes of keys for {blocks} blocks of {KEY_BYTES}")
    return keys[: blocks * KEY_BYTES]


def _extensible(node: RadixNode, run: RadixNode) -> bool:
    alone = not (node.children or node.locks)
    return alone and (node.uses, node.last_used) == (run.uses, run.last_used)


def _shared_blocks(run: bytes, keys: bytes, at: int) -> int:
    """Number of blocks that ``run`` and ``keys`` from byte ``at`` on have in common."""
    most = min(len(run), len(keys) - at) // KEY_BYTES
    return bisect_left(
        range(1, most + 1),
        True,
        key=lambda blocks: not keys.startswith(run[: blocks * KEY_BYTES], at),
    )
