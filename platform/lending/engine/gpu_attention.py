"""vLLM's FlashAttention backend, with some rows left to lenders."""

from __future__ import annotations

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from loomserve.platform.lending.engine.attention import AttendsRemotely, DividesBatch


def use_remote_attention() -> None:
    """Register the backend below as this process's FlashAttention."""
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.RemoteFlashAttentionBackend")


class RemoteFlashAttentionBackend(FlashAttentionBackend):  # type: ignore[misc]
    """vLLM's backend, under its name."""

    # vLLM's own write would take the slots of borrowed rows for this engine's.
    forward_includes_kv_cache_update = True

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


class RemoteFlashAttentionImpl(AttendsRemotely, FlashAttentionImpl):  # type: ignore[misc]
    """Computes own rows with FlashAttention."""
