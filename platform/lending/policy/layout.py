"""How many of a borrower's KV blocks fit into a range of a lender's blocks of another geometry.

KV is layer-major: a range of a lender's blocks is one run of bytes in each of its layers. The
borrower's layer ``g`` lies in the lender's layer ``g mod L``. If the borrower has more layers,
``stacked`` of them stand side by side in each of its blocks' bytes of a lender's layer. If it has
fewer, several of its blocks may lie ``abreast``, in the same bytes of different layers. The
borrower's blocks count upwards from the range's first byte, all that are abreast before the next,
so a range that grows or shrinks at its end leaves the others where they are.

Where a lender's KV is head-major in each layer, the borrower's blocks and heads must be as large as
its own. Those of the borrower's blocks that it has heads for lie abreast in one of its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Layout(NamedTuple):
    """The layers of a model's KV, and the bytes of one block in one of them. ``heads_apart``:
    whether each head's blocks lie together, and not each block's heads."""

    layers: int
    block_bytes: int
    heads_apart: bool = False


def stacked(lender: Layout, borrower: Layout) -> int:
    """Return how many of the borrower's layers lie in one of the lender's."""
    return -(-borrower.layers // lender.layers)


def abreast(lender: Layout, borrower: Layout) -> int:
    """Return how many of the borrower's blocks lie in the same bytes of different lender's layers.
    They are several only if the borrower's block size divides the lender's, as one stride must lead
    from any of the borrower's blocks to any other."""
    if lender.block_bytes % borrower.block_bytes:
        return 1
    return max(1, lender.layers // borrower.layers)


class Rows(NamedTuple):
    """Maps a borrower's block to its row in the caches of its layers: ``abreast`` blocks are beside
    one another, ``apart`` rows from one to the next."""

    abreast: int = 1
    apart: int = 0

    def of(self, block: Any) -> Any:
        """Return the row of a block number, or of each in an array."""
        return block % self.abreast * self.apart + block // self.abreast

    def blocks(self, rows: int) -> int:
        return (rows - (self.abreast - 1) * self.apart) * self.abreast

    def between(self, first: int, end: int) -> list[slice]:
        """Return the rows of blocks ``[first, end)``, a slice for each that are one behind the
        other."""
        return [
            slice(
                beside * self.apart + -(-(first - beside) // self.abreast),
                beside * self.apart + -(-(end - beside) // self.abreast),
            )
            for beside in range(self.abreast)
        ]


PLAIN = Rows()
"""Blocks that lie one behind the other."""


def borrower_blocks(lender: Layout, borrower: Layout, blocks: int) -> int:
    """Return how many of the borrower's blocks fit into ``blocks`` of the lender's."""
    if lender.heads_apart:
        return blocks * _of_heads(lender, borrower)
    places = blocks * lender.block_bytes // (stacked(lender, borrower) * borrower.block_bytes)
    return places * abreast(lender, borrower)


def lender_blocks(lender: Layout, borrower: Layout, blocks: int) -> int:
    """Return the fewest of the lender's blocks that hold ``blocks`` of the borrower's."""
    if lender.heads_apart:
        return -(-blocks // _of_heads(lender, borrower))
    places = -(-blocks // abreast(lender, borrower))
    return -(-places * stacked(lender, borrower) * borrower.block_bytes // lender.block_bytes)


def _of_heads(lender: Layout, borrower: Layout) -> int:
    """Return how many blocks of a borrower with fewer heads lie in one of the lender's."""
    return max(1, lender.block_bytes // borrower.block_bytes)


# Share of the lender's blocks that stays free, beyond what its requests need, when the tail grows.
# Half of it is freed, beyond what they lack, when the tail shrinks. In between the boundary rests.
_RESERVE = 1 / 16


@dataclass(frozen=True, slots=True)
class Memory:
    """A lender's KV memory, counted in its own blocks."""

    blocks: int  # all of them
    tail_blocks: int  # the borrowers', used or not
    most_tail_blocks: int
    free_blocks: int  # before the tail, with cached prefixes that may be evicted
    queued_blocks: int  # needed by the lender's own next steps, of running and waiting requests


def tail(memory: Memory) -> int:
    """Return the length that the tail must have, in blocks. Blocks that own requests lack are taken
    back at once, with a margin, even if borrowers use them: what is beyond the new boundary must
    leave. Others are lent if own requests leave them free above a reserve of two margins. What
    borrowers may not have any more is taken back once it is more than a margin."""
    margin = max(int(memory.blocks * _RESERVE / 2), 1)
    missing = memory.queued_blocks - memory.free_blocks
    if missing > 0:
        return max(memory.tail_blocks - missing - margin, 0)
    growth = memory.most_tail_blocks - memory.tail_blocks
    if growth > 0:
        return memory.tail_blocks + min(max(-missing - 2 * margin, 0), growth)
    return memory.most_tail_blocks if growth < -margin else memory.tail_blocks
