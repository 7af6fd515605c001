"""Which blocks the store has, where, who holds them, and which go first.

The index knows blocks by namespace and key, slots and locations by the numbers it is given. It
allocates none: it is told where blocks are and returns what became free. It does no I/O and has
no clock: ``now`` is in seconds of any clock that never goes back.

Everywhere ``namespace`` is one that :meth:`Index.add_namespace` has added, else ``KeyError`` is
raised, and ``keys`` is a chain of blocks from the root on, ``KEY_BYTES`` a block. A key implies
all keys before it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import NamedTuple

from loomserve.kvstore.index.demotion import Demotion, demotions
from loomserve.kvstore.index.eviction import Policy, eviction_order
from loomserve.kvstore.index.radix import KEY_BYTES, NOWHERE, Freed, RadixNode, RadixTree


class Match(NamedTuple):
    """Lengths, in blocks, of the longest prefixes that are in the store and in memory."""

    resident: int
    in_memory: int


class Lease(NamedTuple):
    """Blocks that keep their slots until the lease ends; the slots are in the chain's order."""

    id: int
    slots: array[int]


class Stats(NamedTuple):
    """One namespace, in blocks but for ``leases``.

    Attributes:
        in_memory: Blocks that have a slot.
        on_ssd: Blocks that have a location; a block may have both.
        leases: Leases that have not ended.
        hits: Looked-up blocks that were resident, since the namespace was added.
        misses: Looked-up blocks that were not.
        evictions: Blocks that :meth:`Index.evict` took from memory.
    """

    in_memory: int
    on_ssd: int
    leases: int
    hits: int
    misses: int
    evictions: int


@dataclass(eq=False, slots=True)
class _Namespace:
    tree: RadixTree
    # The last node of each pinned path, by the path's last key.
    pins: dict[bytes, RadixNode] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0
    evictions: int = 0


@dataclass(slots=True)
class _Held:
    namespace: _Namespace
    last: RadixNode
    expires_at: float


