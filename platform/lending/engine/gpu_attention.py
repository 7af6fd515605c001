"""vLLM's FlashAttention backend, with some rows left to lenders."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_layout import KVCacheLayout

from loomserve.platform.lending.engine.attention import AttendsRemotely, DividesBatch


def use_remote_attention() -> None:
    """Register the backend below as this process's FlashAttention."""
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.RemoteFlashAttentionBackend")


class RemoteFlashAttentionBackend(FlashAttentionBackend):  # type: ignore[misc]
    """vLLM's backend, under its name."""

    # vLLM's own write would take the slots of borrowed rows for this engine's.
    forward_includes_kv_cache_update = True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Those in which a layer's blocks lie one behind the other, and no tokens between heads.
        The first lends to engines of any shape; in the second, which ``VLLM_KV_CACHE_LAYOUT``
        chooses, heads that have left make room for more blocks."""
        return KVCacheLayout.LBHNC, KVCacheLayout.LHBNC

    @staticmethod
    def get_impl_cls() -> type[RemoteFlashAttentionImpl]:
        return RemoteFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[RemoteFlashAttentionBuilder]:
        return RemoteFlashAttentionBuilder


class RemoteFlashAttentionBuilder(DividesBatch, FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Builds for own rows, and tells lenders of the others."""

    # Which rows are whose changes from step to step, and a graph's launches do not.
    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False
    head_numbers = ("num_heads_q", "num_heads_kv")


class RemoteFlashAttentionImpl(AttendsRemotely, FlashAttentionImpl):  # type: ignore[misc]
    """Computes own rows with FlashAttention."""

    def _own(self, layer: Any, query: torch.Tensor, key: torch.Tensor, *of_step: Any) -> None:
        # vLLM shapes scales of the KV by it, and some heads may be away.
        if key is not None:
            self.num_kv_heads = key.shape[1]
        super()._own(layer, query, key, *of_step)
