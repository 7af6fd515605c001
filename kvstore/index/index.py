"""Index of the blocks that a store holds: their places, their locks, and the order of eviction.

Blocks are identified by namespace and key, slots and locations by numbers of the caller, who
allocates them: callers report where blocks are, and the index returns what became free. It does no
I/O and has no clock: ``now`` is in seconds of any clock that never goes back.

``namespace`` is one that was added, else ``KeyError`` is raised. ``keys`` is a chain of blocks from
the root on, ``KEY_BYTES`` a block; a key implies all keys before it, and ``ValueError`` is raised
where a chain is shorter than the other arguments say.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence, Set
from heapq import merge
from itertools import takewhile
from typing import NamedTuple

from loomserve.kvstore.index.eviction import EvictionQueue, Policy, Refetch
from loomserve.kvstore.index.holds import Lease, LeaseTable, PinTable
from loomserve.kvstore.index.insertion import InitialUse, insert_in_memory, insert_on_ssd
from loomserve.kvstore.index.journal import Journal, Run
from loomserve.kvstore.index.radix import (
    KEY_BYTES,
    NOWHERE,
    Freed,
    RadixNode,
    RadixTree,
    blocks_in_memory,
)
from loomserve.kvstore.index.selection import group_to_reclaim, take_slots


class Match(NamedTuple):
    """Lengths, in blocks, of a chain's longest prefixes in the store (SSD included), in memory."""

    resident: int
    in_memory: int


class Stats(NamedTuple):
    """Contents and use of one namespace since it was added, in blocks; ``leases`` in leases. A
    block may be both in memory and on SSD. Hits are looked-up blocks that were resident."""

    in_memory: int
    on_ssd: int
    leases: int
    hits: int
    misses: int
    evictions: int


class _Namespace:
    def __init__(self, tree: RadixTree, queue: EvictionQueue) -> None:
        self.tree = tree
        self.queue = queue
        self.pins = PinTable(tree)
        self.hits = 0
        self.misses = 0
        self.evictions = 0


