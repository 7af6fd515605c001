"""The directory equals what nodes have, whatever happens to their blocks and to their messages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from loomserve.kvstore.index.directory import Directory, Holding
from loomserve.kvstore.index.eviction import lru
from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.journal import Change, Journal, Tier, as_changes
from loomserve.kvstore.index.radix import KEY_BYTES
from tests.unit.kvstore.index.invariants import blocks_of
from tests.unit.kvstore.index.test_index import NAMESPACES, ONE, chain, chain_of, contents, key

NODES = ("n1", "n2", "n3")
TOKENS = st.text("ab", min_size=1, max_size=6)
Tiers = dict[tuple[bytes, bytes], Tier]


class Node:
    """An index and the messages that it announces, numbered from each start on."""

    def __init__(self) -> None:
        self.epoch = 0
        self.numbers = count(1)
        self.restart()

    def restart(self) -> None:
        """A new epoch, without blocks."""
        self.epoch += 1
        self.seq = 0
        self.journal: Journal = []
        self.index = Index(lru, self.journal)
        for namespace in NAMESPACES:
            self.index.add_namespace(namespace, 1)
        self.messages: list[tuple[int, list[Change]]] = []

    def announce(self) -> None:
        if self.journal:
            self.seq += 1
            self.messages.append((self.seq, [*self.journal]))
            self.journal.clear()

    def tiers(self) -> Tiers:
        return {
            (namespace, block): Tier.SSD if slot is None else Tier.MEMORY
            for namespace in NAMESPACES
            for block, (slot, _) in contents(self.index, namespace).items()
        }


class DirectoryAgainstNodes(RuleBasedStateMachine):
    """Messages come late, twice or not at all; nodes start anew and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = {name: Node() for name in NODES}
        self.directory = Directory(10_000)
        self.now = 0.0

    # What happens to blocks.

    @rule(name=st.sampled_from(NODES), namespace=st.sampled_from(NAMESPACES), tokens=TOKENS)
    def save(self, name: str, namespace: bytes, tokens: str) -> None:
        node = self.nodes[name]
        self.now += 1
        first = node.index.match(namespace, chain(tokens)).in_memory
        slots = [next(node.numbers) for _ in tokens[first:]]
        node.index.insert(namespace, chain(tokens), first, slots, self.now, 0.03)

    @rule(name=st.sampled_from(NODES), namespace=st.sampled_from(NAMESPACES), tokens=TOKENS)
    def write_to_ssd(self, name: str, namespace: bytes, tokens: str) -> None:
        node = self.nodes[name]
        resident = node.index.match(namespace, chain(tokens)).resident
        places = [next(node.numbers) for _ in range(resident)]
        keys = chain(tokens[:resident])
        node.index.insert_ssd(namespace, keys, 0, places, self.now, 0.03)

    @rule(name=st.sampled_from(NODES), blocks=st.integers(1, 5))
    def evict(self, name: str, blocks: int) -> None:
        self.nodes[name].index.evict(blocks)

    @rule(name=st.sampled_from(NODES), namespace=st.sampled_from(NAMESPACES), tokens=TOKENS)
    def promote_and_lease(self, name: str, namespace: bytes, tokens: str) -> None:
        index = self.nodes[name].index
        self.save(name, namespace, tokens)
        index.lease(namespace, chain(tokens), len(tokens), 0, self.now, 3.0)
        index.leases.expire(self.now)

    @rule(name=st.sampled_from(NODES), namespace=st.sampled_from(NAMESPACES), tokens=TOKENS)
    def remove(self, name: str, namespace: bytes, tokens: str) -> None:
        self.nodes[name].index.remove(namespace, chain(tokens), len(tokens) - 1)

    @rule(name=st.sampled_from(NODES), namespace=st.sampled_from(NAMESPACES))
    def flush(self, name: str, namespace: bytes) -> None:
        self.nodes[name].index.flush(namespace)

    @rule(name=st.sampled_from(NODES), part=st.floats(0, 1))
    def lose_ssd(self, name: str, part: float) -> None:
        index = self.nodes[name].index
        places = [at for space in NAMESPACES for at in index._namespaces[space].tree.by_location]
        index.drop_ssd(places[: round(part * len(places))])

    # What happens to messages.

    @rule(name=st.sampled_from(NODES))
    def announce(self, name: str) -> None:
        self.nodes[name].announce()

    @rule(name=st.sampled_from(NODES), at=st.integers(0, 3), again=st.booleans())
    def deliver(self, name: str, at: int, again: bool) -> None:
        """The next message, or a later one before it, which may come once more."""
        node = self.nodes[name]
        if at < len(node.messages):
            seq, changes = node.messages[at] if again else node.messages.pop(at)
            if not self.directory.apply(name, node.epoch, seq, changes):
                assert blocks_of(self.directory, name) == {}
                self.take_contents(name)

    @rule(name=st.sampled_from(NODES))
    def catch_up(self, name: str) -> None:
        """All that is left of its messages, in order."""
        self.announce(name)
        while self.nodes[name].messages:
            self.deliver(name, 0, again=False)

    @rule(name=st.sampled_from(NODES), namespace=st.sampled_from(NAMESPACES), tokens=TOKENS)
    def leave_memory_for_ssd(self, name: str, namespace: bytes, tokens: str) -> None:
        self.save(name, namespace, tokens)
        self.write_to_ssd(name, namespace, tokens)
        self.catch_up(name)
        self.evict(name, len(tokens) // 2 + 1)
        self.catch_up(name)
        self.save(name, namespace, tokens)
        self.catch_up(name)

    @rule(name=st.sampled_from(NODES), lost=TOKENS, next_=TOKENS)
    def miss_one(self, name: str, lost: str, next_: str) -> None:
        self.catch_up(name)
        self.save(name, ONE, lost)
        self.announce(name)
        self.nodes[name].messages.clear()
        self.save(name, ONE, next_ + "c")
        self.catch_up(name)

    @rule(name=st.sampled_from(NODES))
    def lose(self, name: str) -> None:
        if self.nodes[name].messages:
            self.nodes[name].messages.pop(0)

    @rule(name=st.sampled_from(NODES))
    def take_contents(self, name: str) -> None:
        node = self.nodes[name]
        node.announce()
        self.directory.begin(name, node.epoch, node.seq)
        self.directory.add(name, as_changes(node.index.contents()))

    @rule(name=st.sampled_from(NODES))
    def restart(self, name: str) -> None:
        self.nodes[name].restart()

    @rule(names=st.sets(st.sampled_from(NODES), min_size=1))
    def members(self, names: set[str]) -> None:
        self.directory.keep_only(names)
        for name in set(NODES) - names:
            assert self.directory.heard(name) == (0, 0)

    @invariant()
    def whoever_is_heard_to_the_end_is_known_exactly(self) -> None:
        for name, node in self.nodes.items():
            if self.directory.heard(name) == (node.epoch, node.seq) and not node.journal:
                assert blocks_of(self.directory, name) == node.tiers()

    @invariant()
    def the_count_is_right(self) -> None:
        assert len(self.directory) == sum(len(blocks_of(self.directory, name)) for name in NODES)

    @invariant()
    def a_walk_finds_what_each_has(self) -> None:
        for tokens in ("a", "abab", "bbabba", "abba"):
            held = self.directory.holdings(ONE, chain(tokens))
            for node, resident, in_memory in held:
                tiers = blocks_of(self.directory, node)
                prefix = [tiers.get((ONE, key(tokens[:end])), Tier.GONE) for end in lengths(tokens)]
                assert resident == sum(tier != Tier.GONE for tier in prefix)
                assert in_memory == sum(tier == Tier.MEMORY for tier in prefix)

    def teardown(self) -> None:
        for name in NODES:
            self.take_contents(name)
            assert blocks_of(self.directory, name) == self.nodes[name].tiers()
        self.directory.keep_only(())
        assert len(self.directory) == 0


def lengths(tokens: str) -> Iterator[int]:
    return iter(range(1, len(tokens) + 1))


def test_the_directory_equals_what_nodes_have_after_any_order_of_events() -> None:
    run_state_machine_as_test(
        DirectoryAgainstNodes, settings=settings(max_examples=60, stateful_step_count=60)
    )


@given(blocks=st.integers(1, 300), there=st.integers(0, 300), fast=st.integers(0, 300))
def test_a_prefix_of_any_length_is_found(blocks: int, there: int, fast: int) -> None:
    keys = chain_of(blocks, "a")
    there = min(there, blocks)
    fast = min(fast, there)
    directory = Directory(1000)
    directory.begin("n", 1, 0)
    directory.add("n", [Change(ONE, Tier.SSD, keys[: there * KEY_BYTES])])
    directory.add("n", [Change(ONE, Tier.MEMORY, keys[: fast * KEY_BYTES])])
    expected = [Holding("n", there, fast)] if there else []
    assert directory.holdings(ONE, keys) == expected
    assert directory.holders(ONE, keys[:KEY_BYTES]) == (["n"] if fast else [])


@pytest.mark.parametrize(
    ("epoch", "seq", "taken", "gaps"),
    [(1, 4, True, 0), (1, 3, True, 0), (1, 2, True, 0), (1, 5, False, 1), (2, 4, False, 0)],
)
def test_only_the_next_message_is_taken_in(epoch: int, seq: int, taken: bool, gaps: int) -> None:
    directory = Directory(10)
    directory.begin("n", 1, 3)
    directory.add("n", [Change(ONE, Tier.MEMORY, chain("a"))])
    assert directory.apply("n", epoch, seq, [Change(ONE, Tier.MEMORY, chain("ab"))]) is taken
    assert len(directory) == (2 if taken and seq == 4 else 1 if taken else 0)
    assert directory.gaps == gaps
    assert directory.apply("m", 1, 1, []) is False, "of a node that was never heard"


def test_a_node_that_has_nothing_was_heard_all_the_same() -> None:
    directory = Directory(10)
    directory.begin("n", 7, 3)
    assert directory.heard("n") == (7, 3)
    assert directory.apply("n", 7, 4, [])
    assert directory.heard("n") == (7, 4)


def test_it_is_bounded_and_takes_more_when_there_is_room() -> None:
    directory = Directory(5)
    directory.begin("n", 1, 0)
    directory.begin("m", 1, 0)
    directory.add("n", [Change(ONE, Tier.MEMORY, chain("aaaa"))])
    directory.add("m", [Change(ONE, Tier.MEMORY, chain("aaaa"))])
    assert len(directory) == 5
    assert directory.holdings(ONE, chain("aaaa")) == [Holding("n", 4, 4), Holding("m", 1, 1)]
    directory.apply("n", 1, 1, [Change(ONE, Tier.SSD, chain("aaaa"))])
    assert directory.holdings(ONE, chain("aaaa"))[0] == Holding("n", 4, 0), "known ones may move"
    directory.drop("n")
    directory.apply("m", 1, 1, [Change(ONE, Tier.MEMORY, chain("aaaa"))])
    assert directory.holdings(ONE, chain("aaaa")) == [Holding("m", 4, 4)]
