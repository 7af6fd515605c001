"""vLLM's GPU worker that borrows from lenders, and lends to borrowers; it has not lent on one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout

from loomserve.platform.engine.resumption.gpu_worker import (
    ResumingGpuModelRunner,
    ResumingGpuWorker,
)
from loomserve.platform.lending.device.form import Form
from loomserve.platform.lending.device.leaf import KernelLeaf
from loomserve.platform.lending.device.memory import CudaMemory
from loomserve.platform.lending.engine.gpu_attention import use_remote_attention
from loomserve.platform.lending.engine.worker import SortsRows, TakesPartInLending
from loomserve.platform.lending.ring.geometry import GPU


class RemoteAttentionGpuModelRunner(SortsRows, ResumingGpuModelRunner):
    """Has KV memory for its own blocks alone."""

    def release(self, rows: torch.Tensor) -> None:
        """Keep the memory: a head's share of a block is less than a GPU maps at once."""


class RemoteAttentionGpuWorker(TakesPartInLending, ResumingGpuWorker):
    """Of an engine without graphs and without asynchronous scheduling.

    A step's rows are divided anew each time, and the scheduler must have seen that a loan has ended
    before it plans what comes behind the step.
    """

    runner_class = RemoteAttentionGpuModelRunner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.vllm_config.scheduler_config.async_scheduling:
            raise ValueError("lending needs async_scheduling: false")
        if not self.model_config.enforce_eager:
            raise ValueError("lending needs enforce_eager: true")

    def use_remote_attention(self) -> None:
        use_remote_attention()

    def leaf(self) -> KernelLeaf:
        return KernelLeaf(CudaMemory(), Form(self._options.gpu_form))

    def isa(self, layer: Any) -> str:
        return GPU

    def own_memory(self, config: KVCacheConfig, blocks: int) -> KVCacheConfig:
        """vLLM allocates all that a configuration has, so each layer's memory becomes shorter.

        Raises:
            ValueError: a layer's blocks do not lie one behind the other, or heads do not in each.
        """
        if self.cache_config.get_resolved_kv_cache_layout() is not KVCacheLayout.LBHNC:
            raise ValueError("lending needs VLLM_KV_CACHE_LAYOUT=LBHNC")

        number: int = config.num_blocks

        def shorter(nbytes: int) -> int:
            return nbytes // number * blocks

        tensors = [
            replace(
                tensor,
                size=shorter(tensor.size),
                layer_stride=shorter(tensor.layer_stride),
                offset=shorter(tensor.offset),
            )
            for tensor in config.kv_cache_tensors
        ]
        return replace(config, num_blocks=blocks, kv_cache_tensors=tensors)
