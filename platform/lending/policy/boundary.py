"""How much of a lender's memory its borrowers have: the tail, whose boundary moves. Pure."""

from __future__ import annotations

from dataclasses import dataclass

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
