"""The boundary of guests' memory: where it shall stand, and where guests' blocks lie behind it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from loomserve.platform.lending.boundary import (
    Layout,
    Memory,
    allowed_ids,
    guest_blocks,
    lender_blocks,
    place,
    tail,
)

# 1,600 blocks: a margin of 50, a reserve of 100.
REST = Memory(
    blocks=1_600,
    tail_blocks=400,
    most_tail_blocks=1_200,
    free_blocks=500,
    queued_blocks=100,
    wanted_blocks=400,
    used_blocks=300,
)


@pytest.mark.parametrize(
    ("memory", "blocks"),
    [
        (REST, 400),
        (replace(REST, wanted_blocks=500), 500),
        # As far as the reserve stays free, and as guests may ever have.
        (replace(REST, wanted_blocks=900), 700),
        (replace(REST, wanted_blocks=900, free_blocks=199), 400),
        (replace(REST, wanted_blocks=1_500, free_blocks=1_150), 1_200),
        # What own requests lack, and a margin, also from under the guests.
        (replace(REST, queued_blocks=500), 400),
        (replace(REST, queued_blocks=501), 349),
        (replace(REST, queued_blocks=700), 150),
        (replace(REST, queued_blocks=700, wanted_blocks=900), 150),
        (replace(REST, queued_blocks=1_200), 0),
        # What nobody wants goes back, once it is worth it, but not what is used.
        (replace(REST, wanted_blocks=350), 400),
        (replace(REST, wanted_blocks=349), 349),
        (replace(REST, wanted_blocks=0), 300),
        (replace(REST, wanted_blocks=0, used_blocks=0), 0),
    ],
)
def test_the_tail_grows_into_spare_memory_and_shrinks_under_pressure(
    memory: Memory, blocks: int
) -> None:
    assert tail(memory) == blocks


@st.composite
def memories(draw: st.DrawFn) -> Memory:
    blocks = draw(st.integers(1, 3_000))
    most = draw(st.integers(0, blocks))
    lent = draw(st.integers(0, most))
    return Memory(
        blocks=blocks,
        tail_blocks=lent,
        most_tail_blocks=most,
        free_blocks=draw(st.integers(0, blocks - lent)),
        queued_blocks=draw(st.integers(0, 2_000)),
        wanted_blocks=draw(st.integers(0, 4_000)),
        used_blocks=draw(st.integers(0, lent)),
    )


def moved(memory: Memory) -> Memory:
    """Once the boundary stands where it shall, and the guests beyond it have left."""
    now = tail(memory)
    free = memory.free_blocks + memory.tail_blocks - now
    used = min(memory.used_blocks, now)
    return replace(memory, tail_blocks=now, free_blocks=free, used_blocks=used)


@given(memories())
def test_a_tail_is_as_long_as_it_may_be_at_most_and_grows_only_into_free_blocks(
    memory: Memory,
) -> None:
    assert 0 <= tail(memory) <= memory.most_tail_blocks
    assert moved(memory).free_blocks >= min(memory.queued_blocks, memory.free_blocks)


@given(memories())
def test_own_requests_have_all_that_they_lack_after_one_move_unless_guests_have_nothing_left(
    memory: Memory,
) -> None:
    after = moved(memory)
    assert after.free_blocks >= memory.queued_blocks or after.tail_blocks == 0


@given(memories())
def test_the_boundary_rests_once_it_has_moved(memory: Memory) -> None:
    after = moved(memory)
    if memory.queued_blocks <= memory.free_blocks:
        assert tail(after) == after.tail_blocks
    else:
        # Taken back under pressure, it is not lent again; what is left unwanted may go back, too.
        assert tail(after) <= after.tail_blocks
        assert tail(moved(after)) == moved(after).tail_blocks


@given(memories(), st.integers(1, 100))
def test_no_block_goes_back_and_forth_while_need_wavers_by_less_than_a_margin(
    memory: Memory, wavering: int
) -> None:
    margin = max(memory.blocks // 32, 1)
    wavering = wavering % margin
    after = moved(moved(memory))
    if after.free_blocks - after.queued_blocks >= margin:
        more = replace(after, queued_blocks=after.queued_blocks + wavering)
        assert tail(more) == after.tail_blocks


layouts = st.builds(
    Layout, layers=st.integers(1, 7), block_bytes=st.integers(1, 12).map(lambda count: 64 * count)
)


@st.composite
def tails(draw: st.DrawFn) -> tuple[int, int, int]:
    """The lender's blocks, its longest tail, and its tail now."""
    blocks = draw(st.integers(1, 40))
    most = draw(st.integers(0, blocks))
    return blocks, most, draw(st.integers(0, most))


