"""Copies of KV blocks on their own GPU, so that no step waits until its blocks are saved.

A copy within the GPU comes before whatever the engine computes next, and takes microseconds. From
it blocks are copied to the store, with their checksums, while the engine overwrites its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from loomserve.kvstore.engine.transfers.batched_memory import BatchedMemory
from loomserve.kvstore.engine.transfers.memory import HostStream
from loomserve.kvstore.engine.transfers.transfer import NOT_HELD, Save

STEP_BYTES = 2**27
"""The most of a step. As much of another may still be on its way to the store."""


@dataclass(frozen=True)
class Staged:
    """Saves whose new blocks are copied: their ``blocks`` are those of the staging's memory.
    ``mark`` is the position behind the copies, and ``part`` what to give back afterwards."""

    saves: list[Save]
    mark: Any
    part: int


class Staging:
    """Room for the new blocks of two steps, beside the memory ``of`` the engine. The engine's
    thread calls all but :meth:`free`."""

    def __init__(self, of: BatchedMemory, stream: HostStream) -> None:
        self.of = of
        self._part_blocks = max(1, STEP_BYTES // (of.layers * of.layer_bytes))
        # At the start, so that a GPU without room for it fails then.
        self._memory: BatchedMemory | None = self._room()
        self._stream = stream
        self._free = deque((0, self._part_blocks))

    def _room(self) -> BatchedMemory:
        return self.of.beside(2 * self._part_blocks)

    @property
    def memory(self) -> BatchedMemory:
        """What blocks are staged in; taken again where it was given back."""
        if self._memory is None:
            self._memory = self._room()
        return self._memory

    def fits(self, saves: Sequence[Save]) -> bool:
        """Whether there is room; it stays so until it is taken."""
        new = sum(len(save.new_blocks) for save in saves)
        return bool(self._free) and new <= self._part_blocks

    def stage(self, saves: Sequence[Save]) -> Staged:
        """Copy the new blocks of saves that fit, before what the engine's thread issues next."""
        part = self._free.popleft()
        blocks = [block for save in saves for block in save.new_blocks]
        step = self._stream.mark()
        with self._stream:
            self._stream.wait(step)
            self.memory.take(self.of, blocks, part)
        return Staged(_placed(saves, part), self._stream.hold(), part)

    def give_back(self) -> None:
        """Give its memory back, until something is staged again; nothing is just now."""
        assert len(self._free) == 2, "what is staged has not been saved"
        self._memory = None

    def free(self, part: int) -> None:
        self._free.append(part)


def _placed(saves: Sequence[Save], first: int) -> list[Save]:
    """Saves whose new blocks lie in a row from ``first`` on."""
    placed = []
    for save in saves:
        end = first + len(save.new_blocks)
        placed.append(replace(save, blocks=[NOT_HELD] * save.first + list(range(first, end))))
        first = end
    return placed
