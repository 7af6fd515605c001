"""KV memory of a model runner that takes part in lending."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache, bind_kv_cache

from loomserve.platform.lending.engine.memory.mapped import AddressSpace


class HasSpareAddresses(ABC):
    """Part of a model runner: addresses for all block numbers, and memory for its own blocks."""

    kv_memory: AddressSpace
    """Set by :meth:`initialize_kv_cache_tensors`."""
    cache_config: Any
    compilation_config: Any
    shared_kv_cache_layers: dict[str, str]
    kv_caches: list[torch.Tensor]

    @abstractmethod
    def page_bytes(self) -> int:
        """Return the least memory of the device that can be given back by itself."""

    @abstractmethod
    def address_space(self, nbytes: int) -> AddressSpace:
        """Return so much of it, on the runner's device."""

    def initialize_kv_cache_tensors(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int], *_: Any, **__: Any
    ) -> dict[str, torch.Tensor]:
        layout = self.cache_config.get_resolved_kv_cache_layout()
        spaced, meta = self._spaced(kv_cache_config, layout), torch.device("meta")
        # On the meta device vLLM only says where each layer's blocks lie in the one allocation.
        placed = allocate_kv_cache(spaced, meta, layout, kernel_block_sizes)
        nbytes = next(iter(placed.values())).untyped_storage().nbytes()
        self.kv_memory = self.address_space(nbytes)
        caches = {}
        for name, like in placed.items():
            rows = len(like) // spaced.num_blocks * kv_cache_config.num_blocks
            caches[name] = cache = self.kv_memory.tensor(like[:rows])
            self.kv_memory.back(cache)
            cache.zero_()  # fail now, not in a step, if there is too little memory
        for name, target in self.shared_kv_cache_layers.items():
            caches[name] = caches[target]
        layers = self.compilation_config.static_forward_context
        bind_kv_cache(caches, layers, self.kv_caches)
        return caches

    def _spaced(self, config: KVCacheConfig, layout: KVCacheLayout) -> KVCacheConfig:
        """Return the configuration with all block numbers that its tensors have room for. Where
        heads' blocks lie together there may be more, so that each head begins with a page."""
        spec = config.kv_cache_groups[0].kv_cache_spec
        numbers = config.kv_cache_tensors[0].layer_stride // spec.page_size_bytes
        spaced = numbers
        if layout is KVCacheLayout.LHBNC:
            page, of_head = self.page_bytes(), spec.page_size_bytes // spec.num_kv_heads
            together = page // math.gcd(page, of_head)
            spaced = -(-numbers // together) * together
        tensors = [
            replace(
                tensor,
                size=tensor.size // numbers * spaced,
                layer_stride=tensor.layer_stride // numbers * spaced,
                offset=tensor.offset // numbers * spaced,
            )
            for tensor in config.kv_cache_tensors
        ]
        return replace(config, num_blocks=spaced, kv_cache_tensors=tensors)
