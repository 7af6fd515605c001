"""The boundary between a lender's own blocks and its guests', who have the tail of its memory.

Where it shall stand is a pure policy. Where a guest's blocks lie, when the geometries differ, is
arithmetic: KV is layer-major, so the tail is one run of bytes at the end of each of the lender's
layers. Guest layer g lies in lender layer g mod L, and k = ceil(G/L) guest layers share a lender
layer, side by side in super-blocks of k guest layer blocks. Super-blocks are laid from the tail's
end towards its beginning, so that none moves when the boundary does. Kernels want strides above 0,
so a block's id counts upwards, from the lowest that the longest tail has room for: the ids that a
shorter tail allows are the last ones.
"""

from __future__ import annotations

from dataclasses import dataclass

# What a kernel may expect of the beginning of a block.
_ALIGNMENT_BYTES = 64
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


@dataclass(frozen=True, slots=True)
class Layout:
    """Of a model's KV: its layers, and the bytes of one block in one of them.

    Raises:
        ValueError: There is no layer, or blocks are not a positive multiple of 64 bytes.
    """

    layers: int
    block_bytes: int

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"KV of {self.layers} layers")
        if self.block_bytes < 1 or self.block_bytes % _ALIGNMENT_BYTES:
            raise ValueError(
                f"a block of {self.block_bytes} bytes a layer cannot be lent or stand in lent "
                f"memory: it must be a multiple of {_ALIGNMENT_BYTES}"
            )


@dataclass(frozen=True, slots=True)
class GuestLayer:
    """Where one layer of a guest's KV lies.

    Attributes:
        lender_layer: It lies in.
        offset_bytes: Of the guest's block of id 0, from the beginning of the lender's layer.
        stride_bytes: From one id to the next.
    """

    lender_layer: int
    offset_bytes: int
    stride_bytes: int


def guest_blocks(lender: Layout, guest: Layout, tail_blocks: int) -> int:
    """Of the guest's, in a tail of so many of the lender's."""
    return tail_blocks * lender.block_bytes // _super_block_bytes(lender, guest)


def lender_blocks(lender: Layout, guest: Layout, blocks: int) -> int:
    """The shortest tail that holds so many of the guest's blocks."""
    return -(-blocks * _super_block_bytes(lender, guest) // lender.block_bytes)


def place(
    lender: Layout, lender_blocks: int, guest: Layout, max_tail_blocks: int
) -> list[GuestLayer]:
    """Where each layer of the guest lies, for good.

    Args:
        lender: The lender's layout.
        lender_blocks: All that the lender has.
        guest: The guest's layout.
        max_tail_blocks: The longest tail that there will be, of the lender's blocks.

    Raises:
        ValueError: The tail would be longer than the lender's memory.
    """
    if not 0 <= max_tail_blocks <= lender_blocks:
        raise ValueError(f"a tail of {max_tail_blocks} blocks in a memory of {lender_blocks}")
    stride = _super_block_bytes(lender, guest)
    longest = guest_blocks(lender, guest, max_tail_blocks)
    lowest = lender_blocks * lender.block_bytes - longest * stride
    return [
        GuestLayer(
            layer % lender.layers, lowest + layer // lender.layers * guest.block_bytes, stride
        )
        for layer in range(guest.layers)
    ]


def allowed_ids(lender: Layout, guest: Layout, max_tail_blocks: int, tail_blocks: int) -> range:
    """The ids of the guest's blocks that lie within a tail of ``tail_blocks``.

    Of a longer tail they are the same and lower ones. To shorten a tail rarely, hand out the
    highest first.
    """
    longest = guest_blocks(lender, guest, max_tail_blocks)
    return range(longest - guest_blocks(lender, guest, tail_blocks), longest)


def _super_block_bytes(lender: Layout, guest: Layout) -> int:
    return -(-guest.layers // lender.layers) * guest.block_bytes