class Index:
    """The blocks of all namespaces.

    Args:
        policy: Values blocks for :meth:`evict`.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._floor = 0.0
        self._namespaces: dict[bytes, _Namespace] = {}
        self._leases: dict[int, _Held] = {}
        self._lease_ids = count(1)

    def add_namespace(self, namespace: bytes, block_bytes: int) -> None:
        """Makes a namespace known, whose blocks have ``block_bytes`` bytes; again is harmless.

        Raises:
            ValueError: It is known with another block size.
        """
        known = self._namespaces.setdefault(
            namespace, _Namespace(RadixTree(namespace, block_bytes))
        )
        known_bytes = known.tree.block_bytes
        if known_bytes != block_bytes:
            raise ValueError(
                f"namespace {namespace.hex()} has blocks of {known_bytes} bytes, not {block_bytes}"
            )

    def lookup(self, namespace: bytes, keys: bytes, now: float) -> Match:
        """How much of ``keys`` is here; counts as a use of the blocks that are."""
        known = self._namespaces[namespace]
        path = known.tree.walk(keys)
        for node in path:
            node.uses += 1
            self._touch(node, now)
        match = Match(sum(map(len, path)), _in_memory(path))
        known.hits += match.resident
        known.misses += len(keys) // KEY_BYTES - match.resident
        return match

    def match(self, namespace: bytes, keys: bytes) -> Match:
        """How much of ``keys`` is here; unlike :meth:`lookup` no use."""
        path = self._namespaces[namespace].tree.walk(keys)
        return Match(sum(map(len, path)), _in_memory(path))

    def locations(self, namespace: bytes, keys: bytes, first: int) -> list[int]:
        """Where on SSD the blocks of ``keys`` are, from ``first`` up to one that is not there."""
        found = array("q")
        for node in self._namespaces[namespace].tree.walk(keys):
            found.extend(node.locations)
        return list(takewhile(lambda location: location != NOWHERE, found[first:]))

    def lease(
        self, namespace: bytes, keys: bytes, blocks: int, skip: int, now: float, ttl: float
    ) -> Lease | None:
        """Keeps the first ``blocks`` blocks where they are, until ``ttl`` seconds from now.

        Does not count as a use.

        Returns:
            The slots of blocks ``[skip, blocks)``; None if not all ``blocks`` are in memory.

        Raises:
            ValueError: Not ``0 <= skip < blocks``.
        """
        if not 0 <= skip < blocks:
            raise ValueError(f"no blocks in [{skip}, {blocks})")
        known = self._namespaces[namespace]
        path = _path_in_memory(known.tree, keys, blocks)
        if path is None:
            return None
        known.tree.lock(path[-1])
        id_ = next(self._lease_ids)
        self._leases[id_] = _Held(known, path[-1], now + ttl)
        slots = array("q")
        for node in path:
            slots.extend(node.slots)
        return Lease(id_, slots[skip:])

    def renew(self, lease_id: int, now: float, ttl: float) -> bool:
        """Moves the lease's end to ``ttl`` seconds from now; False if it has ended."""
        held = self._leases.get(lease_id)
        if held is None:
            return False
        held.expires_at = now + ttl
        return True

    def release(self, lease_id: int) -> list[int]:
        """Ends the lease, if it has not ended yet.

        Returns:
            The slots that became free: those of blocks that were removed meanwhile.
        """
        held = self._leases.pop(lease_id, None)
        return [] if held is None else held.namespace.tree.unlock(held.last)

    def expire(self, now: float) -> list[int]:
        """Ends the leases whose time has come, as :meth:`release` does."""
        ended = [id_ for id_, held in self._leases.items() if held.expires_at <= now]
        return [slot for id_ in ended for slot in self.release(id_)]

    def insert(
        self,
        namespace: bytes,
        keys: bytes,
        first: int,
        slots: Sequence[int],
        now: float,
        recompute_s: float,
    ) -> list[int]:
        """Blocks ``[first, first + len(slots))`` of ``keys`` are in these slots now.

        Args:
            recompute_s: Predicted seconds to compute one of these blocks again.

        Returns:
            The slots that are not needed: of blocks that are in memory already, or all of them if
            the block before ``first`` is not.

        Raises:
            ValueError: ``keys`` is too short.
        """
        tree = self._namespaces[namespace].tree
        path = tree.walk(_until(keys, first + len(slots)))
        resident, in_memory = sum(map(len, path)), _in_memory(path)
        if first > in_memory:
            return list(slots)
        for node in path:
            self._touch(node, now)
        at = in_memory - first
        unneeded = list(slots[:at])
        for node in path:
            missing = len(node) - len(node.slots)
            tree.fill(node, slots[at : at + missing])
            at += missing
        if at < len(slots):
            run = RadixNode(
                keys[resident * KEY_BYTES : (first + len(slots)) * KEY_BYTES],
                slots=array("q", slots[at:]),
                locations=array("q", [NOWHERE]) * (len(slots) - at),
                last_used=now,
                floor=self._floor,
                recompute_s=recompute_s,
            )
            tree.grow(path[-1] if path else tree.root, run)
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
        """Blocks ``[first, first + len(locations))`` of ``keys`` are at these locations on SSD.

        No location is that of another block. ``now`` and ``recompute_s`` are for the blocks that
        are not in memory either, such as those of a manifest, or evicted while they were written.

        Returns:
            The locations that are not needed: of blocks that are on SSD already, or all of them
            if the block before ``first`` is not resident.

        Raises:
            ValueError: ``keys`` is too short.
        """
        tree = self._namespaces[namespace].tree
        path = tree.walk(_until(keys, first + len(locations)))
        resident = sum(map(len, path))
        if first > resident:
            return list(locations)
        unneeded: list[int] = []
        given = iter(locations)
        start = 0
        for node in path:
            for at in range(max(first - start, 0), len(node)):
                location = next(given)
                if node.locations[at] == NOWHERE:
                    node.locations[at] = location
                    tree.by_location[location] = node
                else:
                    unneeded.append(location)
            start += len(node)
        rest = array("q", given)
        if rest:
            run = RadixNode(
                keys[resident * KEY_BYTES : (first + len(locations)) * KEY_BYTES],
                locations=rest,
                last_used=now,
                floor=self._floor,
                recompute_s=recompute_s,
            )
            tree.grow(path[-1] if path else tree.root, run)
        elif path:
            # Blocks are written from the tail of a run on, piece by piece.
            tree.join(path[-1])
        return unneeded

    def drop_ssd(self, locations: Collection[int]) -> list[int]:
        """These locations are lost; blocks that were only there go, and all below them.

        Returns:
            The other locations that became free. Slots never do: what is below a block that is
            not in memory is not in memory either.
        """
        dropped = set(locations)
        freed: list[int] = []
        for known in self._namespaces.values():
            tree = known.tree
            found = tree.by_location.keys() & dropped
            for node in dict.fromkeys(tree.by_location[location] for location in found):
                if not node.detached:
                    freed.extend(_drop(tree, node, dropped))
        return [location for location in freed if location not in dropped]

    def remove(self, namespace: bytes, keys: bytes, position: int) -> Freed:
        """Forgets the block at ``position`` of ``keys`` and all below it, pinned ones too.

        Leased slots are not in the answer but in that of the lease's end. Nothing happens if the
        block is gone already.

        Raises:
            ValueError: ``keys`` is too short.
        """
        known = self._namespaces[namespace]
        path = known.tree.walk(_until(keys, position))
        above = path[-1] if path else known.tree.root
        key = _until(keys, position + 1)[-KEY_BYTES:]
        if sum(map(len, path)) < position or key not in above.children:
            return Freed([], [])
        freed = known.tree.cut(above.children[key], 0)
        for pin in [pin for pin, last in known.pins.items() if last.detached]:
            freed.slots.extend(known.tree.unlock(known.pins.pop(pin)))
        return freed

    def evict(self, slot_count: int, now: float, within: Set[bytes] | None = None) -> Freed:
        """Takes ``slot_count`` slots, or as many as can be, from the least valuable blocks.

        Only ends of chains go, and none that is leased or pinned. Of equal ones the least
        recently used goes first. A block that is on SSD stays there, another is forgotten, and
        all below it are. Passes over all nodes in memory, so a batch costs little more than one.

        Args:
            within: Only from these namespaces.

        Returns:
            The slots in the order of eviction, and the locations of what was forgotten.
        """
        freed = Freed([], [])
        for value, tree, node in eviction_order(self._trees(within), self._policy, now):
            blocks = min(slot_count - len(freed.slots), len(node.slots))
            if blocks <= 0:
                break
            self._floor = max(self._floor, value)
            slots, locations = tree.evict(node, blocks)
            self._namespaces[tree.namespace].evictions += blocks
            freed.slots.extend(slots)
            freed.locations.extend(locations)
        return freed

    def reclaim(self, groups: Sequence[Collection[int]]) -> Freed | None:
        """Takes all slots of the group that was used longest ago, and all in memory below them.

        A group that has a slot which is leased, pinned or none of the index's is left alone. Of
        equally old ones the one that costs least goes. Passes over all slots in memory.

        Returns:
            What became free, as :meth:`evict` does; None, and nothing happens, if no group can be
            taken.
        """
        group_of = {slot: number for number, group in enumerate(groups) for slot in group}
        free = Counter[int]()
        cost = Counter[int]()
        last_used: dict[int, float] = {}
        for tree in self._trees(within=None):
            for node, blocks in _blocks_from(tree).items():
                held = [group_of.get(slot, -1) for slot in node.slots]
                if not node.locks:
                    free.update(held)
                for number in set(held):
                    cost[number] += blocks - held.index(number)
                    last_used[number] = max(node.last_used, last_used.get(number, node.last_used))
        whole = [number for number, group in enumerate(groups) if free[number] == len(group)]
        if not whole:
            return None
        return self._take(set(groups[min(whole, key=lambda at: (last_used[at], cost[at]))]))

    def _take(self, slots: Set[int]) -> Freed:
        """Evicts these unlocked slots, and all below them."""
        freed = Freed([], [])
        for known in self._namespaces.values():
            for node in list(known.tree.nodes()):
                at = next((at for at, slot in enumerate(node.slots) if slot in slots), None)
                if at is None:
                    continue
                for below in reversed(list(node.subtree())):
                    blocks = len(below.slots) - (at if below is node else 0)
                    if blocks > 0:
                        evicted = known.tree.evict(below, blocks)
                        known.evictions += blocks
                        freed.slots.extend(evicted.slots)
                        freed.locations.extend(evicted.locations)
        return freed

    def demotion_candidates(self, blocks: int, now: float) -> list[Demotion]:
        """The ``blocks`` blocks that :meth:`evict` would take next and forget, soonest first.

        Lease them while they are copied, and tell :meth:`insert_ssd` when they are written.
        """
        return demotions(eviction_order(self._trees(within=None), self._policy, now), blocks)

    def pin(self, namespace: bytes, keys: bytes, blocks: int) -> bool:
        """Keeps the first ``blocks`` blocks in memory until they are unpinned or removed.

        Pinning them again is harmless.

        Returns:
            False if not all of them are in memory, and nothing is pinned.

        Raises:
            ValueError: ``blocks`` is not positive, or ``keys`` is too short.
        """
        known = self._namespaces[namespace]
        pin = _pin(keys, blocks)
        if pin in known.pins:
            return True
        path = _path_in_memory(known.tree, keys, blocks)
        if path is None:
            return False
        known.tree.lock(path[-1])
        known.pins[pin] = path[-1]
        return True

    def unpin(self, namespace: bytes, keys: bytes, blocks: int) -> None:
        """Undoes :meth:`pin` of the same blocks, if they are pinned.

        Raises:
            ValueError: ``blocks`` is not positive, or ``keys`` is too short.
        """
        known = self._namespaces[namespace]
        last = known.pins.pop(_pin(keys, blocks), None)
        if last is not None:
            known.tree.unlock(last)

    def flush(self, namespace: bytes) -> Freed:
        """Forgets every block of the namespace that is neither leased nor pinned."""
        tree = self._namespaces[namespace].tree
        freed = Freed([], [])
        for node in list(tree.nodes()):
            if not (node.locks or node.detached):
                slots, locations = tree.cut(node, 0)
                freed.slots.extend(slots)
                freed.locations.extend(locations)
        return freed

    def stats(self, namespace: bytes) -> Stats:
        known = self._namespaces[namespace]
        return Stats(
            in_memory=known.tree.in_memory,
            on_ssd=len(known.tree.by_location),
            leases=sum(held.namespace is known for held in self._leases.values()),
            hits=known.hits,
            misses=known.misses,
            evictions=known.evictions,
        )

    def check(self) -> None:
        """Raises ``AssertionError`` if an invariant is broken; for tests, since it visits all."""
        lasts = [lease.last for lease in self._leases.values()]
        for known in self._namespaces.values():
            lasts.extend(known.pins.values())
        locks = Counter(node for last in lasts for node in last.path())
        # Nodes that only a lease still refers to count too.
        nodes = set(locks)
        for known in self._namespaces.values():
            known.tree.check()
            nodes.update(known.tree.nodes())
            assert not any(last.detached for last in known.pins.values())
        assert all(node.locks == locks[node] for node in nodes)
        slots = [slot for node in nodes for slot in node.slots]
        assert len(slots) == len(set(slots))
        located = [at for known in self._namespaces.values() for at in known.tree.by_location]
        assert len(located) == len(set(located))

    def _touch(self, node: RadixNode, now: float) -> None:
        node.last_used = now
        node.floor = self._floor

    def _trees(self, within: Set[bytes] | None) -> list[RadixTree]:
        chosen = self._namespaces if within is None else within
        return [self._namespaces[namespace].tree for namespace in chosen]


