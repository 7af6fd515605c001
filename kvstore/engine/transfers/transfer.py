"""Copies of KV blocks between engine and store: layer i computes while i+1 loads and i-1 is saved.

BanaServe, section 4.3.3. With N layers, a forward pass of T_F seconds of which a share r is left
to compute, and S bytes of KV a token and layer, a layer's transfer hides behind a layer's
computation if S * L * r / B <= T_F * r / N at L tokens and B bytes a second.

The forward pass runs in the worker's main thread; one thread loads for it and another saves. The
main thread waits only for the event of one layer, or at the end of a step for the last copy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loomserve.kvstore.engine.transfers.memory import BlockMemory, BlockPieces, HostStream, KvRows
from loomserve.kvstore.index.radix import key_at
from loomserve.kvstore.server.client import StoreClient
from loomserve.kvstore.storage.arena import Arena
from loomserve.kvstore.storage.checksum import PAGE, BlockLayout, seed

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
    so the blocks stay in memory for ``keep_s``. ``outdated`` is the key of an unfilled block that
    the first new one takes the place of. Blocks before ``first`` were saved earlier, and are there
    unless the store has evicted them.
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


class Copied(NamedTuple):
    """Bytes copied since the start, and the seconds that these copies took."""

    size: int = 0
    busy_s: float = 0.0


class Saved(NamedTuple):
    """Blocks saved since the start, and what they cost the thread that saves: seconds of a core. To
    ask the store is a part of that."""

    blocks: int = 0
    core_s: float = 0.0


@dataclass(frozen=True)
class BlockRun:
    """Blocks that are contiguous in the engine's memory, from ``first`` on, and in the arena.

    ``pieces``, ``[blocks, layers, layer_bytes]``, and ``checksums``, ``[blocks, layers]``, are
    views of their ``slots``.
    """

    first: int
    pieces: NDArray[np.uint8]
    checksums: NDArray[np.uint64]
    slots: Sequence[int]
    namespace: bytes
    keys: Sequence[bytes]

    @cached_property
    def seeds(self) -> list[int]:
        return [seed(self.namespace, key) for key in self.keys]

    def of(self, layer: int) -> BlockPieces:
        return BlockPieces(self.first, self.pieces[:, layer])

    def sealed_bytes(self, rows: Sequence[KvRows] | None, at: int, layer: int) -> memoryview:
        """What a checksum is of: the layer of block ``at`` in the engine's ``rows``; in its slot,
        where the CPU cannot read those."""
        if rows is not None:
            return rows[layer].piece(self.first + at, self.pieces.shape[2])
        in_slot: memoryview = self.pieces[at, layer].data
        return in_slot


class TransferThread:
    """Thread that copies blocks between an engine and the arena, in the order of the steps."""

    def __init__(
        self, memory: BlockMemory, arena: Arena, stream: HostStream, store: StoreClient
    ) -> None:
        self.memory = memory
        """Replaceable, while nothing is copied, by memory with blocks of the same size."""
        self._arena = arena
        self._layout = BlockLayout(memory.layers, memory.layer_bytes)
        self._stream = stream
        self._store = store
        # One thread, so that the store is asked in the order of the steps.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=type(self).__name__)
        # Replaced as a whole, for the engine's thread reads it while this thread copies: bytes
        # without their seconds would be a transfer that took no time.
        self.copied = Copied()

    def _events(self) -> list[threading.Event]:
        return [threading.Event() for _ in range(self.memory.layers)]

    def _count(self, size: int, busy_s: float) -> None:
        self.copied = Copied(self.copied.size + size, self.copied.busy_s + busy_s)

    @property
    def _most_blocks(self) -> int:
        return max(1, self.memory.copy_bytes // self.memory.layer_bytes)

    def _runs(
        self, namespace: bytes, keys: bytes, slots: Sequence[int], blocks: Sequence[int]
    ) -> Iterator[BlockRun]:
        """Copies between ``slots`` and ``blocks``, as few as contiguity allows."""
        pages, most = self._layout.slot_bytes // PAGE, self._most_blocks

        def run_of(at: tuple[int, tuple[int, int]]) -> tuple[int, int, int]:
            number, (slot, block) = at
            return slot - number * pages, block - number, number // most

        for _, group in groupby(enumerate(zip(slots, blocks, strict=True)), run_of):
            numbers, places = zip(*group, strict=True)
            slot, block = places[0]
            view = self._arena.view(slot, len(places) * self._layout.slot_bytes)
            view = view.reshape(len(places), self._layout.slot_bytes)
            pieces, checksums = self._layout.pieces(view), self._layout.checksums(view)
            run_slots, run_keys = [slot for slot, _ in places], [key_at(keys, n) for n in numbers]
            yield BlockRun(block, pieces, checksums, run_slots, namespace, run_keys)

    def _copies(self, runs: Iterable[BlockRun]) -> list[list[BlockRun]]:
        """The runs, together as far as a copy goes."""
        most = self._most_blocks
        copies: list[list[BlockRun]] = []
        blocks = most
        for run in runs:
            blocks += len(run.slots)
            if blocks > most:
                copies.append([])
                blocks = len(run.slots)
            copies[-1].append(run)
        return copies

    def close(self) -> None:
        self._thread.shutdown()
        self._store.close()


def layer_bytes(copies: Iterable[Sequence[BlockRun]]) -> int:
    """Bytes of one layer of all these blocks."""
    return sum(len(run.slots) * run.pieces.shape[2] for runs in copies for run in runs)
