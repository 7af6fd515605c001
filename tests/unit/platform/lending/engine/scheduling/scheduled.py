"""A scheduler with nothing of vLLM's but its KV cache manager and its requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from loomserve.platform.costs.step_time import StepTimes
from loomserve.platform.costs.transfer_time import TransferTimes
from loomserve.platform.engine.scheduling.costs import EngineCosts
from loomserve.platform.engine.scheduling.gated_queue import GatedQueue
from loomserve.platform.engine.scheduling.step_hooks import HookedScheduler, StepHooks
from loomserve.platform.lending.engine.block_partitions import (
    OWN,
    PartitionedKVCacheManager,
    Partitions,
)
from loomserve.platform.lending.ring.geometry import Geometry
from loomserve.platform.lending.ring.lent_ring import LentRing

SIZE, HEAD_SIZE = 32, 32
SPEC = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.float32)
GEOMETRY = Geometry(1, 1, 1, HEAD_SIZE, SIZE, "float32", HEAD_SIZE**-0.5, "vec")


def config(blocks: int) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], SPEC)]
    )


def new_ring(folder: Path, granted: int) -> LentRing:
    ring = LentRing.create(folder / "ring", GEOMETRY, 64, 4, 8)
    ring.granted = ring.wanted = granted
    return ring


class Scheduled(HookedScheduler):
    """Runs requests at once on the partition that it is told, and records who is preempted."""

    def __init__(self, partitions: Partitions) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(SIZE, sha256)
        blocks = partitions.ranges[-1].stop
        plain = KVCacheManager(
            config(blocks), max_model_len=512, scheduler_block_size=SIZE, hash_block_size=SIZE
        )
        self._place: int | None = OWN
        self.kv_cache_manager = PartitionedKVCacheManager(
            plain, partitions, lambda request: self._place
        )
        self.running: list[Request] = []
        self.waiting = GatedQueue()
        self.deferred: Sequence[Request] = ()
        self.blocked: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.most_running, self.max_model_len = 8, 512
        times = StepTimes.unprofiled(), TransferTimes.unprofiled()
        self.costs = EngineCosts(
            *times, block_size=SIZE, block_bytes=SPEC.page_size_bytes, step_tokens=64
        )
        self.step_began = 0.0
        self.hooks: StepHooks | None = None
        self.preempted: list[tuple[Request, bool]] = []

    def request(self, tokens: int, **parameters: Any) -> Request:
        name = f"r{len(self.requests)}"
        request = Request(
            request_id=name,
            # No two have a prefix in common.
            prompt_token_ids=[1000 * len(self.requests) + at for at in range(tokens)],
            sampling_params=SamplingParams(max_tokens=8, **parameters),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.requests[name] = request
        return request

    def run(self, tokens: int, partition: int) -> Request:
        """A request that has computed its prompt there."""
        request, self._place = self.request(tokens), partition
        found, hits, _ = self.kv_cache_manager.get_computed_blocks(request)
        assert self.kv_cache_manager.allocate_slots(request, tokens - hits, hits, found) is not None
        request.num_computed_tokens = tokens
        self.running.append(request)
        return request

    def grow(self, request: Request) -> None:
        """It has generated a token, which its next step computes."""
        request.append_output_token_ids(1)

    def preempt(self, request: Request, *, drop_output: bool = False) -> None:
        self.running.remove(request)
        self.preempted.append((request, drop_output))
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0

    def sort_running(self) -> None:
        self.running.sort(key=lambda request: request.request_id)

    def most_blocks(self, request: Request) -> int:
        return math.ceil((request.num_prompt_tokens + request.max_tokens) / SIZE)

    def is_swapped_out(self, request: Request) -> bool:
        return False

    def has_unfinished_requests(self) -> bool:
        return bool(self.running or self.waiting)
