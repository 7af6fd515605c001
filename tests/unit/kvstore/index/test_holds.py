"""Leases and pins lock paths of a tree, and give back what was cut from under them."""

from __future__ import annotations

from array import array

import pytest

from loomserve.kvstore.index.holds import LeaseTable, PinTable
from loomserve.kvstore.index.radix import KEY_BYTES, NOWHERE, RadixNode, RadixTree
from tests.unit.kvstore.index.invariants import check_tree

KEYS = b"".join(bytes([letter]) * KEY_BYTES for letter in b"abcd")


def tree_of(slots: list[int]) -> RadixTree:
    """A tree of one run of blocks in memory."""
    tree = RadixTree(b"1" * 16, 10)
    keys = KEYS[: len(slots) * KEY_BYTES]
    locations = array("q", [NOWHERE] * len(slots))
    tree.grow(tree.root, RadixNode(keys, slots=array("q", slots), locations=locations))
    return tree


def test_a_lease_has_the_slots_it_was_asked_for_and_locks_all_before_them() -> None:
    tree, leases = tree_of([1, 2, 3]), LeaseTable()
    lease = leases.lock(tree, KEYS, 2, 1, expires_at=5.0)
    assert lease is not None
    assert list(lease.slots) == [2]
    assert [(list(node.slots), node.locks) for node in tree.nodes()] == [([1, 2], 1), ([3], 0)]
    assert leases.count_of(tree) == 1
    assert leases.count_of(tree_of([1])) == 0


def test_what_is_not_in_memory_is_not_leased() -> None:
    tree, leases = tree_of([1, 2]), LeaseTable()
    assert leases.lock(tree, KEYS, 3, 0, expires_at=5.0) is None
    assert leases.count_of(tree) == 0
    with pytest.raises(ValueError, match="no blocks"):
        leases.lock(tree, KEYS, 1, 1, expires_at=5.0)


def test_slots_cut_from_under_two_leases_are_free_when_the_last_one_ends() -> None:
    tree, leases = tree_of([1, 2, 3]), LeaseTable()
    short = leases.lock(tree, KEYS, 2, 0, expires_at=5.0)
    long = leases.lock(tree, KEYS, 3, 0, expires_at=9.0)
    assert short is not None
    assert long is not None
    assert tree.cut_from(KEYS, 0).slots == []
    assert leases.expire(4.9) == []
    assert leases.expire(5.0) == []
    assert sorted(leases.release(long.id)) == [1, 2, 3]
    assert leases.release(long.id) == []
    assert list(leases.lasts()) == []


def test_a_pin_ends_once_however_often_it_was_made() -> None:
    tree = tree_of([1, 2])
    pins = PinTable(tree)
    assert pins.pin(KEYS, 2)
    assert pins.pin(KEYS, 2)
    assert not pins.pin(KEYS, 3)
    (node,) = tree.nodes()
    assert node.locks == 1
    pins.unpin(KEYS, 2)
    pins.unpin(KEYS, 2)
    assert node.locks == 0


def test_pins_of_removed_blocks_end_and_return_their_slots() -> None:
    tree = tree_of([1, 2, 3])
    pins = PinTable(tree)
    pins.pin(KEYS, 1)
    pins.pin(KEYS, 3)
    assert tree.cut_from(KEYS, 1).slots == []
    assert sorted(pins.unpin_removed()) == [2, 3]
    assert [list(last.slots) for last in pins.lasts()] == [[1]]
    check_tree(tree)
