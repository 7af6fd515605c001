"""One block address space over several memories: vLLM's block pool, divided into sides.

Side 0 is the engine's own memory; each other side is a loan, whose blocks lie with a lender. A
request's blocks all lie on one side, so its attention is computed in one place. Blocks that no
memory backs just now are withheld: nobody is given them until they are offered.

vLLM builds pool and manager itself and many of its parts hold on to them, so both are taken over as
the instances that they are (``divide``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from loomserve.platform.engine.kv_blocks import block_bytes
from loomserve.platform.state.lending_options import LendingOptions

OWN = 0
"""The side of the engine's own memory."""


class Partitions:
    """Which block is on which side; ``starts`` are the sides' first blocks, from 0 on."""

    def __init__(self, starts: Sequence[int], blocks: int) -> None:
        self._starts = list(starts)
        ends = [*self._starts[1:], blocks]
        self.ranges = [range(start, end) for start, end in zip(self._starts, ends, strict=True)]
        self._joined: set[int] = set()

    def of(self, block: int) -> int:
        side = bisect_right(self._starts, block) - 1
        return OWN if side in self._joined else side

    def join(self, side: int) -> None:
        """Its blocks are own ones from now on; all of them are withheld just now."""
        self._joined.add(side)

    def separate(self, side: int) -> None:
        """They are its own again; all of them are withheld."""
        self._joined.discard(side)


def borrowed_partitions(config: KVCacheConfig, lending: LendingOptions) -> Partitions:
    """Own blocks first, then an equal part for each lender.

    Scheduler and worker both compute it, from the configuration that vLLM made of the worker's own
    memory and what it may borrow together.
    """
    part = lending.borrow_bytes // block_bytes(config) // lending.lenders
    own = config.num_blocks - part * lending.lenders
    starts = [own + i * part for i in range(lending.lenders)] if part else []
    return Partitions([0, *starts], config.num_blocks)


