"""vLLM's CPU attention backend, with some rows, or heads of all own rows, left to lenders."""

from __future__ import annotations

from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from loomserve.platform.lending.engine.attention import AttendsRemotely, DividesBatch


def use_remote_attention() -> None:
    """Register the backend below as this process's, in place of the only one that vLLM's CPU
    platform selects."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.RemoteAttentionBackend")


class RemoteAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's CPU backend, under its name."""

    # So that query, key and value come together, and are posted before own rows are computed.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[RemoteAttentionImpl]:
        return RemoteAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[RemoteAttentionBuilder]:
        return RemoteAttentionBuilder


class RemoteAttentionBuilder(DividesBatch, CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Builds for own rows, and tells lenders of the others."""


class RemoteAttentionImpl(AttendsRemotely, CPUAttentionBackendImpl):  # type: ignore[misc]
    """Computes own rows with vLLM's CPU kernel."""
