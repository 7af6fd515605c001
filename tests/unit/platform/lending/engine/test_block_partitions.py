"""vLLM's own block pool and manager, divided into partitions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from loomserve.platform.lending.engine.block_partitions import (
    OWN,
    PartitionedKVCacheManager,
    PartitionedPool,
    Partitions,
    borrowed_partitions,
)
from loomserve.platform.state.lending_options import LendingOptions

SIZE = 32
BLOCKS = 24
PARTITIONS = Partitions([0, 8, 16], BLOCKS)


def config() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=32, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)]
    )


def pool() -> PartitionedPool:
    plain = BlockPool(num_gpu_blocks=BLOCKS, enable_caching=True, hash_block_size=SIZE)
    return PartitionedPool(plain, PARTITIONS)


class Manager:
    """A manager whose requests are placed as they are told."""

    def __init__(self) -> None:
        from vllm.utils.hashing import sha256

        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(SIZE, sha256)
        plain = KVCacheManager(
            config(), max_model_len=512, scheduler_block_size=SIZE, hash_block_size=SIZE
        )
        self.places: dict[str, int | None] = {}
        self.manager = PartitionedKVCacheManager(
            plain, PARTITIONS, lambda request: self.places[request.request_id]
        )
        self.requests = 0

    def request(self, tokens: Sequence[int], partition: int | None) -> Request:
        self.requests += 1
        request = Request(
            request_id=f"r{self.requests}",
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=8),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.places[request.request_id] = partition
        return request

    def start(self, request: Request) -> tuple[int, list[int] | None]:
        """Tokens found in the prefix cache, and the blocks it was given."""
        found, hits, _ = self.manager.get_computed_blocks(request)
        given = self.manager.allocate_slots(request, request.num_tokens - hits, hits, found)
        if given is None:
            return hits, None
        request.num_computed_tokens = request.num_tokens
        return hits, self.manager.get_block_ids(request.request_id)[0]


def test_blocks_come_from_the_partition_that_is_looked_at() -> None:
    blocks = pool()
    assert blocks.block_pool.get_num_free_blocks() == BLOCKS - 1
    for partition, free in ((0, 7), (1, 8), (2, 8)):
        with blocks.on(partition):
            assert blocks.block_pool.get_num_free_blocks() == free
            taken = blocks.block_pool.get_new_blocks(free)
        assert {block.block_id for block in taken} <= set(PARTITIONS.ranges[partition])
        with blocks.on(partition), pytest.raises(ValueError, match="free blocks"):
            blocks.block_pool.get_new_blocks(1)
    assert blocks.block_pool.get_num_free_blocks() == 0


def test_a_prefix_is_found_on_its_own_partition_only() -> None:
    kv = Manager()
    prompt = list(range(4 * SIZE))
    assert kv.start(kv.request(prompt, 1))[0] == 0
    assert kv.start(kv.request(prompt, OWN))[0] == 0
    again = kv.request([*prompt, 7], 1)
    hits, table = kv.start(again)
    assert hits == 4 * SIZE
    assert table is not None
    assert set(table) <= set(PARTITIONS.ranges[1])


def test_a_request_that_is_placed_nowhere_waits_and_may_come_later() -> None:
    kv = Manager()
    request = kv.request(range(SIZE), None)
    assert kv.start(request) == (0, None)
    kv.places[request.request_id] = 2
    _, table = kv.start(request)
    assert table is not None
    assert set(table) <= set(PARTITIONS.ranges[2])
    assert kv.manager.partition_of(request) == 2


def test_a_request_grows_where_it_is_and_is_refused_when_that_partition_is_full() -> None:
    kv = Manager()
    request = kv.request(range(7 * SIZE), 1)
    kv.start(request)
    kv.places[request.request_id] = OWN
    for _ in range(SIZE):
        request.append_output_token_ids(1)
    assert kv.manager.allocate_slots(request, SIZE) is not None
    assert set(kv.manager.get_block_ids(request.request_id)[0]) <= set(PARTITIONS.ranges[1])
    request.num_computed_tokens = request.num_tokens
    request.append_output_token_ids(1)
    assert kv.manager.allocate_slots(request, 1) is None


def test_what_is_withheld_is_neither_given_nor_found_until_it_is_offered_again() -> None:
    kv = Manager()
    blocks = kv.manager.pool
    first = kv.request(range(2 * SIZE), 1)
    kv.start(first)
    blocks.withhold(PARTITIONS.ranges[1])
    assert kv.start(kv.request(range(2 * SIZE), 1)) == (0, None)
    kv.manager.free(first)
    assert blocks.queue.free_on(1) == 0
    assert all(blocks.queue.is_kept(block) for block in PARTITIONS.ranges[1])
    assert kv.manager.reset_prefix_cache() is True
    assert kv.manager.usage == 0
    blocks.offer(PARTITIONS.ranges[1])
    hits, table = kv.start(kv.request(range(2 * SIZE), 1))
    assert (hits, len(table or [])) == (0, 2)


def test_the_partitions_of_lenders_are_equal_and_the_rest_is_the_engines_own() -> None:
    block = 2 * SIZE * 32 * 4
    partitions = borrowed_partitions(config(), LendingOptions(borrow_bytes=9 * block, lenders=2))
    assert [len(partition) for partition in partitions.ranges] == [16, 4, 4]
    alone = borrowed_partitions(config(), LendingOptions())
    assert [len(partition) for partition in alone.ranges] == [BLOCKS]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "free", "withhold", "offer"]),
            st.integers(0, 2),
            st.integers(1, 6),
        ),
        max_size=40,
    )
)
def test_no_block_is_lost_doubled_or_given_while_it_is_withheld(
    steps: list[tuple[str, int, int]],
) -> None:
    blocks, withheld = pool(), set[int]()
    used: list[int] = []
    for what, partition, number in steps:
        of_partition = list(PARTITIONS.ranges[partition])[1:]
        if what == "take":
            with blocks.on(partition):
                if blocks.block_pool.get_num_free_blocks() >= number:
                    new = [block.block_id for block in blocks.block_pool.get_new_blocks(number)]
                    assert not withheld & set(new)
                    used += new
        elif what == "free":
            back, used = used[:number], used[number:]
            blocks.block_pool.free_blocks(blocks.blocks[block] for block in back)
        elif what == "withhold":
            blocks.withhold(of_partition[-number:])
            withheld |= set(of_partition[-number:])
        else:
            blocks.offer(of_partition[-number:])
            withheld -= set(of_partition[-number:])
        free = [block.block_id for block in blocks.queue.get_all_free_blocks()]
        assert len(free) == len(set(free)) == blocks.block_pool.get_num_free_blocks()
        assert not set(free) & (withheld | set(used))
        assert len(free) + len(used) + blocks.queue.unbacked == BLOCKS - 1
