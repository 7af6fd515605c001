"""The boundary of borrowers' memory: where it shall stand, and where blocks lie behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.lending.policy.layout import Memory, tail

# 1,600 blocks: a margin of 50, a reserve of 100.
REST = Memory(
    blocks=1_600,
    tail_blocks=400,
    most_tail_blocks=400,
    free_blocks=500,
    queued_blocks=100,
)


@pytest.mark.parametrize(
    ("memory", "blocks"),
    [
        (REST, 400),
        (replace(REST, most_tail_blocks=500), 500),
        # As far as the reserve stays free.
        (replace(REST, most_tail_blocks=900), 700),
        (replace(REST, most_tail_blocks=900, free_blocks=199), 400),
        (replace(REST, most_tail_blocks=1_200, free_blocks=1_150), 1_200),
        # What own requests lack, and a margin, also from under the borrowers.
        (replace(REST, queued_blocks=500), 400),
        (replace(REST, queued_blocks=501), 349),
        (replace(REST, queued_blocks=700), 150),
        (replace(REST, queued_blocks=700, most_tail_blocks=900), 150),
        (replace(REST, queued_blocks=1_200), 0),
        # What borrowers may not have any more goes back, once it is worth it.
        (replace(REST, most_tail_blocks=350), 400),
        (replace(REST, most_tail_blocks=349), 349),
        (replace(REST, most_tail_blocks=0), 0),
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
    )


def moved(memory: Memory) -> Memory:
    """Once the boundary stands where it shall, and the borrowers beyond it have left."""
    now = tail(memory)
    free = memory.free_blocks + memory.tail_blocks - now
    return replace(memory, tail_blocks=now, free_blocks=free)


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
