"""How many of a guest's KV blocks fit into a range of a lender's, whose geometry is another.

KV is layer-major: a range of a lender's blocks is one run of bytes in each of its layers. Guest
layer ``g`` lies in lender layer ``g mod L``. Where the guest has more layers, ``stacked`` of them
stand side by side in each guest block's bytes of a lender layer. Guest blocks count upwards from
the range's first byte, so a range that grows or shrinks at its end leaves the others where they
are.
"""

from __future__ import annotations

from typing import NamedTuple


class Layout(NamedTuple):
    """Of a model's KV: its layers, and the bytes of one block in one of them."""

    layers: int
    block_bytes: int


def stacked(lender: Layout, guest: Layout) -> int:
    """Guest layers in one of the lender's."""
    return -(-guest.layers // lender.layers)


def guest_blocks(lender: Layout, guest: Layout, blocks: int) -> int:
    """Of the guest's, in so many of the lender's."""
    return blocks * lender.block_bytes // (stacked(lender, guest) * guest.block_bytes)


def lender_blocks(lender: Layout, guest: Layout, blocks: int) -> int:
    """The fewest of the lender's that hold so many of the guest's."""
    return -(-blocks * stacked(lender, guest) * guest.block_bytes // lender.block_bytes)
