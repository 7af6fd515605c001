"""Migration of a shard of all requests to a lender and home again: the scheduler's part of it.

An ordinary loan keeps whole requests. This one keeps some heads or layers of each KV block, in a
block of the same number. Own memory then has room for more blocks, which take the numbers of the
loan's partition.

The shard moves while steps run (BanaServe, section 4.3.1). Full blocks never change, so a few of
them are copied in each step. Once only blocks that are being filled are left, one pause copies
those, and the next step runs with the shard at the lender. The memory that the shard took here is
freed in the steps that follow, and then there are more blocks. The shard comes home the same way.

The engine alone decides when it pauses, within one call between two steps, so who ordered the
move may be gone meanwhile. One copy counts: the engine's own before the pause ends, the lender's
after. KV that is lost with a lender is computed again from tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from loomserve.platform.engine.scheduler_calls import WorkerCall
from loomserve.platform.lending.engine.block_partitions import OWN, PartitionedPool, Partitions
from loomserve.platform.state import ShardState

_COPY_SHARE = 0.2
"""Share of a step's time that copies beside it may add."""
_SMOOTHING = 0.3


class MigrationPhase(StrEnum):
    """Where a shard is computed, and where it is copied to."""

    LEAVING = "leaving"
    """Computed here, copied to the lender; to end now costs nothing."""
    AWAY = "away"
    """Computed by the lender."""
    RETURNING = "returning"
    """Computed by the lender, copied back."""
    HOME = "home"
    """Computed here, as before the loan."""


