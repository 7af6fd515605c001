"""What kernels must know of a loan, from its ring."""

from __future__ import annotations

import torch

from loomserve.platform.lending.cuda.buffer import TaskShape
from loomserve.platform.lending.ring.ring import Ring


def task_shape(ring: Ring) -> TaskShape:
    """Return the shape of a ring's tasks; ``ValueError`` if the kernels cannot compute them."""
    geometry = ring.geometry
    if geometry.sliding_window != -1 or geometry.softcap:
        raise ValueError("the kernels of lending compute neither sliding windows nor soft caps")
    dtype: torch.dtype = getattr(torch, geometry.dtype)
    return TaskShape(
        layers=geometry.layers,
        query_heads=geometry.query_heads,
        kv_heads=geometry.kv_heads,
        head_size=geometry.head_size,
        block_size=geometry.block_size,
        dtype=dtype,
        scale=geometry.scale,
        max_rows=ring.max_tokens,
        max_requests=ring.max_requests,
        max_blocks=ring.max_blocks,
    )
