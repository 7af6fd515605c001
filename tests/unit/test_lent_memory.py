"""Guests' KV in a lender's blocks: every byte of theirs is theirs alone, and of the range."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loomserve.platform.engine.lent_memory import guest_caches
from loomserve.platform.lending.geometry import Geometry
from loomserve.platform.lending.layout import Layout, guest_blocks, lender_blocks

BLOCKS = 12


def lender_caches(layers: int, heads: int, size: int, head: int) -> list[torch.Tensor]:
    whole = torch.zeros(layers, BLOCKS, heads, size, 2 * head)
    return list(whole)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 5),
    guest_layers=st.integers(1, 12),
    heads=st.integers(1, 3),
    guest_heads=st.integers(1, 4),
    guest_block=st.sampled_from([32, 64]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    first=st.integers(1, BLOCKS - 1),
)
def test_guests_write_into_the_range_only_and_nowhere_twice(
    layers: int,
    guest_layers: int,
    heads: int,
    guest_heads: int,
    guest_block: int,
    dtype: str,
    first: int,
) -> None:
    caches = lender_caches(layers, heads, 32, 32)
    guest = Geometry(
        layers=guest_layers, query_heads=guest_heads, kv_heads=guest_heads, head_size=32,
        block_size=guest_block, dtype=dtype, scale=1.0, isa="vec",
    )  # fmt: skip
    shapes = (Layout(layers, caches[0][0].nbytes), Layout(guest_layers, guest.layer_block_bytes))
    views = guest_caches(caches, first, BLOCKS - first, guest)
    places = guest_blocks(*shapes, BLOCKS - first)
    assert [len(key) for key, _ in views] == [places] * guest_layers
    for layer, (key, value) in enumerate(views):
        key.fill_(layer + 1)
        value.fill_(-layer - 1)
    for layer, (key, value) in enumerate(views):
        assert (key == layer + 1).all()
        assert (value == -layer - 1).all()
        assert key.shape == (places, guest_heads, guest_block, 32)
    assert not any(cache[:first].any() for cache in caches)


@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.integers(0, 50)
)
def test_so_many_blocks_hold_what_they_are_said_to_hold(
    layers: int, guest_layers: int, size: int, guest_size: int, blocks: int
) -> None:
    lender, guest = Layout(layers, 64 * size), Layout(guest_layers, 64 * guest_size)
    needed = lender_blocks(lender, guest, blocks)
    assert guest_blocks(lender, guest, needed) >= blocks
    if needed:
        assert guest_blocks(lender, guest, needed - 1) < blocks


def test_a_guest_like_the_lender_loses_nothing() -> None:
    same = Layout(30, 49152)
    assert guest_blocks(same, same, 17) == lender_blocks(same, same, 17) == 17