class ShardMigration:
    """Migrates one shard, of ``block_bytes`` in a block, between this engine and one lender. Once
    it is away there is room for ``blocks`` own blocks."""

    def __init__(
        self,
        pool: PartitionedPool,
        partitions: Partitions,
        partition: int,
        blocks: int,
        block_bytes: int,
        workers: WorkerCall,
    ) -> None:
        self.phase = MigrationPhase.LEAVING
        self.usable = 0
        """Blocks of the partition, from the first on, that are own ones now."""
        self.pause_s = 0.0
        """Longest pause of steps, in seconds."""
        self.copied_blocks = 0
        self.why = ""
        """Why it comes home, once it does."""
        self._pool = pool
        self._partitions = partitions
        self._partition = partition
        self._own = len(partitions.ranges[OWN])
        self._most = blocks - self._own
        self._block_bytes = block_bytes
        self._workers = workers
        # There are no more blocks before the memory is freed that the shard took here.
        self._let_go = False
        # Hash of each copied block's content, by number.
        self._copied: dict[int, Any] = {}
        self._block_s = 0.0
        self._prepared = False

    @property
    def away(self) -> bool:
        return self.phase in (MigrationPhase.AWAY, MigrationPhase.RETURNING)

    @property
    def has(self) -> int:
        """Blocks of the lender's in use, from the first on."""
        return 0 if self.phase is MigrationPhase.HOME else self._own + self.usable

    def state(self) -> ShardState:
        """How far it has moved; of which heads or layers it is, this does not know."""
        return ShardState(
            phase=str(self.phase),
            pause_s=self.pause_s,
            copied_bytes=self.copied_blocks * self._block_bytes,
            why=str(self.why),
        )

    def fits(self, granted: int) -> bool:
        """Whether the lender has room for the shard of the own blocks, even if for no more."""
        return granted >= self._own

    def advance(self, granted: int, step_s: float, running: bool) -> bool:
        """Copy a few blocks, or switch to the other copy if nothing else is left. The lender grants
        ``granted`` blocks. If a step waits for this (``running``), copies add a share of its
        ``step_s`` seconds. False if the lender's ring has closed."""
        if self.phase is MigrationPhase.AWAY:
            self._let_go_of_memory(_COPY_SHARE * step_s if running else math.inf)
        leaving = self.phase is MigrationPhase.LEAVING
        if not (leaving or self.phase is MigrationPhase.RETURNING):
            return True
        # On the way home the lender waits, whatever it wants back.
        if leaving and not self.fits(granted):
            return True
        if not leaving and not self._prepare(running):
            return True
        rest = [
            each
            for each in self._held()
            if each.block_hash is None or self._copied.get(each.block_id) != each.block_hash
        ]
        full = [each for each in rest if each.block_hash is not None]
        few = self._few(step_s) if running else len(full)
        if len(full) > few:
            return self._copy("send" if leaving else "fetch", full[:few])
        if not self._switch(rest, leaving):
            return False
        if leaving and not running:
            self._let_go_of_memory(math.inf)
        return True

    def use(self, granted: int) -> range:
        """Let so many of the lender's blocks be used; returns those that no longer may be. These
        are withheld, but requests may still hold them, which must leave before the next step."""
        here = self.phase is MigrationPhase.AWAY and self._let_go
        usable = max(0, min(granted - self._own, self._most)) if here else 0
        extra, before = self._partitions.ranges[self._partition], self.usable
        if usable < before:
            self._pool.withhold(extra[usable:])
        else:
            self._pool.offer(extra[before:usable])
        self.usable = usable
        return extra[usable:before]

    def come_home(self, why: str) -> None:
        """Begin to copy the shard back; :meth:`use` then tells which blocks must be left."""
        self.why = self.why or why
        if self.phase is MigrationPhase.AWAY:
            self.phase = MigrationPhase.RETURNING
            self._copied.clear()
        elif self.phase is MigrationPhase.LEAVING:
            self.phase = MigrationPhase.HOME

    def lose(self) -> None:
        """Forget the lender's copy: no cached block counts, and all blocks are whole again."""
        if self.away:
            self._pool.block_pool.evict_blocks(set(self._partitions.ranges[OWN]))
            self._workers("shard", "take_back", self._partition, [])
            self._partitions.separate(self._partition)
        self.phase = MigrationPhase.HOME

    def _prepare(self, running: bool) -> bool:
        """Prepare the return: one piece beside a step, or all if no step waits; returns if done."""
        while not self._prepared:
            self._prepared = self._workers("shard", "prepare_return", self._partition)
            if running:
                break
        return self._prepared

    def _let_go_of_memory(self, most_s: float) -> None:
        """Free the shard's memory here: one piece, and more until ``most_s`` have passed."""
        begin = time.perf_counter()
        while not self._let_go and time.perf_counter() - begin <= most_s:
            self._let_go = self._workers("shard", "free_memory", self._partition)

    def _held(self) -> list[KVCacheBlock]:
        """Blocks with KV in them: in use, or cached. The null block's KV is never read."""
        return [
            block
            for block in self._pool.blocks[: self._own + self.usable]
            if not block.is_null and (block.ref_cnt or block.block_hash is not None)
        ]

    def _few(self, step_s: float) -> int:
        return max(1, int(_COPY_SHARE * step_s / self._block_s)) if self._block_s else 1

    def _copy(self, call: str, blocks: list[KVCacheBlock]) -> bool:
        begin = time.perf_counter()
        if not self._workers("shard", call, self._partition, _numbers(blocks)):
            return False
        took_s = (time.perf_counter() - begin) / len(blocks)
        weight = _SMOOTHING if self._block_s else 1.0
        self._block_s += weight * (took_s - self._block_s)
        self.copied_blocks += len(blocks)
        self._copied.update((each.block_id, each.block_hash) for each in blocks)
        return True

    def _switch(self, rest: list[KVCacheBlock], leaving: bool) -> bool:
        begin = time.perf_counter()
        call = "hand_over" if leaving else "take_back"
        if not self._workers("shard", call, self._partition, _numbers(rest)):
            return False
        self.copied_blocks += len(rest)
        if leaving:
            self._partitions.join(self._partition)
            self.phase = MigrationPhase.AWAY
        else:
            self._partitions.separate(self._partition)
            self.phase = MigrationPhase.HOME
        self._copied.clear()
        self.pause_s = max(self.pause_s, time.perf_counter() - begin)
        return True


def _numbers(blocks: Iterable[KVCacheBlock]) -> list[int]:
    return [each.block_id for each in blocks]
