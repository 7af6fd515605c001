"""One block address space over several memories: vLLM's KV blocks, divided into partitions.

Partition 0 is the engine's own memory; each other partition is a loan, whose blocks lie with a
lender. A request's blocks are all in one partition, so its attention is computed in one place.
Blocks that no memory backs just now are withheld: nobody is given them until they are offered.
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

from loomserve.platform.engine.scheduling.costs import block_bytes
from loomserve.platform.state.lending_options import LendingOptions

OWN = 0
"""Partition of the engine's own memory."""


class Partitions:
    """Ranges of block numbers; ``starts`` are the partitions' first blocks, from 0 on."""

    def __init__(self, starts: Sequence[int], blocks: int) -> None:
        self._starts = list(starts)
        ends = [*self._starts[1:], blocks]
        self.ranges = [range(start, end) for start, end in zip(self._starts, ends, strict=True)]
        self._joined: set[int] = set()

    def of(self, block: int) -> int:
        partition = bisect_right(self._starts, block) - 1
        return OWN if partition in self._joined else partition

    def join(self, partition: int) -> None:
        """Count its blocks, which are all withheld just now, to own memory."""
        self._joined.add(partition)

    def separate(self, partition: int) -> None:
        """Count its blocks, which are all withheld just now, to itself again."""
        self._joined.discard(partition)


def borrowed_partitions(config: KVCacheConfig, lending: LendingOptions) -> Partitions:
    """Own blocks first, then as many for each lender. Scheduler and worker both compute it, from
    the configuration that vLLM made of the worker's own memory and what it may borrow together."""
    each = lending.borrow_bytes // block_bytes(config) // lending.lenders
    own = config.num_blocks - each * lending.lenders
    starts = [own + i * each for i in range(lending.lenders)] if each else []
    return Partitions([0, *starts], config.num_blocks)


class PartitionedQueue:
    """Free queues of vLLM's, one a partition; blocks that are withheld stand in none. While
    ``partition`` is set, blocks are counted and taken there; else counted everywhere, and none can
    be taken."""

    def __init__(self, partitions: Partitions, free: Sequence[KVCacheBlock]) -> None:
        self.partition: int | None = None
        self._partitions = partitions
        for block in free:
            block.prev_free_block = block.next_free_block = None
        self._queues = [
            FreeKVCacheBlockQueue([block for block in free if block.block_id in partition])
            for partition in partitions.ranges
        ]
        self._withheld: set[int] = set()
        self._kept: dict[int, KVCacheBlock] = {}
        self._counts_withheld = False

    @property
    def num_free_blocks(self) -> int:
        if self.partition is not None:
            return self.free_on(self.partition)
        withheld = self.unbacked if self._counts_withheld else 0
        return withheld + sum(int(queue.num_free_blocks) for queue in self._queues)

    @contextmanager
    def counting_withheld(self) -> Iterator[None]:
        self._counts_withheld = True
        try:
            yield
        finally:
            self._counts_withheld = False

    def free_on(self, partition: int) -> int:
        return int(self._queues[partition].num_free_blocks)

    @property
    def unbacked(self) -> int:
        return len(self._kept)

    def is_kept(self, block: int) -> bool:
        """Whether the block is withheld, and nobody has it any more."""
        return block in self._kept

    def popleft_n(self, number: int) -> list[KVCacheBlock]:
        if self.partition is None:
            raise RuntimeError("blocks are taken from one partition: enter on() first")
        return list(self._queues[self.partition].popleft_n(number))

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def remove(self, block: KVCacheBlock) -> None:
        self._queues[self._partitions.of(block.block_id)].remove(block)

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

    def _divided(
        self, blocks: Sequence[KVCacheBlock]
    ) -> Iterator[tuple[FreeKVCacheBlockQueue, list[KVCacheBlock]]]:
        by_partition: dict[int, list[KVCacheBlock]] = {}
        for block in blocks:
            if block.block_id in self._withheld:
                self._kept[block.block_id] = block
            else:
                by_partition.setdefault(self._partitions.of(block.block_id), []).append(block)
        for partition, of_it in by_partition.items():
            yield self._queues[partition], of_it


