"""The index against a naive model of it under any interleaving of operations, and its corners."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from loomserve.kvstore.index.eviction import cost, lru
from loomserve.kvstore.index.index import Index, Match, Stats
from loomserve.kvstore.index.radix import KEY_BYTES, NOWHERE, Freed
from loomserve.kvstore.index.selection import demotions, hottest_chains
from tests.unit.kvstore.index.invariants import check_index, order_by_rule

ONE, OTHER = b"1" * 16, b"2" * 16
NAMESPACES = (ONE, OTHER)
TTL = 8.0


def chain(tokens: str) -> bytes:
    """One block a letter; a key depends on all letters up to it, as vLLM's do."""
    keys = (hashlib.sha256(tokens[:end].encode()).digest() for end in range(1, len(tokens) + 1))
    return b"".join(key[:KEY_BYTES] for key in keys)


def chain_of(blocks: int, name: str) -> bytes:
    """A long chain; chains of different names share no key."""
    return b"".join(
        hashlib.sha256(f"{name} {block}".encode()).digest()[:KEY_BYTES] for block in range(blocks)
    )


def key(tokens: str) -> bytes:
    return chain(tokens)[-KEY_BYTES:]


def prefixes(tokens: str) -> list[str]:
    return [tokens[:end] for end in range(1, len(tokens) + 1)]


@dataclass
class Block:
    """What the model knows of a block; it has a slot, a location or both."""

    last_used: float
    slot: int | None = None
    location: int | None = None


@dataclass
class Held:
    """What a lease of the model keeps: the blocks of a chain, and slots of removed blocks."""

    namespace: bytes
    tokens: str
    expires_at: float
    removed: set[int] = field(default_factory=set)


Blocks = dict[str, Block]


def contents(index: Index, namespace: bytes) -> dict[bytes, tuple[int | None, int | None]]:
    """Slot and location of each block of the index, by key."""
    found = {}
    for node in index._namespaces[namespace].tree.nodes():
        for at, location in enumerate(node.locations):
            block = node.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            slot = node.slots[at] if at < len(node.slots) else None
            found[block] = (slot, None if location == NOWHERE else location)
    return found


def node_count(index: Index) -> int:
    return sum(1 for _ in index._namespaces[ONE].tree.nodes())


some_tokens = st.text("ab", min_size=1, max_size=5)
one_namespace = st.sampled_from(NAMESPACES)
parts = st.floats(0, 1)


