"""A shard that moves, under any order of requests' and lenders' doings, has one right copy."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from loomserve.platform.lending.engine.block_partitions import OWN, PartitionedPool, Partitions
from loomserve.platform.lending.engine.shards.migration import MigrationPhase, ShardMigration

OWN_BLOCKS, EXTRA, PARTITION = 3, 3, 1
ROOM = 5
"""Own blocks once the shard is away: fewer than the lender could hold."""

PLACES = st.integers(0, ROOM)


class Worker:
    """Memories of the shard, here and at the lender: what stands in each block. It takes two steps
    to give its memory back once it has left, and two to get ready for its coming home."""

    def __init__(self) -> None:
        self.unprepared = self.kept = 0
        self.here: dict[int, int] = {}
        self.there: dict[int, int] = {}
        self.back: dict[int, int] = {}
        self.away = False
        self.closed = False

    def __call__(self, method: str, call: str, partition: int, *given: Any) -> bool:
        assert (method, partition) == ("shard", PARTITION)
        done: bool = getattr(self, call)(*given)
        return done

    def send(self, blocks: list[int]) -> bool:
        assert not self.away
        if not self.closed:
            self.there.update({block: self.here[block] for block in blocks})
        return not self.closed

    def fetch(self, blocks: list[int]) -> bool:
        assert self.away
        if not self.closed:
            self.back.update({block: self.there[block] for block in blocks})
        return not self.closed

    def hand_over(self, rest: list[int]) -> bool:
        if rest and not self.send(rest):
            return False
        self.away, self.here, self.unprepared, self.kept = True, {}, 2, 2
        return True

    def free_memory(self) -> bool:
        assert self.away
        assert self.kept
        self.kept -= 1
        return not self.kept

    def prepare_return(self) -> bool:
        assert self.away
        assert self.unprepared
        self.unprepared -= 1
        return not self.unprepared

    def take_back(self, rest: list[int]) -> bool:
        if rest and not self.fetch(rest):
            return False
        assert all(block < OWN_BLOCKS for block in self.back)
        assert self.closed or not self.unprepared
        self.here = dict(self.back)
        self.away, self.back = False, {}
        return True

    def write(self, block: int, content: int) -> None:
        (self.there if self.away else self.here)[block] = content

    def read(self, block: int) -> int:
        return (self.there if self.away else self.here)[block]


class Migration(RuleBasedStateMachine):
    """Blocks are taken, filled, freed and found again, while the shard comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.partitions = Partitions([0, OWN_BLOCKS], OWN_BLOCKS + EXTRA)
        plain = BlockPool(
            num_gpu_blocks=OWN_BLOCKS + EXTRA, enable_caching=True, hash_block_size=32
        )
        self.pool = PartitionedPool(plain, self.partitions)
        self.pool.withhold(self.partitions.ranges[PARTITION])
        self.numbers = itertools.count()
        self.used: list[KVCacheBlock] = []
        self.content: dict[int, int] = {}
        self.ended = 0
        self._begin()

    def _begin(self) -> None:
        self.worker, self.granted, self.open = Worker(), OWN_BLOCKS + EXTRA, True
        self.worker.here = dict(self.content)
        self.shard = ShardMigration(self.pool, self.partitions, PARTITION, ROOM, 1, self.worker)

    # Requests

    @precondition(lambda self: self.pool.free_on(OWN))
    @rule()
    def take(self) -> None:
        with self.pool.on(OWN):
            self.used += self.pool.block_pool.get_new_blocks(1)
        self._write(self.used[-1])

    @precondition(lambda self: self.used)
    @rule(at=PLACES)
    def fill(self, at: int) -> None:
        """And write no more into it."""
        block = self.used[at % len(self.used)]
        if block.block_hash is None:
            self._write(block)
            name = BlockHash(next(self.numbers).to_bytes(32))
            key = make_block_hash_with_group_id(name, 0)
            block.set_block_hash(key, num_tokens=32)
            self.pool.block_pool.cached_block_hash_to_block.insert(key, block)

    @precondition(lambda self: self.used)
    @rule(at=PLACES)
    def free(self, at: int) -> None:
        self.pool.block_pool.free_blocks([self.used.pop(at % len(self.used))])

    def _write(self, block: KVCacheBlock) -> None:
        self.content[block.block_id] = next(self.numbers)
        self.worker.write(block.block_id, self.content[block.block_id])

    # The engine's steps, as its scheduler has them; too short for more than one copy

    @rule(running=st.booleans())
    def step(self, running: bool) -> None:
        for block in self.used if running else []:
            if block.block_hash is None:
                self._write(block)
        if self.worker.closed:
            self._lose()
            return
        if not self.open or not self.shard.fits(self.granted):
            self.shard.come_home("it was told to")
        self._leave(self.shard.use(self.granted))
        if not self.shard.advance(self.granted, 0.0, running):
            self._lose()
            return
        self._leave(self.shard.use(self.granted))
        if self.shard.phase is MigrationPhase.HOME:
            self._end()

    def _leave(self, gone: range) -> None:
        left = [block for block in self.used if block.block_id in gone]
        self.used = [block for block in self.used if block.block_id not in gone]
        self.pool.block_pool.free_blocks(left)

    def _lose(self) -> None:
        if self.shard.away:
            self.pool.block_pool.free_blocks(self.used)
            self.used = []
            self.shard.use(0)
            self.worker.closed = True
        self.shard.lose()
        self._end()

    def _end(self) -> None:
        """The next loan begins."""
        assert not self.worker.away
        self.ended += 1
        held = self._held()
        self.content = {block: self.content[block] for block in held}
        assert {block: self.worker.here[block] for block in held} == self.content
        self._begin()

    # The lender and the operator

    @rule(blocks=st.integers(0, OWN_BLOCKS + EXTRA))
    def grant(self, blocks: int) -> None:
        # It takes nothing back that is in use: it closes the ring then.
        self.granted = max(blocks, self.shard.has)

    @rule()
    def close(self) -> None:
        self.worker.closed = True

    @rule()
    def order_home(self) -> None:
        self.open = False

    # What holds between any two of them

    @invariant()
    def every_block_is_right_where_it_counts(self) -> None:
        if not (self.worker.closed and self.worker.away):
            for block in self._held():
                assert self.worker.read(block) == self.content[block]

    @invariant()
    def more_blocks_are_used_only_while_the_part_is_away(self) -> None:
        assert self.shard.away == self.worker.away == (self.partitions.of(OWN_BLOCKS) == OWN)
        assert self.shard.usable <= (ROOM - OWN_BLOCKS) * (self.shard.phase is MigrationPhase.AWAY)
        assert not (self.shard.usable and self.worker.kept)
        assert all(block < OWN_BLOCKS + self.shard.usable for block in self._held())

    def _held(self) -> list[int]:
        return [
            block.block_id
            for block in self.pool.blocks
            if not block.is_null and (block.ref_cnt or block.block_hash is not None)
        ]

    def teardown(self) -> None:
        """Left alone, it comes home, and every block that was freed can be had again."""
        self.open, self.granted = False, OWN_BLOCKS + EXTRA
        ended = self.ended
        for _ in range(2):
            if self.ended == ended:
                self.step(running=False)
        assert self.ended > ended
        assert self.pool.free_on(OWN) + len(self.used) == OWN_BLOCKS - 1


def test_a_part_that_moves_has_one_right_copy_and_ends_at_home() -> None:
    run_state_machine_as_test(
        Migration, settings=settings(max_examples=100, stateful_step_count=40)
    )


def test_a_block_that_is_filled_anew_while_others_are_copied_is_copied_again() -> None:
    world = Migration()
    for at in (0, 1):
        world.take()
        world.fill(at)
    world.step(running=True)
    assert len(world.worker.there) == 1
    world.free(0)
    world.take()
    world.fill(1)
    while world.shard.phase is MigrationPhase.LEAVING:
        world.step(running=True)
    world.every_block_is_right_where_it_counts()
    assert world.shard.copied_blocks == 3
    world.teardown()