def claims(
    lender: Layout, guest: Layout, blocks: int, most: int, ids: range
) -> list[tuple[int, int, int, int]]:
    """Lender layer, first byte, guest layer and id of each guest layer block of these ids."""
    layers = place(lender, blocks, guest, most)
    return [
        (each.lender_layer, each.offset_bytes + block * each.stride_bytes, layer, block)
        for layer, each in enumerate(layers)
        for block in ids
    ]


@given(layouts, layouts, tails())
def test_guest_blocks_are_apart_aligned_and_within_the_tail(
    lender: Layout, guest: Layout, lent: tuple[int, int, int]
) -> None:
    blocks, most, now = lent
    ids = allowed_ids(lender, guest, most, now)
    assert len(ids) == guest_blocks(lender, guest, now)
    owner = np.full((lender.layers, blocks * lender.block_bytes), -1)
    for lender_layer, byte, layer, block in claims(lender, guest, blocks, most, ids):
        assert byte % 64 == 0
        assert byte >= (blocks - now) * lender.block_bytes
        run = owner[lender_layer, byte : byte + guest.block_bytes]
        assert len(run) == guest.block_bytes
        assert (run == -1).all()
        run[:] = layer * 1_000 + block


@given(layouts, layouts, tails(), st.data())
def test_blocks_stay_where_they_are_when_the_boundary_moves(
    lender: Layout, guest: Layout, lent: tuple[int, int, int], data: st.DataObject
) -> None:
    blocks, most, now = lent
    later = data.draw(st.integers(0, now))
    was = set(claims(lender, guest, blocks, most, allowed_ids(lender, guest, most, now)))
    left = set(claims(lender, guest, blocks, most, allowed_ids(lender, guest, most, later)))
    assert left <= was


@given(layouts, tails())
def test_equal_geometries_lose_nothing(layout: Layout, lent: tuple[int, int, int]) -> None:
    blocks, most, now = lent
    assert guest_blocks(layout, layout, now) == now
    first = place(layout, blocks, layout, most)[0]
    assert first.offset_bytes == (blocks - most) * layout.block_bytes
    assert first.stride_bytes == layout.block_bytes


@given(layouts, layouts, st.integers(0, 200))
def test_the_shortest_tail_for_some_blocks_holds_them_and_no_shorter_one_does(
    lender: Layout, guest: Layout, blocks: int
) -> None:
    needed = lender_blocks(lender, guest, blocks)
    assert guest_blocks(lender, guest, needed) >= blocks
    if needed:
        assert guest_blocks(lender, guest, needed - 1) < blocks


def test_a_guest_of_more_layers_reads_what_it_wrote_through_strided_views() -> None:
    lender, guest = Layout(layers=2, block_bytes=192), Layout(layers=5, block_bytes=128)
    blocks, most, now = 12, 10, 7
    memory = np.zeros((lender.layers, blocks * lender.block_bytes), dtype=np.uint8)
    ids = allowed_ids(lender, guest, most, now)
    views = [
        as_strided(
            memory[each.lender_layer, each.offset_bytes :],
            (ids.stop, guest.block_bytes),
            (each.stride_bytes, 1),
        )
        for each in place(lender, blocks, guest, most)
    ]
    # 7 of the lender's blocks are 1,344 bytes a layer, of super-blocks of three guest layers.
    assert len(ids) == 1_344 // (3 * 128)
    for layer, view in enumerate(views):
        for block in ids:
            view[block] = 10 * layer + block
    for layer, view in enumerate(views):
        for block in ids:
            assert (view[block] == 10 * layer + block).all()
    assert not memory[:, : (blocks - now) * lender.block_bytes].any()


@pytest.mark.parametrize(("layers", "block_bytes"), [(0, 64), (1, 0), (1, -64), (1, 96)])
def test_a_layout_that_cannot_be_lent_is_refused(layers: int, block_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"layers|multiple of 64"):
        Layout(layers, block_bytes)


@pytest.mark.parametrize("most", [-1, 13])
def test_a_tail_longer_than_the_memory_is_refused(most: int) -> None:
    layout = Layout(layers=2, block_bytes=64)
    with pytest.raises(ValueError, match="in a memory of 12"):
        place(layout, 12, layout, most)
