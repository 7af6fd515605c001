"""Borrowers' KV in a lender's blocks: every byte of theirs is theirs alone, and of the range."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loomserve.platform.lending.engine.memory.lent import borrower_caches, keys_and_values
from loomserve.platform.lending.policy.layout import Layout, borrower_blocks, lender_blocks
from loomserve.platform.lending.ring.geometry import GPU, Geometry

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
    isa=st.sampled_from(["vec", GPU]),
    first=st.integers(1, BLOCKS - 1),
)
def test_guests_write_into_the_range_only_and_nowhere_twice(
    layers: int,
    guest_layers: int,
    heads: int,
    guest_heads: int,
    guest_block: int,
    dtype: str,
    isa: str,
    first: int,
) -> None:
    caches = lender_caches(layers, heads, 32, 32)
    borrower = Geometry(
        layers=guest_layers, query_heads=guest_heads, kv_heads=guest_heads, head_size=32,
        block_size=guest_block, dtype=dtype, scale=1.0, isa=isa,
    )  # fmt: skip
    shapes = (Layout(layers, caches[0][0].nbytes), Layout(guest_layers, borrower.layer_block_bytes))
    views, rows = borrower_caches(caches, first, BLOCKS - first, borrower)
    places = borrower_blocks(*shapes, BLOCKS - first)
    assert [rows.blocks(len(key)) for key, _ in views] == [places] * guest_layers
    at = [rows.of(block) for block in range(places)]
    marks = {(layer, block): layer + 100 * block + 1 for layer in range(guest_layers)
             for block in range(places)}  # fmt: skip
    for (layer, block), mark in marks.items():
        key, value = views[layer]
        assert key.shape[1:] == (guest_heads, guest_block, 32)
        key[at[block]], value[at[block]] = mark % 251, -mark % 241
    for (layer, block), mark in marks.items():
        key, value = views[layer]
        assert (key[at[block]] == mark % 251).all()
        assert (value[at[block]] == -mark % 241).all()
    assert not any(cache[:first].any() for cache in caches)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 3),
    fewer_layers=st.integers(0, 2),
    heads=st.integers(1, 6),
    guest_heads=st.integers(1, 6),
    isa=st.sampled_from(["vec", GPU]),
    first=st.integers(1, BLOCKS - 1),
    shorter=st.booleans(),
)
def test_guests_of_a_lender_whose_heads_lie_apart_write_into_the_range_only_and_nowhere_twice(
    layers: int,
    fewer_layers: int,
    heads: int,
    guest_heads: int,
    isa: str,
    first: int,
    shorter: bool,
) -> None:
    guest_layers, guest_heads = max(1, layers - fewer_layers), min(heads, guest_heads)
    caches = list(torch.zeros(layers, heads, BLOCKS, 32, 2 * 32).transpose(1, 2))
    # As many bytes of a head in a block.
    size, head = (16, 64) if shorter else (32, 32)
    borrower = Geometry(
        layers=guest_layers, query_heads=guest_heads, kv_heads=guest_heads, head_size=head,
        block_size=size, dtype="float32", scale=1.0, isa=isa,
    )  # fmt: skip
    shapes = (
        Layout(layers, caches[0][0].nbytes, heads_apart=True),
        Layout(guest_layers, borrower.layer_block_bytes),
    )
    views, rows = borrower_caches(caches, first, BLOCKS - first, borrower)
    # A single head's blocks lie as they would in a lender whose heads are not apart.
    places = (
        borrower_blocks(*shapes, BLOCKS - first) if heads > 1 else rows.blocks(len(views[0][0]))
    )
    assert [rows.blocks(len(key)) for key, _ in views] == [places] * guest_layers
    assert lender_blocks(*shapes, places) == BLOCKS - first or heads == 1
    for layer, (key, value) in enumerate(views):
        assert key.shape[1:] == (guest_heads, size, head)
        for block in range(places):
            at = rows.of(block)
            assert not key[at].any()
            assert not value[at].any()
            key[at], value[at] = 1 + layer + 10 * block, -1 - layer - 10 * block
    for layer, (key, value) in enumerate(views):
        for block in range(places):
            assert (key[rows.of(block)] == 1 + layer + 10 * block).all()
            assert (value[rows.of(block)] == -1 - layer - 10 * block).all()
    assert not any(cache[:first].any() for cache in caches)


@pytest.mark.parametrize(("away", "abreast"), [(1, 5), (2, 2), (3, 1)])
def test_blocks_of_some_layers_lie_abreast_and_leave_from_the_end(away: int, abreast: int) -> None:
    whole = Geometry(
        layers=5, query_heads=2, kv_heads=2, head_size=32, block_size=32, dtype="float32",
        scale=1.0, isa="vec",
    )  # fmt: skip
    borrower, shape = replace(whole, layers=away), Layout(5, whole.layer_block_bytes)
    part = Layout(away, borrower.layer_block_bytes)
    assert borrower_blocks(shape, part, 4) == 4 * abreast
    caches = lender_caches(5, 2, 32, 32)
    views, rows = borrower_caches(caches, 0, BLOCKS, borrower)
    for key, _ in views:
        for block in range(4 * abreast):
            key[rows.of(block)] = 1
    assert not any(cache[4:].any() for cache in caches)


def test_blocks_lie_abreast_only_where_layers_are_evenly_spaced_in_memory() -> None:
    borrower = Geometry(
        layers=1, query_heads=1, kv_heads=1, head_size=32, block_size=32, dtype="float32",
        scale=1.0, isa="vec",
    )  # fmt: skip
    with pytest.raises(ValueError, match="evenly spaced"):
        borrower_caches(lender_caches(2, 1, 32, 32)[::-1], 0, 3, borrower)


@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.integers(0, 50)
)
def test_so_many_blocks_hold_what_they_are_said_to_hold(
    layers: int, guest_layers: int, size: int, guest_size: int, blocks: int
) -> None:
    lender, borrower = Layout(layers, 64 * size), Layout(guest_layers, 64 * guest_size)
    needed = lender_blocks(lender, borrower, blocks)
    assert borrower_blocks(lender, borrower, needed) >= blocks
    if needed:
        assert borrower_blocks(lender, borrower, needed - 1) < blocks


def test_a_guest_like_the_lender_loses_nothing() -> None:
    same = Layout(30, 49152)
    assert borrower_blocks(same, same, 17) == lender_blocks(same, same, 17) == 17


@pytest.mark.parametrize("isa", ["vec", GPU])
def test_keys_and_values_of_a_head_are_each_half_of_its_bytes(isa: str) -> None:
    geometry = Geometry(
        layers=1, query_heads=2, kv_heads=2, head_size=4, block_size=3, dtype="float32",
        scale=1.0, isa=isa,
    )  # fmt: skip
    (cache,) = lender_caches(1, 2, 3, 4)
    key, value = keys_and_values(cache, geometry)
    key[5], value[5] = 1, 2
    token = [1] * 4 + [2] * 4 if isa == GPU else [1] * 8
    assert cache[5, 1, 0].tolist() == token
    assert cache[5, 1].sum() == 3 * 4 * (1 + 2)
    assert not cache[4].any()