class IndexAgainstModel(RuleBasedStateMachine):
    """A model without trees: each block by the letters of its whole chain."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(lru)
        for size, namespace in enumerate(NAMESPACES, start=1):
            self.index.add_namespace(namespace, size)
        self.now = 0.0
        self.numbers = count()
        self.model: dict[bytes, Blocks] = {namespace: {} for namespace in NAMESPACES}
        self.given: set[int] = set()
        self.leases: dict[int, Held] = {}
        self.pins: set[tuple[bytes, str]] = set()
        self.hits = dict.fromkeys(NAMESPACES, 0)
        self.misses = dict.fromkeys(NAMESPACES, 0)
        self.evictions = dict.fromkeys(NAMESPACES, 0)

    # The model.

    def resident(self, namespace: bytes, tokens: str) -> int:
        return sum(prefix in self.model[namespace] for prefix in prefixes(tokens))

    def in_memory(self, namespace: bytes, tokens: str) -> int:
        blocks = self.model[namespace]
        return sum(p in blocks and blocks[p].slot is not None for p in prefixes(tokens))

    def locked(self, namespace: bytes, tokens: str) -> bool:
        paths = {(held.namespace, held.tokens) for held in self.leases.values()} | self.pins
        return any(at == namespace and path.startswith(tokens) for at, path in paths)

    def forget(self, namespace: bytes, tokens: str) -> Freed:
        """The block and all below it go, but for leased slots."""
        blocks, freed = self.model[namespace], Freed([], [])
        for gone in [name for name in blocks if name.startswith(tokens)]:
            block = blocks.pop(gone)
            if block.location is not None:
                freed.locations.append(block.location)
            holders = [
                held
                for held in self.leases.values()
                if held.namespace == namespace and held.tokens.startswith(gone)
            ]
            if block.slot is not None and not holders:
                freed.slots.append(block.slot)
            for held in holders:
                assert block.slot is not None
                held.removed.add(block.slot)
        for held in self.leases.values():
            if held.namespace == namespace and held.tokens.startswith(tokens):
                held.tokens = tokens[:-1]
        self.pins = {
            (at, path) for at, path in self.pins if at != namespace or not path.startswith(tokens)
        }
        return freed

    def end(self, lease_id: int) -> set[int]:
        removed = self.leases.pop(lease_id).removed
        return removed.difference(*(held.removed for held in self.leases.values()))

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def take_back(self, slots: Iterable[int]) -> None:
        """Each slot comes back once, and only when nobody holds it."""
        for slot in slots:
            self.given.remove(slot)

    # The operations.

    def draw_tokens(self, data: st.DataObject, namespace: bytes) -> str:
        """Mostly of a block that is there; any chain rarely is."""
        return data.draw(st.sampled_from([*self.model[namespace], data.draw(some_tokens)]))

    @rule(namespace=one_namespace, tokens=some_tokens)
    def lookup(self, namespace: bytes, tokens: str) -> None:
        now = self.tick()
        match = self.index.lookup(namespace, chain(tokens), now)
        resident = self.resident(namespace, tokens)
        assert match == Match(resident, self.in_memory(namespace, tokens))
        for prefix in prefixes(tokens)[:resident]:
            self.model[namespace][prefix].last_used = now
        self.hits[namespace] += resident
        self.misses[namespace] += len(tokens) - resident

    @rule(namespace=one_namespace, tokens=some_tokens, start=parts, hole=st.booleans())
    def insert(self, namespace: bytes, tokens: str, start: float, hole: bool) -> None:
        now = self.tick()
        blocks, in_memory = self.model[namespace], self.in_memory(namespace, tokens)
        first = round(start * in_memory)
        if hole:
            first = min(in_memory + 1, len(tokens))
        slots = [next(self.numbers) for _ in tokens[first:]]
        self.given.update(slots)
        unneeded = self.index.insert(namespace, chain(tokens), first, slots, now, 1.0)
        if first > in_memory:
            assert unneeded == slots
        else:
            assert unneeded == slots[: in_memory - first]
            for slot, prefix in zip(slots, prefixes(tokens)[first:], strict=True):
                block = blocks.setdefault(prefix, Block(now))
                if block.slot is None:
                    block.slot = slot
            for prefix in prefixes(tokens):
                blocks[prefix].last_used = now
        self.take_back(unneeded)

    @rule(namespace=one_namespace, tokens=some_tokens, start=parts, hole=st.booleans())
    def insert_ssd(self, namespace: bytes, tokens: str, start: float, hole: bool) -> None:
        now = self.tick()
        blocks, resident = self.model[namespace], self.resident(namespace, tokens)
        first = round(start * resident)
        if hole:
            first = min(resident + 1, len(tokens))
        locations = [next(self.numbers) for _ in tokens[first:]]
        unneeded = self.index.insert_ssd(namespace, chain(tokens), first, locations, now, 1.0)
        expected = list(locations)
        if first <= resident:
            for location, prefix in zip(locations, prefixes(tokens)[first:], strict=True):
                block = blocks.setdefault(prefix, Block(now))
                if block.location is None:
                    block.location = location
                    expected.remove(location)
        assert unneeded == expected

    @rule(data=st.data(), namespace=one_namespace, skip=parts)
    def lease(self, data: st.DataObject, namespace: bytes, skip: float) -> None:
        tokens = self.draw_tokens(data, namespace)
        now, first = self.tick(), int(skip * (len(tokens) - 1))
        keys = chain(tokens + "a")
        lease = self.index.lease(namespace, keys, len(tokens), first, now, TTL)
        if self.in_memory(namespace, tokens) < len(tokens):
            assert lease is None
        else:
            assert lease is not None
            slots = [self.model[namespace][p].slot for p in prefixes(tokens)]
            assert list(lease.slots) == slots[first:]
            self.leases[lease.id] = Held(namespace, tokens, now + TTL)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from([*self.leases, 0]))
        expected = self.end(id_) if id_ in self.leases else set()
        slots = self.index.leases.release(id_)
        assert set(slots) == expected
        self.take_back(slots)

    @rule()
    def expire(self) -> None:
        now = self.tick()
        ended = [id_ for id_, held in self.leases.items() if held.expires_at <= now]
        expected = {slot for id_ in ended for slot in self.end(id_)}
        slots = self.index.leases.expire(now)
        assert set(slots) == expected
        self.take_back(slots)

    @rule(data=st.data(), namespace=one_namespace)
    def pin(self, data: st.DataObject, namespace: bytes) -> None:
        tokens = self.draw_tokens(data, namespace)
        here = self.in_memory(namespace, tokens) == len(tokens)
        assert self.index.pin(namespace, chain(tokens), len(tokens)) == here
        if here:
            self.pins.add((namespace, tokens))

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        namespace, tokens = data.draw(st.sampled_from([*sorted(self.pins), (ONE, "a")]))
        self.index.unpin(namespace, chain(tokens), len(tokens))
        self.pins.discard((namespace, tokens))

    @rule(data=st.data(), namespace=one_namespace)
    def remove(self, data: st.DataObject, namespace: bytes) -> None:
        tokens = self.draw_tokens(data, namespace)
        freed = self.index.remove(namespace, chain(tokens), len(tokens) - 1)
        slots, locations = self.forget(namespace, tokens)
        assert (set(freed.slots), set(freed.locations)) == (set(slots), set(locations))
        self.take_back(freed.slots)

    @rule(data=st.data())
    def drop_ssd(self, data: st.DataObject) -> None:
        everywhere = {
            block.location: (namespace, tokens)
            for namespace, blocks in self.model.items()
            for tokens, block in blocks.items()
            if block.location is not None
        }
        unknown = next(self.numbers)
        dropped = data.draw(st.sets(st.sampled_from([*everywhere, unknown])))
        expected: set[int] = set()
        for location in dropped & everywhere.keys():
            namespace, tokens = everywhere[location]
            block = self.model[namespace].get(tokens)
            if block is None:
                continue
            if block.slot is not None:
                block.location = None
            else:
                freed = self.forget(namespace, tokens)
                assert freed.slots == []
                expected.update(freed.locations)
        assert set(self.index.drop_ssd(dropped)) == expected - dropped

    @rule(slot_count=st.integers(0, 6), within=st.none() | st.sets(one_namespace))
    def evict(self, slot_count: int, within: set[bytes] | None) -> None:
        self.tick()
        where = {
            block.slot: (namespace, tokens, block)
            for namespace, blocks in self.model.items()
            for tokens, block in blocks.items()
            if block.slot is not None
        }
        only_there = {slot for slot, (*_, block) in where.items() if block.location is None}
        evictable = {
            slot
            for slot, (namespace, tokens, _) in where.items()
            if (within is None or namespace in within) and not self.locked(namespace, tokens)
        }
        trees = [self.index._namespaces[each].tree for each in within or NAMESPACES]
        order = [node for _, _, node in self.index.order(within or None)]
        assert order == list(order_by_rule(trees, lru))
        demoted = self.demotion_candidates(slot_count)
        freed = self.index.evict(slot_count, within)
        assert len(freed.slots) == min(slot_count, len(evictable))
        assert set(freed.slots) <= evictable
        if within is None:
            lost = [slot for slot in freed.slots if slot in only_there]
            assert lost == demoted[: len(lost)]
        locations: list[int] = []
        for slot in freed.slots:
            namespace, tokens, block = where[slot]
            assert not self.followed_in_memory(namespace, tokens)
            block.slot = None
            if block.location is None:
                locations += self.forget(namespace, tokens).locations
            self.evictions[namespace] += 1
        assert sorted(freed.locations) == sorted(locations)
        self.take_back(freed.slots)
        if freed.slots and within is None:
            self.check_least_recent(*where[freed.slots[-1]])

    def demotion_candidates(self, blocks: int) -> list[int]:
        """The slots, in the order of eviction."""
        slots: list[int] = []
        for namespace, keys, first, run in demotions(self.index.order(), blocks):
            known = {key(tokens): block for tokens, block in self.model[namespace].items()}
            starts = range(first * KEY_BYTES, len(keys), KEY_BYTES)
            candidates = [known[keys[at : at + KEY_BYTES]] for at in starts]
            assert [block.slot for block in candidates] == list(run)
            assert all(block.location is None for block in candidates)
            slots += list(run)[::-1]
        assert len(slots) <= blocks
        return slots

    def followed_in_memory(self, namespace: bytes, tokens: str) -> bool:
        blocks = self.model[namespace]
        following = [blocks[tokens + letter] for letter in "ab" if tokens + letter in blocks]
        return any(block.slot is not None for block in following)

    def check_least_recent(self, namespace: bytes, tokens: str, evicted: Block) -> None:
        """No end of a chain that was there beside the last evicted block was used before it."""
        for at, blocks in self.model.items():
            for name, block in blocks.items():
                freed_by_it = at == namespace and name == tokens[:-1]
                end = block.slot is not None and not self.followed_in_memory(at, name)
                if end and not freed_by_it and not self.locked(at, name):
                    assert block.last_used >= evicted.last_used

    @rule(namespace=one_namespace)
    def flush(self, namespace: bytes) -> None:
        expected = Freed([], [])
        for tokens in list(self.model[namespace]):
            if tokens in self.model[namespace] and not self.locked(namespace, tokens):
                slots, locations = self.forget(namespace, tokens)
                expected.slots.extend(slots)
                expected.locations.extend(locations)
        freed = self.index.flush(namespace)
        assert sorted(freed.slots) == sorted(expected.slots)
        assert sorted(freed.locations) == sorted(expected.locations)
        self.take_back(freed.slots)

    # What always holds.

    @invariant()
    def holds_its_invariants(self) -> None:
        check_index(self.index)

    @invariant()
    def has_what_the_model_has(self) -> None:
        for namespace, blocks in self.model.items():
            expected = {key(t): (block.slot, block.location) for t, block in blocks.items()}
            assert contents(self.index, namespace) == expected
            assert self.index.stats(namespace) == Stats(
                in_memory=sum(block.slot is not None for block in blocks.values()),
                on_ssd=sum(block.location is not None for block in blocks.values()),
                leases=sum(held.namespace == namespace for held in self.leases.values()),
                hits=self.hits[namespace],
                misses=self.misses[namespace],
                evictions=self.evictions[namespace],
            )

    @invariant()
    def loses_no_slot(self) -> None:
        held = {slot for lease in self.leases.values() for slot in lease.removed}
        in_blocks = [
            block.slot
            for blocks in self.model.values()
            for block in blocks.values()
            if block.slot is not None
        ]
        assert sorted([*in_blocks, *held]) == sorted(self.given)


def test_any_interleaving_of_operations_does_as_the_model() -> None:
    run_state_machine_as_test(
        IndexAgainstModel,
        settings=settings(max_examples=80, stateful_step_count=50, deadline=None),
    )


@pytest.fixture
def index() -> Index:
    index = Index(lru)
    index.add_namespace(ONE, block_bytes=100)
    return index


def test_ten_thousand_blocks_are_looked_up_at_once(index: Index) -> None:
    keys = chain_of(10_000, "system prompt")
    index.insert(ONE, keys, 0, range(10_000), now=0.0, recompute_s=0.1)
    assert index.lookup(ONE, keys, now=1.0) == Match(10_000, 10_000)
    other = keys[: 7_000 * KEY_BYTES] + chain_of(3_000, "another question")
    assert index.lookup(ONE, other, now=2.0) == Match(7_000, 7_000)
    index.insert(ONE, other, 7_000, range(10_000, 13_000), now=3.0, recompute_s=0.1)
    assert index.lookup(ONE, keys, now=4.0) == index.lookup(ONE, other, now=4.0)
    assert node_count(index) == 3


def test_a_reply_saved_block_by_block_is_one_run(index: Index) -> None:
    keys = chain_of(100, "reply")
    for end in range(1, 101):
        index.insert(ONE, keys[: end * KEY_BYTES], end - 1, [end], now=end, recompute_s=0.1)
    assert node_count(index) == 1
    assert index.lookup(ONE, keys, now=101.0) == Match(100, 100)


def test_a_run_demoted_piece_by_piece_stays_one_run(index: Index) -> None:
    index.insert(ONE, chain("abcdefgh"), 0, range(8), now=0.0, recompute_s=0.1)
    for location in range(0, 8, 2):
        (demotion,) = demotions(index.order(), 2)
        blocks = demotion.first + len(demotion.slots)
        lease = index.lease(ONE, demotion.keys, blocks, demotion.first, now=1.0, ttl=9.0)
        assert lease is not None
        assert lease.slots == demotion.slots
        places = [location, location + 1]
        assert not index.insert_ssd(ONE, demotion.keys, demotion.first, places, 1.0, 0.1)
        assert not index.leases.release(lease.id)
    assert not demotions(index.order(), 2)
    assert node_count(index) == 1
    check_index(index)


def test_writing_a_part_of_a_run_to_ssd_does_not_split_it(index: Index) -> None:
    index.insert(ONE, chain("abcd"), 0, range(4), now=0.0, recompute_s=0.1)
    index.insert_ssd(ONE, chain("ab"), 0, [7, 8], now=1.0, recompute_s=0.1)
    assert node_count(index) == 1


def test_a_mirror_is_of_the_blocks_that_are_evicted_next(index: Index) -> None:
    index.insert(ONE, chain("abc"), 0, [1, 2, 3], now=0.0, recompute_s=0.1)
    index.insert(ONE, chain("xyz"), 0, [4, 5, 6], now=1.0, recompute_s=0.1)
    index.insert_ssd(ONE, chain("abc"), 2, [7], now=1.0, recompute_s=0.1)

    def within(mirror_bytes: int) -> list[int]:
        found = demotions(index.order(), 9, mirror_bytes, lambda _: 10)
        return [slot for demotion in found for slot in demotion.slots]

    assert [within(size) for size in (0, 19, 29, 39, 40)] == [[], [], [2], [1, 2], [1, 2, 6]]


def test_what_is_on_ssd_already_is_left_out_of_the_demotion(index: Index) -> None:
    index.insert(ONE, chain("abcde"), 0, [1, 2, 3, 4, 5], now=0.0, recompute_s=0.1)
    index.insert_ssd(ONE, chain("abc"), 2, [7], now=0.0, recompute_s=0.1)
    assert [(d.keys, d.first, list(d.slots)) for d in demotions(index.order(), 3)] == [
        (chain("abcde"), 3, [4, 5]),
        (chain("ab"), 1, [2]),
    ]


def test_a_block_goes_after_all_that_follow_it_whatever_it_is_worth() -> None:
    index = Index(lambda candidate: candidate.recompute_s)
    index.add_namespace(ONE, block_bytes=100)
    index.insert(ONE, chain("a"), 0, [1], now=0.0, recompute_s=1.0)
    index.insert(ONE, chain("b"), 0, [2], now=0.0, recompute_s=4.0)
    index.lookup(ONE, chain("a"), now=0.0)
    index.insert(ONE, chain("ab"), 1, [3], now=0.0, recompute_s=3.0)
    index.insert(ONE, chain("ac"), 1, [4], now=0.0, recompute_s=5.0)
    assert index.evict(4).slots == [3, 2, 4, 1]


def test_a_lease_locks_no_more_than_its_prefix(index: Index) -> None:
    index.insert(ONE, chain("abcd"), 0, [10, 11, 12, 13], now=0.0, recompute_s=0.1)
    lease = index.lease(ONE, chain("abcd"), blocks=2, skip=1, now=1.0, ttl=9.0)
    assert lease is not None
    assert list(lease.slots) == [11]
    assert index.evict(4).slots == [13, 12]
    index.leases.release(lease.id)
    assert index.evict(4).slots == [11, 10]


def test_new_blocks_behind_a_lease_are_not_locked(index: Index) -> None:
    index.insert(ONE, chain("a"), 0, [1], now=0.0, recompute_s=0.1)
    index.lease(ONE, chain("a"), blocks=1, skip=0, now=0.0, ttl=9.0)
    index.insert(ONE, chain("ab"), 1, [2], now=0.0, recompute_s=0.1)
    assert index.evict(2).slots == [2]


def test_a_removed_block_s_slot_is_free_when_its_last_lease_ends(index: Index) -> None:
    index.insert(ONE, chain("abc"), 0, [1, 2, 3], now=0.0, recompute_s=0.1)
    index.insert_ssd(ONE, chain("abc"), 0, [7, 8, 9], now=0.0, recompute_s=0.1)
    short = index.lease(ONE, chain("abc"), blocks=2, skip=0, now=0.0, ttl=5.0)
    index.lease(ONE, chain("abc"), blocks=2, skip=0, now=0.0, ttl=9.0)
    assert short is not None
    assert index.remove(ONE, chain("abc"), position=1) == Freed([3], [8, 9])
    assert index.insert(ONE, chain("ab"), 1, [20], now=1.0, recompute_s=0.1) == []
    assert index.leases.release(short.id) == []
    assert index.leases.expire(now=9.0) == [2]
    assert contents(index, ONE) == {key("a"): (1, 7), key("ab"): (20, None)}


def test_a_block_evicted_while_it_was_written_stays_on_ssd_if_its_prefix_does(
    index: Index,
) -> None:
    index.insert(ONE, chain("abc"), 0, [1, 2, 3], now=0.0, recompute_s=0.1)
    index.evict(2)
    assert index.insert_ssd(ONE, chain("abc"), 2, [9], now=1.0, recompute_s=0.1) == [9]
    assert index.insert_ssd(ONE, chain("abc"), 1, [8], now=1.0, recompute_s=0.1) == []
    assert index.lookup(ONE, chain("abc"), now=2.0) == Match(resident=2, in_memory=1)


def test_a_hole_in_memory_is_refused_though_the_blocks_are_on_ssd(index: Index) -> None:
    index.insert_ssd(ONE, chain("ab"), 0, [7, 8], now=0.0, recompute_s=0.1)
    assert index.insert(ONE, chain("ab"), 1, [2], now=0.0, recompute_s=0.1) == [2]
    assert index.insert(ONE, chain("ab"), 0, [1], now=0.0, recompute_s=0.1) == []
    assert index.insert(ONE, chain("abc"), 1, [2, 3], now=0.0, recompute_s=0.1) == []
    assert contents(index, ONE) == {key("a"): (1, 7), key("ab"): (2, 8), key("abc"): (3, None)}


def test_a_removed_block_s_pin_ends_with_it(index: Index) -> None:
    index.insert(ONE, chain("abc"), 0, [1, 2, 3], now=0.0, recompute_s=0.1)
    assert index.pin(ONE, chain("ab"), blocks=2)
    assert index.evict(3).slots == [3]
    assert index.remove(ONE, chain("ab"), position=1) == Freed([2], [])
    assert index.evict(3).slots == [1]


def test_blocks_behind_others_have_their_own_age_and_uses() -> None:
    index = Index(lambda candidate: candidate.uses + candidate.last_used)
    index.add_namespace(ONE, block_bytes=100)
    index.insert(ONE, chain("a"), 0, [0], now=0.0, recompute_s=0.1)
    index.lookup(ONE, chain("a"), now=0.0)
    index.insert(ONE, chain("ab"), 1, [1], now=0.0, recompute_s=0.1)
    index.insert(ONE, chain("b"), 0, [2], now=0.5, recompute_s=0.1)
    index.insert(ONE, chain("c"), 0, [3], now=0.7, recompute_s=0.1)
    # Being written to SSD is no use of the block before it.
    index.insert_ssd(ONE, chain("bc"), 1, [7], now=5.0, recompute_s=0.1)
    # Worth 1 (a), 0 (ab), 0.5 (b) and 0.7 (c).
    assert index.evict(4) == Freed([1, 2, 3, 0], [7])


def test_eviction_follows_the_policy_across_namespaces() -> None:
    index = Index(cost)
    index.add_namespace(ONE, block_bytes=100)
    index.add_namespace(OTHER, block_bytes=1_000)
    index.insert(ONE, chain("a"), 0, [1], now=0.0, recompute_s=1.0)
    index.insert(ONE, chain("b"), 0, [2], now=0.0, recompute_s=2.0)
    index.insert(OTHER, chain("a"), 0, [3], now=0.0, recompute_s=5.0)
    index.insert(OTHER, chain("b"), 0, [4], now=0.0, recompute_s=5.0)
    index.lookup(OTHER, chain("b"), now=0.0)
    index.lookup(OTHER, chain("b"), now=0.0)
    # Worth, in milliseconds a byte: 10, 20, 5 and 15.
    assert index.evict(1, within={ONE}).slots == [1]
    assert index.evict(3).slots == [3, 4, 2]


def test_of_blocks_worth_the_same_the_least_recently_used_goes_first() -> None:
    index = Index(lambda candidate: 0.0)
    index.add_namespace(ONE, block_bytes=100)
    for slot, tokens in enumerate("abc"):
        index.insert(ONE, chain(tokens), 0, [slot], now=0.0, recompute_s=0.1)
    index.lookup(ONE, chain("a"), now=1.0)
    index.insert(ONE, chain("b"), 0, [9], now=2.0, recompute_s=0.1)
    assert index.evict(3).slots == [2, 0, 1]


def test_a_namespace_keeps_its_block_size(index: Index) -> None:
    index.insert(ONE, chain("a"), 0, [1], now=0.0, recompute_s=0.1)
    index.add_namespace(ONE, block_bytes=100)
    assert index.stats(ONE).in_memory == 1
    with pytest.raises(ValueError, match="blocks of 100 bytes, not 200"):
        index.add_namespace(ONE, block_bytes=200)


def test_what_cannot_be_meant_is_refused(index: Index) -> None:
    with pytest.raises(KeyError):
        index.lookup(OTHER, chain("a"), now=0.0)
    with pytest.raises(ValueError, match="16 bytes of keys for 2 blocks"):
        index.insert(ONE, chain("a"), 0, [1, 2], now=0.0, recompute_s=0.1)
    with pytest.raises(ValueError, match="32 bytes of keys for 3 blocks"):
        index.insert_ssd(ONE, chain("ab"), 1, [1, 2], now=0.0, recompute_s=0.1)
    with pytest.raises(ValueError, match="16 bytes of keys for 2 blocks"):
        index.remove(ONE, chain("a"), position=1)
    with pytest.raises(ValueError, match="no blocks in"):
        index.lease(ONE, chain("a"), blocks=1, skip=1, now=0.0, ttl=1.0)
    with pytest.raises(ValueError, match="cannot pin 0 blocks"):
        index.pin(ONE, chain("a"), blocks=0)


def test_the_hottest_chains_are_whole_and_told_once_the_last_used_first(index: Index) -> None:
    index.add_namespace(OTHER, block_bytes=200)

    def hottest(most_bytes: int) -> list[tuple[bytes, bytes]]:
        return hottest_chains(index.trees(), most_bytes)

    for now, tokens in enumerate(("abcd", "abxy", "pq")):
        index.insert(ONE, chain(tokens), 0, range(10 * now, 10 * now + len(tokens)), now, 1.0)
    index.insert(OTHER, chain("zz"), 0, [100, 101], 3.0, 1.0)
    index.lookup(ONE, chain("abcd"), 4.0)
    everything = [
        (ONE, chain("abcd")), (OTHER, chain("zz")), (ONE, chain("pq")), (ONE, chain("abxy")),
    ]  # fmt: skip
    assert hottest(2000) == everything
    assert hottest(4 * 100) == everything[:1]
    assert hottest(4 * 100 + 2 * 200) == everything[:2]
    assert hottest(0) == []
    # Of what is partly on SSD, that which is in memory.
    index.insert_ssd(ONE, chain("pq"), 0, [1, 2], 5.0, 1.0)
    index.lookup(ONE, chain("abxy"), 6.0)
    index.lookup(ONE, chain("abcd"), 6.0)
    index.lookup(OTHER, chain("zz"), 6.0)
    index.evict(1)
    assert (ONE, chain("p")) in hottest(2000)
