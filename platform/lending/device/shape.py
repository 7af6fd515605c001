"""What both ends of a loan derive from its ring: the shape of tasks, and files beside it."""

from __future__ import annotations

from pathlib import Path

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


def task_file(ring: Path) -> Path:
    """The file by which the borrower opens the memory that the lender made."""
    return ring.with_name(f"{ring.name}.task")


def answer_file(ring: Path) -> Path:
    """The file by which the lender opens the memory that the borrower made."""
    return ring.with_name(f"{ring.name}.answer")
