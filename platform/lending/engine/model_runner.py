"""Model runners with batches in order of partitions; that of CPUs has mapped KV memory."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.utils import allocate_kv_cache, bind_kv_cache

from loomserve.platform.engine.seeds import SeedKeepingModelRunner
from loomserve.platform.lending.engine.context import LendingContext
from loomserve.platform.lending.engine.memory.mapped import MappedMemory


class SortsRows:
    """Part of a model runner: sorts the rows of each batch by partition, own ones first."""

    lending: LendingContext
    """Set by the worker that makes this runner."""
    input_batch: Any

    def _may_reorder_batch(self, scheduler_output: Any) -> None:
        super()._may_reorder_batch(scheduler_output)  # type: ignore[misc]
        if self.lending.borrowers:
            batch = self.input_batch
            first = batch.block_table[0].block_table.np[: batch.num_reqs, 0]
            _sort_rows(batch, [self.lending.partitions.of(block) for block in first.tolist()])


class RemoteAttentionModelRunner(SortsRows, SeedKeepingModelRunner):
    """Has address space for all block numbers in its KV memory, and memory for its own blocks."""

    kv_memory: MappedMemory
    """Set by :meth:`initialize_kv_cache_tensors`."""

    def initialize_kv_cache_tensors(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int], *_: Any, **__: Any
    ) -> dict[str, torch.Tensor]:
        # On the meta device vLLM only says where each layer's blocks lie in the one allocation.
        layout = self.cache_config.get_resolved_kv_cache_layout()
        placed = allocate_kv_cache(
            kv_cache_config, torch.device("meta"), layout, kernel_block_sizes
        )
        nbytes = next(iter(placed.values())).untyped_storage().nbytes()
        self.kv_memory = MappedMemory(nbytes, self.device)
        caches = {name: self.kv_memory.tensor(like) for name, like in placed.items()}
        for cache in caches.values():
            cache.zero_()  # fail now, not in a step, if there is too little memory
        for name, target in self.shared_kv_cache_layers.items():
            caches[name] = caches[target]
        layers = self.compilation_config.static_forward_context
        bind_kv_cache(caches, layers, self.kv_caches)
        return caches

    def release(self, rows: torch.Tensor) -> None:
        """Give back the memory of some rows of a cache (:meth:`MappedMemory.release`)."""
        self.kv_memory.release(rows)


def _sort_rows(batch: Any, partitions: list[int]) -> None:
    """Sort the batch's rows by partition, with as many swaps as rows are out of place."""
    for place, partition in enumerate(sorted(partitions)):
        if partitions[place] != partition:
            other = max(i for i, each in enumerate(partitions) if each == partition)
            batch.swap_states(place, other)
            partitions[place], partitions[other] = partitions[other], partitions[place]
