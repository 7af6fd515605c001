"""Views of a guest's KV cache in a lender's memory (:mod:`loomserve.platform.lending.layout`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loomserve.platform.lending.geometry import Geometry
from loomserve.platform.lending.layout import Layout, stacked

Caches = list[tuple[torch.Tensor, torch.Tensor]]


def guest_caches(
    kv_caches: Sequence[torch.Tensor], first_block: int, blocks: int, guest: Geometry
) -> Caches:
    """Key and value cache of each guest layer.

    Args:
        kv_caches: the lender's, a layer each, [blocks, kv_heads, block_size, 2 * head_size].
        first_block: the first of the lender's blocks that guests may use.
        blocks: how many.
        guest: the guest's geometry.

    Returns:
        For each guest layer two views of shape [guest blocks, kv_heads, block_size, head_size];
        guest blocks count upwards from the range's first byte.
    """
    shape = Layout(guest.layers, guest.layer_block_bytes)
    together = stacked(Layout(len(kv_caches), kv_caches[0][0].nbytes), shape)
    dtype: torch.dtype = getattr(torch, guest.dtype)
    size = guest.layer_block_bytes // dtype.itemsize
    caches = []
    for layer in range(guest.layers):
        lender = kv_caches[layer % len(kv_caches)]
        held = lender[first_block : first_block + blocks].view(-1).view(torch.uint8)
        number = held.numel() // (together * guest.layer_block_bytes)
        place = held[layer // len(kv_caches) * guest.layer_block_bytes :].view(dtype)
        cache = place.as_strided(
            (number, guest.kv_heads, 2 * guest.block_size, guest.head_size),
            (together * size, size // guest.kv_heads, guest.head_size, 1),
        )
        key, value = cache.chunk(2, dim=2)
        caches.append((key, value))
    return caches