class PartitionedHashes:
    """Prefix caches of vLLM's, one a partition: a prefix in one is no help in another."""

    def __init__(self, partitions: Partitions) -> None:
        self.partition: int | None = None
        self._partitions = partitions
        self._maps = [BlockHashToBlockMap() for _ in partitions.ranges]

    def get_one_block(self, key: Any) -> KVCacheBlock | None:
        maps = self._maps if self.partition is None else [self._maps[self.partition]]
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
        return self._maps[self._partitions.of(block_id)]


class PartitionedPool:
    """vLLM's block pool, of which each caller sees one partition at a time. Much of vLLM holds on
    to the pool, which stays what it is: only its queue of free blocks and its prefix cache are
    replaced."""

    def __init__(self, block_pool: BlockPool, partitions: Partitions) -> None:
        """Divide a pool of which nothing but the null block is in use."""
        self.block_pool = block_pool
        self.partitions = partitions
        self.queue = PartitionedQueue(partitions, block_pool.free_block_queue.get_all_free_blocks())
        block_pool.free_block_queue = self.queue
        self._forget_hashes()

    @property
    def blocks(self) -> list[KVCacheBlock]:
        blocks: list[KVCacheBlock] = self.block_pool.blocks
        return blocks

    def free_on(self, partition: int) -> int:
        return self.queue.free_on(partition)

    @contextmanager
    def on(self, partition: int) -> Iterator[None]:
        before = self.queue.partition
        self.queue.partition = self._hashes.partition = partition
        try:
            yield
        finally:
            self.queue.partition = self._hashes.partition = before

    def withhold(self, blocks: Iterable[int]) -> None:
        """Give none of these blocks to anybody any more, nor find prefixes in them."""
        numbers = set(blocks)
        self.block_pool.evict_blocks(numbers)
        self.queue.withhold(self.blocks[block] for block in sorted(numbers))

    def offer(self, blocks: Iterable[int]) -> None:
        self.queue.offer(self.blocks[block] for block in blocks)

    def reset_prefix_cache(self, reset: Callable[[], bool]) -> bool:
        """Let vLLM ``reset`` the pool's prefix cache, which is empty then in each partition."""
        # Blocks that are withheld are nobody's, and must not look used.
        with self.queue.counting_withheld():
            done = reset()
        if done:
            self._forget_hashes()
        return done

    @property
    def usage(self) -> float:
        """Share of the blocks with memory that is in use."""
        backed = int(self.block_pool.num_gpu_blocks) - 1 - self.queue.unbacked
        return 1.0 - self.queue.num_free_blocks / backed if backed else 0.0

    def _forget_hashes(self) -> None:
        self._hashes = PartitionedHashes(self.partitions)
        self.block_pool.cached_block_hash_to_block = self._hashes


class PartitionedKVCacheManager(KVCacheManager):  # type: ignore[misc]
    """vLLM's KV cache manager, with all blocks of a request in one partition. ``place`` names the
    partition on which a request without blocks starts. It is asked for each attempt to start a
    request, and None means that the request has to wait."""

    def __init__(
        self, plain: KVCacheManager, partitions: Partitions, place: Callable[[Request], int | None]
    ) -> None:
        # The same coordinator and block pool, which others hold on to.
        self.__dict__.update(plain.__dict__)
        self.pool = PartitionedPool(plain.block_pool, partitions)
        self._place = place
        self._placed: dict[str, int | None] = {}

    def partition_of(self, request: Request) -> int | None:
        """The partition of the request's blocks; without any, where it was last placed."""
        blocks: Sequence[KVCacheBlock] = self.coordinator.get_blocks(request.request_id)[0]
        if blocks:
            return self.pool.partitions.of(blocks[0].block_id)
        return self._placed.get(request.request_id, OWN)

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        partition = self._placed[request.request_id] = self._place(request)
        with self.pool.on(OWN if partition is None else partition):
            found: tuple[KVCacheBlocks, int, int] = super().get_computed_blocks(request)
        return found

    def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        partition = self.partition_of(request)
        if partition is None:
            return None
        with self.pool.on(partition):
            return super().allocate_slots(request, *args, **kwargs)

    def free(self, request: Request) -> None:
        self._placed.pop(request.request_id, None)
        super().free(request)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        self._placed.pop(request.request_id, None)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request)
        return blocks

    def reset_prefix_cache(self) -> bool:
        return self.pool.reset_prefix_cache(super().reset_prefix_cache)

    @property
    def usage(self) -> float:
        return self.pool.usage