class PartitionedQueue:
    """vLLM's queue of free blocks, one a side; blocks that are withheld stand in none.

    While ``side`` is set, blocks are counted and taken there; else they are counted everywhere, and
    none can be taken.
    """

    def __init__(self, sides: Partitions, free: Sequence[KVCacheBlock]) -> None:
        self.side: int | None = None
        self._sides = sides
        for block in free:
            block.prev_free_block = block.next_free_block = None
        self._queues = [
            FreeKVCacheBlockQueue([block for block in free if block.block_id in side])
            for side in sides.ranges
        ]
        self._withheld: set[int] = set()
        self._kept: dict[int, KVCacheBlock] = {}

    @property
    def num_free_blocks(self) -> int:
        if self.side is not None:
            return self.free_on(self.side)
        return sum(queue.num_free_blocks for queue in self._queues)

    def free_on(self, side: int) -> int:
        return int(self._queues[side].num_free_blocks)

    @property
    def unbacked(self) -> int:
        """Blocks that are free but withheld."""
        return len(self._kept)

    def is_kept(self, block: int) -> bool:
        """Whether the block is withheld, and nobody has it any more."""
        return block in self._kept

    def popleft_n(self, number: int) -> list[KVCacheBlock]:
        if self.side is None:
            raise RuntimeError("blocks are taken from one side")
        return list(self._queues[self.side].popleft_n(number))

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def remove(self, block: KVCacheBlock) -> None:
        self._queue_of(block).remove(block)

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        for queue, of_it in self._divided(blocks):
            queue.append_n(of_it)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        for queue, of_it in self._divided(blocks):
            queue.prepend_n(of_it)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return [block for queue in self._queues for block in queue.get_all_free_blocks()]

    def withhold(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Give none of them to anybody; those in use are kept once they are freed."""
        for block in blocks:
            if block.block_id not in self._withheld:
                self._withheld.add(block.block_id)
                if block.prev_free_block is not None:
                    self.remove(block)
                    self._kept[block.block_id] = block

    def offer(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            self._withheld.discard(block.block_id)
            if self._kept.pop(block.block_id, None) is not None:
                self.append(block)

    def _queue_of(self, block: KVCacheBlock) -> FreeKVCacheBlockQueue:
        return self._queues[self._sides.of(block.block_id)]

    def _divided(
        self, blocks: Sequence[KVCacheBlock]
    ) -> Iterator[tuple[FreeKVCacheBlockQueue, list[KVCacheBlock]]]:
        by_side: dict[int, list[KVCacheBlock]] = {}
        for block in blocks:
            if block.block_id in self._withheld:
                self._kept[block.block_id] = block
            else:
                by_side.setdefault(self._sides.of(block.block_id), []).append(block)
        for side, of_it in by_side.items():
            yield self._queues[side], of_it


class PartitionedHashes:
    """vLLM's prefix cache, one a side: a prefix on one is no help on another."""

    def __init__(self, sides: Partitions) -> None:
        self.side: int | None = None
        self._sides = sides
        self._maps = [BlockHashToBlockMap() for _ in sides.ranges]

    def get_one_block(self, key: Any) -> KVCacheBlock | None:
        maps = self._maps if self.side is None else [self._maps[self.side]]
        return next((block for each in maps if (block := each.get_one_block(key))), None)

    def contain(self, key: Any, block_id: int) -> bool:
        return bool(self._map_of(block_id).contain(key, block_id))

    def insert(self, key: Any, block: KVCacheBlock) -> None:
        self._map_of(block.block_id).insert(key, block)

    def pop(self, key: Any, block_id: int) -> KVCacheBlock | None:
        return self._map_of(block_id).pop(key, block_id)

    def __len__(self) -> int:
        return sum(len(each) for each in self._maps)

    def _map_of(self, block_id: int) -> BlockHashToBlockMap:
        return self._maps[self._sides.of(block_id)]


class PartitionedBlockPool(BlockPool):  # type: ignore[misc]
    """vLLM's block pool, of which each caller sees one side at a time."""

    sides: Partitions
    free_block_queue: PartitionedQueue
    cached_block_hash_to_block: PartitionedHashes
    blocks: list[KVCacheBlock]
    num_gpu_blocks: int

    @classmethod
    def divide(cls, pool: BlockPool, sides: Partitions) -> PartitionedBlockPool:
        """Take over a pool of which nothing but the null block is in use."""
        free = pool.free_block_queue.get_all_free_blocks()
        pool.__class__ = cls
        pool.sides = sides
        pool.free_block_queue = PartitionedQueue(sides, free)
        pool.cached_block_hash_to_block = PartitionedHashes(sides)
        divided: PartitionedBlockPool = pool
        return divided

    @contextmanager
    def on(self, side: int) -> Iterator[None]:
        """Within, only what is on this side is seen."""
        queue, hashes = self.free_block_queue, self.cached_block_hash_to_block
        before = queue.side
        queue.side = hashes.side = side
        try:
            yield
        finally:
            queue.side = hashes.side = before

    def withhold(self, blocks: Iterable[int]) -> None:
        """Give none of these blocks to anybody any more, nor find prefixes in them."""
        numbers = set(blocks)
        self.evict_blocks(numbers)
        self.free_block_queue.withhold(self.blocks[block] for block in sorted(numbers))

    def offer(self, blocks: Iterable[int]) -> None:
        """Give these blocks to whoever needs some."""
        self.free_block_queue.offer(self.blocks[block] for block in blocks)

    def reset_prefix_cache(self) -> bool:
        # What is withheld is nobody's, and must not look used.
        every, unbacked = self.num_gpu_blocks, self.free_block_queue.unbacked
        self.num_gpu_blocks = every - unbacked
        try:
            done: bool = super().reset_prefix_cache()
        finally:
            self.num_gpu_blocks = every
        if done:
            self.cached_block_hash_to_block = PartitionedHashes(self.sides)
        return done

    def get_usage(self) -> float:
        backed = self.num_gpu_blocks - 1 - self.free_block_queue.unbacked
        return 1.0 - self.get_num_free_blocks() / backed if backed else 0.0


class PartitionedKVCacheManager(KVCacheManager):  # type: ignore[misc]
    """vLLM's KV cache manager; ``place`` says on which side a request without blocks starts.

    ``place`` is asked for each attempt to start a request, and None means that it has to wait.
    """

    block_pool: PartitionedBlockPool
    place: Callable[[Request], int | None]
    _placed: dict[str, int | None]

    @classmethod
    def divide(
        cls, manager: KVCacheManager, sides: Partitions, place: Callable[[Request], int | None]
    ) -> PartitionedKVCacheManager:
        """Take over a manager that has no request yet."""
        PartitionedBlockPool.divide(manager.block_pool, sides)
        manager.__class__ = cls
        manager.place = place
        manager._placed = {}
        divided: PartitionedKVCacheManager = manager
        return divided

    def partition_of(self, request: Request) -> int | None:
        """Where its blocks are; else where it was last placed."""
        blocks: Sequence[KVCacheBlock] = self.coordinator.get_blocks(request.request_id)[0]
        if blocks:
            return self.block_pool.sides.of(blocks[0].block_id)
        return self._placed.get(request.request_id, OWN)

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        side = self._placed[request.request_id] = self.place(request)
        with self.block_pool.on(OWN if side is None else side):
            found: tuple[KVCacheBlocks, int, int] = super().get_computed_blocks(request)
        return found

    def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        side = self.partition_of(request)
        if side is None:
            return None
        with self.block_pool.on(side):
            return super().allocate_slots(request, *args, **kwargs)

    def free(self, request: Request) -> None:
        self._placed.pop(request.request_id, None)
        super().free(request)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        self._placed.pop(request.request_id, None)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request)
        return blocks