def _in_memory(path: list[RadixNode]) -> int:
    return sum(len(node.slots) for node in path)


def _until(keys: bytes, blocks: int) -> bytes:
    if len(keys) < blocks * KEY_BYTES:
        raise ValueError(f"{len(keys)} bytes of keys for {blocks} blocks of {KEY_BYTES}")
    return keys[: blocks * KEY_BYTES]


def _path_in_memory(tree: RadixTree, keys: bytes, blocks: int) -> list[RadixNode] | None:
    """The path of exactly the first ``blocks`` blocks, unless one is not in memory."""
    path = tree.walk(keys[: blocks * KEY_BYTES])
    return path if _in_memory(path) == blocks else None


def _pin(keys: bytes, blocks: int) -> bytes:
    """What a pinned path is known by: its last key."""
    if blocks < 1:
        raise ValueError(f"cannot pin {blocks} blocks")
    return _until(keys, blocks)[-KEY_BYTES:]


def _blocks_from(tree: RadixTree) -> dict[RadixNode, int]:
    """How many blocks in memory each node and all below it have; parents first."""
    blocks = {node: len(node.slots) for node in tree.nodes()}
    for node in reversed(blocks):
        if node.parent is not None and node.parent is not tree.root:
            blocks[node.parent] += blocks[node]
    return blocks


def _drop(tree: RadixTree, node: RadixNode, dropped: set[int]) -> list[int]:
    """The locations, dropped ones among them, that go with blocks that were only on SSD."""
    for at, location in enumerate(node.locations):
        if location in dropped:
            if at >= len(node.slots):
                return tree.cut(node, at).locations
            node.locations[at] = NOWHERE
            del tree.by_location[location]
    return []
