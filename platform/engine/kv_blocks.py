"""The size of vLLM's KV blocks."""

from __future__ import annotations

from vllm.v1.kv_cache_interface import KVCacheConfig


def block_bytes(config: KVCacheConfig) -> int:
    """Bytes of one KV block: all layers of one rank."""
    return sum(
        len(group.layer_names) * group.kv_cache_spec.page_size_bytes
        for group in config.kv_cache_groups
    )
