"""How many of a guest's KV blocks fit into a range of a lender's, whose geometry is another.

KV is layer-major: a range of a lender's blocks is one run of bytes in each of its layers. Guest
layer ``g`` lies in lender layer ``g mod L``. Where the guest has more layers, ``stacked`` of them
stand side by side in each guest block's bytes of a lender layer. Where it has fewer, several of its
blocks may lie ``abreast``, in the same bytes of different layers. Guest blocks count upwards from
the range's first byte, all that are abreast before the next, so a range that grows or shrinks at
its end leaves the others where they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Layout(NamedTuple):
    """Of a model's KV: its layers, and the bytes of one block in one of them."""

    layers: int
    block_bytes: int


def stacked(lender: Layout, guest: Layout) -> int:
    """Guest layers in one of the lender's."""
    return -(-guest.layers // lender.layers)


def abreast(lender: Layout, guest: Layout) -> int:
    """Guest blocks in the same bytes of different layers of the lender's.

    Several only where the guest's block divides the lender's, as one stride must lead from any of
    the guest's blocks to any other.
    """
    if lender.block_bytes % guest.block_bytes:
        return 1
    return max(1, lender.layers // guest.layers)


class Rows(NamedTuple):
    """In which row of its layers' caches a guest's block is.

    Attributes:
        abreast: Blocks that are beside one another.
        apart: Rows from one of them to the next.
    """

    abreast: int = 1
    apart: int = 0

    def of(self, block: Any) -> Any:
        """Of a number, or of each in an array."""
        return block % self.abreast * self.apart + block // self.abreast

    def blocks(self, rows: int) -> int:
        """That so many rows hold."""
        return (rows - (self.abreast - 1) * self.apart) * self.abreast


PLAIN = Rows()
"""One behind the other."""


def borrower_blocks(lender: Layout, guest: Layout, blocks: int) -> int:
    """Of the guest's, in so many of the lender's."""
    places = blocks * lender.block_bytes // (stacked(lender, guest) * guest.block_bytes)
    return places * abreast(lender, guest)


def lender_blocks(lender: Layout, guest: Layout, blocks: int) -> int:
    """The fewest of the lender's that hold so many of the guest's."""
    places = -(-blocks // abreast(lender, guest))
    return -(-places * stacked(lender, guest) * guest.block_bytes // lender.block_bytes)
