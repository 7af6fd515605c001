"""Views of a guest's KV cache in a lender's memory.

:mod:`loomserve.platform.lending.policy.layout` says where each block lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from loomserve.platform.lending.policy.layout import PLAIN, Layout, Rows, abreast, stacked
from loomserve.platform.lending.ring.geometry import Geometry

Caches = list[tuple[torch.Tensor, torch.Tensor]]


def borrower_caches(
    kv_caches: Sequence[torch.Tensor], first_block: int, blocks: int, guest: Geometry
) -> tuple[Caches, Rows]:
    """Key and value cache of each guest layer, and which of their rows are the guest's blocks.

    Args:
        kv_caches: the lender's, a layer each, [blocks, kv_heads, block_size, 2 * head_size], evenly
            spaced in memory.
        first_block: the first of the lender's blocks that guests may use.
        blocks: how many.
        guest: the guest's geometry.

    Returns:
        For each guest layer two views of shape [rows, kv_heads, block_size, head_size]. Rows that
        are no guest block's are not the guest's.

    Raises:
        ValueError: the lender's layers are not evenly spaced, and the guest's blocks lie abreast.
    """
    layouts = (
        Layout(len(kv_caches), kv_caches[0][0].nbytes),
        Layout(guest.layers, guest.layer_block_bytes),
    )
    together = stacked(*layouts)
    rows = PLAIN
    if (several := abreast(*layouts)) > 1:
        rows = Rows(several, guest.layers * _stride(kv_caches) // guest.layer_block_bytes)
    dtype: torch.dtype = getattr(torch, guest.dtype)
    size = guest.layer_block_bytes // dtype.itemsize
    caches = []
    for layer in range(guest.layers):
        lender = kv_caches[layer % len(kv_caches)]
        held = lender[first_block : first_block + blocks].view(-1).view(torch.uint8)
        number = held.numel() // (together * guest.layer_block_bytes)
        place = held[layer // len(kv_caches) * guest.layer_block_bytes :].view(dtype)
        cache = place.as_strided(
            (
                (rows.abreast - 1) * rows.apart + number,
                guest.kv_heads,
                2 * guest.block_size,
                guest.head_size,
            ),
            (together * size, size // guest.kv_heads, guest.head_size, 1),
        )
        key, value = cache.chunk(2, dim=2)
        caches.append((key, value))
    return caches, rows


def _stride(kv_caches: Sequence[torch.Tensor]) -> int:
    """Bytes from one layer to the next."""
    strides: set[int] = {
        after.data_ptr() - before.data_ptr() for before, after in pairwise(kv_caches)
    }
    stride = strides.pop()
    if strides or stride < 0 or stride % kv_caches[0][0].nbytes:
        raise ValueError("the lender's layers are not evenly spaced in memory")
    return stride
