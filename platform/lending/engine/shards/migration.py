"""A loan on which a part of all requests' attention lives: the scheduler's part of its migration.

Where an ordinary loan keeps whole requests, this one keeps some heads of every block of KV, in a
block of the same number. The own memory has room for more blocks then, which take the numbers of
the loan's side.

The part moves while steps run (BanaServe, section 4.3.1): full blocks never change, so they are
copied a few in each step; when only those are left that are being filled, one pause copies them,
and the next step runs with the part elsewhere. The memory that it took here is let go in the steps
that follow, and then there are more blocks. It comes home the same way. The engine decides alone
when it pauses, within one call between two steps, so whoever ordered the move may be gone
meanwhile; and it has one copy that counts, its own before the pause ends and the lender's after.
What is lost with a lender is computed again from tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from loomserve.platform.lending.engine.block_partitions import OWN, PartitionedPool, Partitions

_COPY_SHARE = 0.2
"""Of the time of a step, for copying beside it."""
_SMOOTHING = 0.3

WorkerCall = Callable[..., Any]


class MigrationPhase(StrEnum):
    LEAVING = "leaving"
    """Copied to the lender while steps compute it here; an end now costs nothing."""
    AWAY = "away"
    """The lender has it."""
    RETURNING = "returning"
    """Copied back while steps compute it there."""
    HOME = "home"
    """As before the loan."""


class ShardMigration:
    """Of one scheduler and one lender.

    Args:
        pool: of all sides.
        sides: whose blocks are which.
        side: the lender's.
        blocks: own blocks for which there is room once the part is away.
        block_bytes: of the part in one block.
        workers: calls a method of the engine's worker.
    """

    def __init__(
        self,
        pool: PartitionedPool,
        sides: Partitions,
        side: int,
        blocks: int,
        block_bytes: int,
        workers: WorkerCall,
    ) -> None:
        self.phase = MigrationPhase.LEAVING
        self.usable = 0
        """Of the side's blocks, from the first on, those that are own ones now."""
        self.pause_s = 0.0
        """The longest time that steps stood still for it."""
        self.copied_blocks = 0
        self.why = ""
        """It comes home, once it does."""
        self._pool = pool
        self._sides = sides
        self._side = side
        self._own = len(sides.ranges[OWN])
        self._most = blocks - self._own
        self._block_bytes = block_bytes
        self._workers = workers
        # There are no more blocks before the memory is given back that the part took here.
        self._let_go = False
        # What has been copied, by number, as which content.
        self._copied: dict[int, Any] = {}
        self._block_s = 0.0
        self._prepared = False

    @property
    def away(self) -> bool:
        return self.phase in (MigrationPhase.AWAY, MigrationPhase.RETURNING)

    @property
    def has(self) -> int:
        """The lender's blocks in use, from the first on."""
        return 0 if self.phase is MigrationPhase.HOME else self._own + self.usable

    def state(self) -> dict[str, Any]:
        return {
            "phase": str(self.phase),
            "pause_s": self.pause_s,
            "copied_bytes": self.copied_blocks * self._block_bytes,
            "why": str(self.why),
        }

    def fits(self, granted: int) -> bool:
        """Whether the lender has room for the part, be it for no more own blocks than there are
        without it."""
        return granted >= self._own

    def advance(self, granted: int, step_s: float, running: bool) -> bool:
        """A few copies, or the switch if nothing else is left.

        Args:
            granted: blocks of the lender's that may be used.
            step_s: the time of a step; copies may add a part of it.
            running: whether a step waits for this.

        Returns:
            False if the lender's ring has closed.
        """
        if self.phase is MigrationPhase.AWAY:
            self._let_go_of_memory(_COPY_SHARE * step_s if running else math.inf)
        leaving = self.phase is MigrationPhase.LEAVING
        if not (leaving or self.phase is MigrationPhase.RETURNING) or not self.fits(granted):
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
            return self._copy("send_shard" if leaving else "fetch_shard", full[:few])
        if not self._switch(rest, leaving):
            return False
        if leaving and not running:
            self._let_go_of_memory(math.inf)
        return True

    def use(self, granted: int) -> range:
        """Let so many of the lender's blocks be used; those that were and must not any more.

        They are withheld, but requests may still hold them, which must leave before the next step.
        """
        here = self.phase is MigrationPhase.AWAY and self._let_go
        usable = max(0, min(granted - self._own, self._most)) if here else 0
        extra, before = self._sides.ranges[self._side], self.usable
        if usable < before:
            self._pool.withhold(extra[usable:])
        else:
            self._pool.offer(extra[before:usable])
        self.usable = usable
        return extra[usable:before]

    def come_home(self, why: str) -> None:
        """Begin to copy the part back; :meth:`use` then tells which blocks must be left."""
        self.why = self.why or why
        if self.phase is MigrationPhase.AWAY:
            self.phase = MigrationPhase.RETURNING
            self._copied.clear()
        elif self.phase is MigrationPhase.LEAVING:
            self.phase = MigrationPhase.HOME

    def lose(self) -> None:
        """The lender has it no more: nothing of any block counts, and all are whole again."""
        if self.away:
            self._pool.block_pool.evict_blocks(set(self._sides.ranges[OWN]))
            self._workers("take_back_shard", self._side, [])
            self._sides.separate(self._side)
        self.phase = MigrationPhase.HOME

    def _prepare(self, running: bool) -> bool:
        """As much as fits beside a step, or all if none waits; whether all is done."""
        while not self._prepared:
            self._prepared = self._workers("prepare_shard_return", self._side)
            if running:
                break
        return self._prepared

    def _let_go_of_memory(self, most_s: float) -> None:
        """A piece at least, and as many as take so long."""
        begin = time.perf_counter()
        while not self._let_go and time.perf_counter() - begin <= most_s:
            self._let_go = self._workers("free_shard_memory", self._side)

    def _held(self) -> list[KVCacheBlock]:
        """Blocks with KV in them: in use, or cached. The null block's is never read."""
        return [
            block
            for block in self._pool.blocks[: self._own + self.usable]
            if not block.is_null and (block.ref_cnt or block.block_hash is not None)
        ]

    def _few(self, step_s: float) -> int:
        return max(1, int(_COPY_SHARE * step_s / self._block_s)) if self._block_s else 1

    def _copy(self, call: str, blocks: list[KVCacheBlock]) -> bool:
        begin = time.perf_counter()
        if not self._workers(call, self._side, _numbers(blocks)):
            return False
        took_s = (time.perf_counter() - begin) / len(blocks)
        weight = _SMOOTHING if self._block_s else 1.0
        self._block_s += weight * (took_s - self._block_s)
        self.copied_blocks += len(blocks)
        self._copied.update((each.block_id, each.block_hash) for each in blocks)
        return True

    def _switch(self, rest: list[KVCacheBlock], leaving: bool) -> bool:
        """Copy the rest, and compute the part on the other side."""
        begin = time.perf_counter()
        call = "hand_over_shard" if leaving else "take_back_shard"
        if not self._workers(call, self._side, _numbers(rest)):
            return False
        self.copied_blocks += len(rest)
        if leaving:
            self._sides.join(self._side)
            self.phase = MigrationPhase.AWAY
        else:
            self._sides.separate(self._side)
            self.phase = MigrationPhase.HOME
        self._copied.clear()
        self.pause_s = max(self.pause_s, time.perf_counter() - begin)
        return True


def _numbers(blocks: Iterable[KVCacheBlock]) -> list[int]:
    return [each.block_id for each in blocks]
