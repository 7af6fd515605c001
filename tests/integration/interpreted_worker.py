"""A CPU engine's worker that lends as one of a GPU does: by kernels, over a GPU's layout of KV.

The kernels are interpreted, and torch computes the engine's own rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_layout import KVCacheLayout

from benchmarks.gpu.host_memory import HostMemory, HostPages
from loomserve.platform.lending.device.server import kernel_leaf
from loomserve.platform.lending.engine.attention import AttendsRemotely
from loomserve.platform.lending.engine.cpu_attention import RemoteAttentionBackend
from loomserve.platform.lending.engine.cpu_worker import (
    RemoteAttentionModelRunner,
    RemoteAttentionWorker,
)
from loomserve.platform.lending.engine.memory.paged import PagedMemory
from loomserve.platform.lending.leaf import Leaf
from loomserve.platform.lending.ring.geometry import GPU

PAGE = 2**14
"""Of more than one block of a head, as on GPUs."""


class InterpretedModelRunner(RemoteAttentionModelRunner):
    """Its KV memory is there by the page, as a GPU's is."""

    def page_bytes(self) -> int:
        return PAGE

    def address_space(self, nbytes: int) -> PagedMemory:
        return PagedMemory(nbytes, HostPages(PAGE))


class InterpretedWorker(RemoteAttentionWorker):
    runner_class = InterpretedModelRunner

    def use_remote_attention(self) -> None:
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.InterpretedBackend")

    def leaf(self) -> Leaf:
        return kernel_leaf(HostMemory(), resident=self._options.gpu_form == "resident")

    def isa(self, layer: Any) -> str:
        return GPU


class InterpretedBackend(RemoteAttentionBackend):
    """Builds as on a CPU."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return KVCacheLayout.LBHNC, KVCacheLayout.LHBNC

    @staticmethod
    def get_impl_cls() -> Any:
        return InterpretedImpl


class TorchAttention(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Keys beside values, a token after the other, as FlashAttention has them."""

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        size = kv_cache.shape[2]
        both = torch.cat((key, value), dim=2)
        kv_cache[slot_mapping // size, :, slot_mapping % size] = both

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """
        Args:
            query: [tokens, heads, head_size]; ``output``, too.
            kv_cache: [blocks, kv_heads, block_size, 2 * head_size].
            metadata: of a CPU's attention.
        """
        starts = metadata.query_start_loc.tolist()
        for at, length in enumerate(metadata.seq_lens.tolist()):
            rows = slice(starts[at], starts[at + 1])
            blocks = metadata.block_table[at, : -(-length // kv_cache.shape[2])]
            held = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
            keys, values = held.chunk(2, dim=2)
            places = torch.arange(length)
            seen = places <= places[length - (rows.stop - rows.start) :, None]
            output[rows] = scaled_dot_product_attention(
                query[rows].transpose(0, 1), keys, values, seen, scale=self.scale, enable_gqa=True
            ).transpose(0, 1)
        return output


class InterpretedImpl(AttendsRemotely, TorchAttention):
    """Leaves rows and heads to lenders."""
