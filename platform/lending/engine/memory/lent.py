"""Views of a borrower's KV cache in a lender's memory.

:mod:`loomserve.platform.lending.policy.layout` says where each block lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from loomserve.platform.lending.policy.layout import PLAIN, Layout, Rows, abreast, stacked
from loomserve.platform.lending.ring.geometry import GPU, Geometry

Caches = list[tuple[torch.Tensor, torch.Tensor]]


def borrower_caches(
    kv_caches: Sequence[torch.Tensor], first_block: int, blocks: int, borrower: Geometry
) -> tuple[Caches, Rows]:
    """Return the key and value cache of each of the borrower's layers, and the rows of its blocks.

    ``kv_caches`` are the lender's, one a layer, [blocks, kv_heads, block_size, 2 * head_size],
    evenly spaced in memory; the borrower has ``blocks`` of them from ``first_block`` on. The caches
    returned are [rows, kv_heads, block_size, head_size]; rows that are none of the borrower's
    blocks are not its own. ``ValueError`` if the lender's layers are not evenly spaced, and blocks
    lie abreast; or each of its heads' blocks lie together, and a borrower's block has no place in
    one of its own.
    """
    if heads_lie_apart(kv_caches[0]):
        return _by_head(kv_caches, range(first_block, first_block + blocks), borrower)
    layouts = (
        Layout(len(kv_caches), kv_caches[0][0].nbytes),
        Layout(borrower.layers, borrower.layer_block_bytes),
    )
    together = stacked(*layouts)
    rows = PLAIN
    if (several := abreast(*layouts)) > 1:
        rows = Rows(several, borrower.layers * _stride(kv_caches) // borrower.layer_block_bytes)
    dtype: torch.dtype = getattr(torch, borrower.dtype)
    size = borrower.layer_block_bytes // dtype.itemsize
    caches = []
    for layer in range(borrower.layers):
        lender = kv_caches[layer % len(kv_caches)]
        held = lender[first_block : first_block + blocks].view(-1).view(torch.uint8)
        number = held.numel() // (together * borrower.layer_block_bytes)
        place = held[layer // len(kv_caches) * borrower.layer_block_bytes :].view(dtype)
        cache = place.as_strided(
            (
                (rows.abreast - 1) * rows.apart + number,
                borrower.kv_heads,
                borrower.block_size,
                2 * borrower.head_size,
            ),
            (together * size, size // borrower.kv_heads, 2 * borrower.head_size, 1),
        )
        caches.append(keys_and_values(cache, borrower))
    return caches, rows


def heads_lie_apart(cache: torch.Tensor) -> bool:
    """Whether each head's blocks lie together, and not each block's heads."""
    return bool(cache.shape[1] > 1 and cache.stride(1) > cache.stride(0))


def keys_and_values(cache: torch.Tensor, geometry: Geometry) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a cache's keys and of its values, [blocks, kv_heads, block_size, head_size].
    ``cache`` is [blocks, kv_heads, block_size, 2 * head_size]; ``geometry.isa`` says how a head's
    bytes are divided."""
    if geometry.isa == GPU:
        key, value = cache.chunk(2, dim=3)
        return key, value
    shape = (*cache.shape[:2], 2 * geometry.block_size, geometry.head_size)
    strides = (*cache.stride()[:2], geometry.head_size, 1)
    key, value = cache.as_strided(shape, strides, cache.storage_offset()).chunk(2, dim=2)
    return key, value


def _by_head(
    kv_caches: Sequence[torch.Tensor], held: range, borrower: Geometry
) -> tuple[Caches, Rows]:
    """In one of the lender's blocks lie as many of the borrower's as it has heads for, abreast."""
    first, heads, size = kv_caches[0], borrower.kv_heads, borrower.head_size
    if (
        borrower.layers > len(kv_caches)
        or heads > first.shape[1]
        or borrower.layer_block_bytes // heads != first[0, 0].nbytes
    ):
        raise ValueError(
            "a lender whose heads' blocks lie together (LHBNC) has room for engines with blocks "
            "and heads of the same size alone, and no more heads or layers than its own"
        )
    of_block, of_head = first.stride()[:2]
    rows = Rows(first.shape[1] // heads, heads * of_head // of_block)
    caches = []
    for cache in kv_caches[: borrower.layers]:
        cache = cache[held.start :].as_strided(
            ((rows.abreast - 1) * rows.apart + len(held), heads, borrower.block_size, 2 * size),
            (of_block, of_head, 2 * size, 1),
        )
        caches.append(keys_and_values(cache, borrower))
    return caches, rows


def _stride(kv_caches: Sequence[torch.Tensor]) -> int:
    strides: set[int] = {
        after.data_ptr() - before.data_ptr() for before, after in pairwise(kv_caches)
    }
    stride = strides.pop()
    if strides or stride < 0 or stride % kv_caches[0][0].nbytes:
        raise ValueError("the lender's layers are not evenly spaced in memory")
    return stride
