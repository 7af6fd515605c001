"""How much of a lender's memory its borrowers have: the tail, whose boundary moves. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# Share of the lender's blocks that stays free, beyond what its requests need, when the tail grows.
# Half of it is freed, beyond what they lack, when the tail shrinks. In between the boundary rests.
_RESERVE = 1 / 16


@dataclass(frozen=True, slots=True)
class Memory:
    """A lender's KV memory, counted in its own blocks.

    Attributes:
        blocks: All of them.
        tail_blocks: The borrowers', used or not.
        most_tail_blocks: The most that borrowers may ever have.
        free_blocks: Free ones before the tail, with cached prefixes that may be evicted.
        queued_blocks: Needed by the lender's own next steps, of running and waiting requests.
        wanted_blocks: That borrowers would use, with those that they use already.
        used_blocks: From the tail's end to the farthest block that a borrower uses.
    """

    blocks: int
    tail_blocks: int
    most_tail_blocks: int
    free_blocks: int
    queued_blocks: int
    wanted_blocks: int
    used_blocks: int


def tail(memory: Memory) -> int:
    """Return how many blocks the tail shall have.

    Blocks that own requests lack are taken back at once, with a margin, even if borrowers use them:
    whoever is beyond the new boundary must leave. Blocks that borrowers want are lent if own
    requests leave them free above a reserve of two margins. Blocks that borrowers no longer want
    are taken back once they are more than a margin.
    """
    margin = max(int(memory.blocks * _RESERVE / 2), 1)
    missing = memory.queued_blocks - memory.free_blocks
    if missing > 0:
        return max(memory.tail_blocks - missing - margin, 0)
    wanted = min(max(memory.wanted_blocks, memory.used_blocks), memory.most_tail_blocks)
    if wanted > memory.tail_blocks:
        spare = -missing - 2 * margin
        return memory.tail_blocks + min(max(spare, 0), wanted - memory.tail_blocks)
    return wanted if memory.tail_blocks - wanted > margin else memory.tail_blocks
