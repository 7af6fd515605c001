"""vLLM's CPU worker that borrows from lenders and lends to borrowers, and its model runner.

No GPU's engine may import this: vLLM's own module replaces streams and events of ``torch.cuda`` by
ones that do nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.utils import allocate_kv_cache, bind_kv_cache

from loomserve.platform.engine.seeds import SeedKeepingModelRunner
from loomserve.platform.engine.worker import NonSpinningWorker
from loomserve.platform.lending.engine.cpu_attention import use_remote_attention
from loomserve.platform.lending.engine.memory.mapped import MappedMemory
from loomserve.platform.lending.engine.worker import SortsRows, TakesPartInLending
from loomserve.platform.lending.leaf import Leaf
from loomserve.platform.lending.ring.leaf import RingLeaf


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


class RemoteAttentionWorker(TakesPartInLending, NonSpinningWorker):
    """vLLM's CPU worker that takes part in lending."""

    runner_class = RemoteAttentionModelRunner

    def use_remote_attention(self) -> None:
        use_remote_attention()

    def leaf(self) -> Leaf:
        return RingLeaf(split_kv=envs.VLLM_CPU_ATTN_SPLIT_KV)

    def isa(self, layer: Any) -> str:
        return str(layer.isa)
