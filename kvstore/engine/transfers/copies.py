"""What an engine copies to the store and from it: blocks of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NOT_HELD = -1
"""In the place of the number of a block."""


@dataclass(frozen=True)
class Load:
    """Copy of blocks ``[first, first + len(slots))`` of a chain from their slots to ``blocks``.

    ``ahead``: the last block is loaded before the forward pass begins, which will write into it.
    vLLM writes a layer's new KV before it waits for the layer's load.
    """

    namespace: bytes
    keys: bytes
    first: int
    slots: Sequence[int]
    blocks: Sequence[int]
    lease: int
    ahead: bool = False


@dataclass(frozen=True)
class Save:
    """Copy of a chain, which the engine holds in ``blocks``, as far as the store lacks it.

    ``recompute_s`` predicts the seconds to compute one of the blocks again. A reader is on its way,
    so the blocks stay in memory for ``keep_s``. ``outdated`` is the key of a block, not full, that
    the first of those which the store lacks takes the place of. Those before ``first`` were saved
    earlier, and are there unless the store has evicted them.
    """

    namespace: bytes
    keys: bytes
    blocks: Sequence[int]
    recompute_s: float
    keep_s: float = 0.0
    outdated: bytes = b""
    first: int = 0

    @property
    def new_blocks(self) -> Sequence[int]:
        return self.blocks[self.first :]