class Index:
    """A radix tree of blocks for each namespace, with leases, pins and an eviction policy.

    ``journal`` gets blocks that come, move and go. ``refetch`` predicts what it takes to
    fetch a block from another node.
    """

    def __init__(
        self, policy: Policy, journal: Journal | None = None, refetch: Refetch | None = None
    ) -> None:
        self._policy = policy
        self._refetch = refetch
        self._journal = journal
        self._floor = 0.0
        self._namespaces: dict[bytes, _Namespace] = {}
        self.leases = LeaseTable()

    def add_namespace(self, namespace: bytes, block_bytes: int) -> None:
        """Add a namespace, if it is new; ``ValueError`` if it has blocks of another size."""
        if namespace not in self._namespaces:
            tree = RadixTree(namespace, block_bytes, self._journal)
            queue = EvictionQueue(tree, self._policy, self._refetch)
            self._namespaces[namespace] = _Namespace(tree, queue)
        known_bytes = self._namespaces[namespace].tree.block_bytes
        if known_bytes != block_bytes:
            raise ValueError(
                f"namespace {namespace.hex()} has blocks of {known_bytes} bytes, not {block_bytes}"
            )

    def lookup(self, namespace: bytes, keys: bytes, now: float) -> Match:
        """Match ``keys``, and count a use of the blocks that are found."""
        known = self._namespaces[namespace]
        path = known.tree.walk(keys)
        for node in path:
            node.uses += 1
            node.touch(now, self._floor)
        match = Match(sum(map(len, path)), blocks_in_memory(path))
        known.hits += match.resident
        known.misses += len(keys) // KEY_BYTES - match.resident
        return match

    def match(self, namespace: bytes, keys: bytes) -> Match:
        """Match ``keys`` without counting a use."""
        path = self._namespaces[namespace].tree.walk(keys)
        return Match(sum(map(len, path)), blocks_in_memory(path))

    def locations(self, namespace: bytes, keys: bytes, first: int) -> list[int]:
        """Locations of the blocks of ``keys`` from ``first`` up to one that is not on SSD."""
        found = array("q")
        for node in self._namespaces[namespace].tree.walk(keys):
            found.extend(node.locations)
        return list(takewhile(lambda location: location != NOWHERE, found[first:]))

    def lease(
        self, namespace: bytes, keys: bytes, blocks: int, skip: int, now: float, ttl: float
    ) -> Lease | None:
        """Keep the slots of the first ``blocks`` blocks for ``ttl`` seconds; counts no use. See
        :meth:`LeaseTable.lock`."""
        tree = self._namespaces[namespace].tree
        return self.leases.lock(tree, keys, blocks, skip, now + ttl)

    def insert(
        self,
        namespace: bytes,
        keys: bytes,
        first: int,
        slots: Sequence[int],
        now: float,
        recompute_s: float,
    ) -> list[int]:
        """Blocks ``[first, first + len(slots))`` of ``keys`` are in these slots now. Returns the
        slots that are not needed: of blocks that are in memory already, or all of them if the block
        before ``first`` is not. ``recompute_s`` predicts the seconds to compute a block again."""
        known, use = self._namespaces[namespace], InitialUse(now, self._floor, recompute_s)
        unneeded = insert_in_memory(known.tree, keys, first, slots, use)
        # One by one, so that no eviction has much to take in.
        known.queue.take_in()
        return unneeded

    def insert_ssd(
        self,
        namespace: bytes,
        keys: bytes,
        first: int,
        locations: Sequence[int],
        now: float,
        recompute_s: float,
    ) -> list[int]:
        """Blocks ``[first, first + len(locations))`` of ``keys`` are at these locations on SSD now.

        Returns the locations that are not needed, as :meth:`insert` does slots. ``now`` and
        ``recompute_s`` are for blocks that are not in memory: those found on SSD after a crash, or
        evicted while they were written.
        """
        use = InitialUse(now, self._floor, recompute_s)
        return insert_on_ssd(self._namespaces[namespace].tree, keys, first, locations, use)

    def drop_ssd(self, locations: Collection[int]) -> list[int]:
        """Forget lost locations, the blocks that were only there, and all below those. Returns the
        other locations that became free. No slot does: below a block that is not in memory, none
        is."""
        dropped = set(locations)
        freed: list[int] = []
        for known in self._namespaces.values():
            freed.extend(_drop_locations(known.tree, dropped))
        return [location for location in freed if location not in dropped]

    def remove(self, namespace: bytes, keys: bytes, position: int) -> Freed:
        """Forget the block at ``position`` of ``keys``, if it is here, and all below it. Pins of
        these blocks end. Slots of leased ones are returned by the end of the last lease."""
        known = self._namespaces[namespace]
        freed = known.tree.cut_from(keys, position)
        freed.slots.extend(known.pins.unpin_removed())
        return freed

    def evict(self, slot_count: int, within: Set[bytes] | None = None) -> Freed:
        """Take up to ``slot_count`` slots from the least valuable blocks of ``within``, or of all.

        Chains lose their last blocks first, and no block that is leased or pinned. A block that is
        not on SSD is forgotten with all below it. Returns slots in the order of eviction, and the
        locations of forgotten blocks.
        """
        taken: list[tuple[RadixTree, RadixNode, int]] = []
        for value, tree, node in self.order(within):
            if slot_count <= 0:
                break
            self._floor = max(self._floor, value)
            taken.append((tree, node, min(slot_count, len(node.slots))))
            slot_count -= len(node.slots)
        freed = Freed([], [])
        for tree, node, blocks in taken:
            freed.add(tree.evict(node, blocks))
            self._namespaces[tree.namespace].evictions += blocks
        return freed

    def reclaim(self, groups: Sequence[Collection[int]]) -> Freed | None:
        """Evict all slots of the least recently used group, and all in memory below them. None if
        every group has a slot that is leased, pinned or none of the index's."""
        slots = group_to_reclaim(self.trees(), groups)
        if slots is None:
            return None
        freed = Freed([], [])
        for known in self._namespaces.values():
            evicted = take_slots(known.tree, slots)
            known.evictions += len(evicted.slots)
            freed.add(evicted)
        return freed

    def pin(self, namespace: bytes, keys: bytes, blocks: int) -> bool:
        """Keep the first ``blocks`` blocks until :meth:`unpin`; False: not all are in memory."""
        return self._namespaces[namespace].pins.pin(keys, blocks)

    def unpin(self, namespace: bytes, keys: bytes, blocks: int) -> None:
        self._namespaces[namespace].pins.unpin(keys, blocks)

    def flush(self, namespace: bytes) -> Freed:
        """Forget every block of the namespace that is neither leased nor pinned."""
        tree = self._namespaces[namespace].tree
        freed = Freed([], [])
        for node in list(tree.nodes()):
            if not (node.locks or node.detached):
                freed.add(tree.cut(node, 0))
        return freed

    def contents(self) -> list[Run]:
        """All blocks, ancestors first: a copy, which does not change with the index."""
        return [run for known in self._namespaces.values() for run in known.tree.contents()]

    def stats(self, namespace: bytes) -> Stats:
        known = self._namespaces[namespace]
        return Stats(
            in_memory=known.tree.in_memory,
            on_ssd=len(known.tree.by_location),
            leases=self.leases.count_of(known.tree),
            hits=known.hits,
            misses=known.misses,
            evictions=known.evictions,
        )

    def order(
        self, within: Set[bytes] | None = None
    ) -> Iterator[tuple[float, RadixTree, RadixNode]]:
        """Blocks of ``within``, or of all, as :meth:`evict` takes them."""
        chosen = self._namespaces if within is None else within
        queues = (self._namespaces[namespace].queue for namespace in chosen)
        return merge(*(each.order() for each in queues), key=lambda at: (at[0], at[2].last_used))

    def trees(self) -> list[RadixTree]:
        return [known.tree for known in self._namespaces.values()]


def _drop_locations(tree: RadixTree, dropped: set[int]) -> list[int]:
    """Forget these locations; returns those of all blocks that went with them."""
    freed: list[int] = []
    found = tree.by_location.keys() & dropped
    for node in dict.fromkeys(tree.by_location[location] for location in found):
        # Blocks below another dropped one are gone by now.
        if not node.detached:
            freed.extend(_drop(tree, node, dropped))
    return freed


def _drop(tree: RadixTree, node: RadixNode, dropped: set[int]) -> list[int]:
    """Forget these locations where they are ``node``'s, and cut it at the first block without."""
    for at, location in enumerate(node.locations):
        if location in dropped:
            if at >= len(node.slots):
                return tree.cut(node, at).locations
            node.locations[at] = NOWHERE
            del tree.by_location[location]
    return []
