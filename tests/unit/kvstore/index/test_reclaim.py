"""Looking without a trace, and emptying whole groups of slots for blocks of another size."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from loomserve.kvstore.index.eviction import lru
from loomserve.kvstore.index.index import Index, Match
from loomserve.kvstore.index.radix import KEY_BYTES
from tests.unit.kvstore.index.invariants import check_index

ONE, OTHER = b"1" * 16, b"2" * 16


def chain(tokens: str) -> bytes:
    """One block a letter; a key depends on all letters up to it, as vLLM's do."""
    keys = (hashlib.sha256(tokens[:end].encode()).digest() for end in range(1, len(tokens) + 1))
    return b"".join(key[:KEY_BYTES] for key in keys)


def index_of(*namespaces: bytes) -> Index:
    index = Index(lru)
    for namespace in namespaces or (ONE,):
        index.add_namespace(namespace, 10)
    return index


def in_memory(index: Index, tokens: str, namespace: bytes = ONE) -> int:
    return index.match(namespace, chain(tokens)).in_memory


def test_a_match_is_no_use() -> None:
    index = index_of()
    index.insert(ONE, chain("ab"), 0, [1, 2], 0.0, 1.0)
    index.insert(ONE, chain("x"), 0, [3], 1.0, 1.0)
    assert index.match(ONE, chain("abc")) == Match(2, 2)
    assert index.stats(ONE).hits == index.stats(ONE).misses == 0
    assert index.evict(2).slots == [2, 1]


def test_locations_end_before_the_first_block_that_is_not_on_ssd() -> None:
    index = index_of()
    index.insert(ONE, chain("abc"), 0, [1, 2, 3], 0.0, 1.0)
    index.insert_ssd(ONE, chain("ab"), 0, [10, 20], 0.0, 1.0)
    index.insert_ssd(ONE, chain("axy"), 1, [21, 31], 0.0, 1.0)
    assert index.locations(ONE, chain("abc"), 0) == [10, 20]
    assert index.locations(ONE, chain("axy"), 1) == [21, 31]
    assert index.locations(ONE, chain("abc"), 2) == []
    assert index.locations(ONE, chain("abc"), 9) == []


def test_the_group_used_longest_ago_goes_and_no_other() -> None:
    index = index_of(ONE, OTHER)
    index.insert(ONE, chain("ab"), 0, [1, 2], 0.0, 1.0)
    index.insert(OTHER, chain("ab"), 0, [3, 4], 1.0, 1.0)
    index.lookup(ONE, chain("ab"), 2.0)
    freed = index.reclaim([[1, 2], [3, 4]])
    assert freed is not None
    assert sorted(freed.slots) == [3, 4]
    assert in_memory(index, "ab") == 2
    assert index.stats(OTHER).evictions == 2
    check_index(index)


def test_of_equally_old_groups_the_one_with_least_below_it_goes() -> None:
    index = index_of()
    index.insert(ONE, chain("abcd"), 0, [1, 2, 3, 4], 0.0, 1.0)
    index.insert(ONE, chain("abxy"), 2, [5, 6], 0.0, 1.0)
    freed = index.reclaim([[1], [2], [3, 4], [6], [5]])
    assert freed is not None
    assert freed.slots == [6]


def test_what_is_below_a_group_goes_with_it() -> None:
    index = index_of()
    index.insert(ONE, chain("abcd"), 0, [1, 2, 3, 4], 0.0, 1.0)
    index.insert(ONE, chain("abx"), 2, [5], 0.0, 1.0)
    freed = index.reclaim([[2]])
    assert freed is not None
    assert sorted(freed.slots) == [2, 3, 4, 5]
    assert in_memory(index, "abcd") == 1
    check_index(index)


def test_a_group_with_a_leased_a_pinned_or_an_unknown_slot_is_left_alone() -> None:
    index = index_of()
    index.insert(ONE, chain("ab"), 0, [1, 2], 0.0, 1.0)
    index.insert(ONE, chain("xy"), 0, [3, 4], 0.0, 1.0)
    lease = index.lease(ONE, chain("ab"), 2, 0, 0.0, 9.0)
    assert lease is not None
    assert index.pin(ONE, chain("xy"), 1)
    assert index.reclaim([[1], [2], [3, 4], [4, 9]]) is None
    assert (in_memory(index, "ab"), in_memory(index, "xy")) == (2, 2)
    index.leases.release(lease.id)
    freed = index.reclaim([[2], [3]])
    assert freed is not None
    assert freed.slots == [2]


def test_blocks_on_ssd_stay_there_and_those_behind_a_lost_one_do_not() -> None:
    index = index_of()
    index.insert(ONE, chain("abc"), 0, [1, 2, 3], 0.0, 1.0)
    index.insert_ssd(ONE, chain("ab"), 0, [10, 20], 0.0, 1.0)
    freed = index.reclaim([[1]])
    assert freed is not None
    assert (sorted(freed.slots), freed.locations) == ([1, 2, 3], [])
    assert index.match(ONE, chain("abc")) == Match(2, 0)
    index.insert(ONE, chain("ab"), 0, [4, 5], 1.0, 1.0)
    index.drop_ssd([10])
    freed = index.reclaim([[4]])
    assert freed is not None
    assert (sorted(freed.slots), freed.locations) == ([4, 5], [20])
    assert index.match(ONE, chain("abc")) == Match(0, 0)
    check_index(index)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([ONE, OTHER]),
            st.text("ab", min_size=1, max_size=6),
            st.integers(0, 6),
            st.booleans(),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 6),
)
def test_a_group_is_taken_whole_if_it_is_free_whatever_the_trees(
    chains: list[tuple[bytes, str, int, bool]], group_slots: int
) -> None:
    index = index_of(ONE, OTHER)
    slots, locations = iter(range(100)), iter(range(100, 200))
    held: set[int] = set()
    for now, (namespace, tokens, on_ssd, leased) in enumerate(chains):
        keys = chain(tokens)
        missing = len(tokens) - in_memory(index, tokens, namespace)
        given_ = [next(slots) for _ in range(missing)]
        index.insert(namespace, keys, len(tokens) - missing, given_, now, 1.0)
        index.insert_ssd(namespace, keys, 0, [next(locations) for _ in tokens[:on_ssd]], now, 1.0)
        if leased:
            lease = index.lease(namespace, keys, len(tokens), 0, now, 9.0)
            assert lease is not None
            held.update(lease.slots)
    everything = list(range(next(slots)))
    groups = [everything[at : at + group_slots] for at in range(0, len(everything), group_slots)]
    freed = index.reclaim(groups)
    check_index(index)
    if freed is None:
        assert all(held & set(group) for group in groups)
    else:
        assert any(set(group) <= set(freed.slots) for group in groups)
        assert not held & set(freed.slots)
        assert len(freed.slots) == len(set(freed.slots))
        left = sum(index.stats(namespace).in_memory for namespace in (ONE, OTHER))
        assert left == len(everything) - len(freed.slots)
