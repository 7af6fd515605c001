"""How much of a lender's memory its guests have: the tail, whose boundary moves. A pure policy."""

from __future__ import annotations

from dataclasses import dataclass

# Of the lender's blocks: what stays free beyond what its requests need when the tail grows, and
# half of which is freed beyond what they lack when it shrinks. In between, the boundary rests.
_RESERVE = 1 / 16


@dataclass(frozen=True, slots=True)
class Memory:
    """A lender's, in its own blocks.

    Attributes:
        blocks: All that it has.
        tail_blocks: Of them the guests', used or not.
        most_tail_blocks: That guests may ever have.
        free_blocks: Before the tail, cached prefixes that may be evicted included.
        queued_blocks: That the lender's own next steps need: those of requests that run and of
            those that wait.
        wanted_blocks: That the guests would use, those that they use already included.
        used_blocks: From the tail's end to the farthest block that a guest uses.
    """

    blocks: int
    tail_blocks: int
    most_tail_blocks: int
    free_blocks: int
    queued_blocks: int
    wanted_blocks: int
    used_blocks: int


def tail(memory: Memory) -> int:
    """How many blocks the tail shall have.

    What own requests lack is taken back at once, with a margin, also where guests use it: those
    beyond the answer must leave. What guests want is lent from what own requests leave free above
    a reserve of twice the margin. What guests have ceased to want goes back once it is more than a
    margin.
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
