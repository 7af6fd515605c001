"""The memory that a GPU's worker allocates; the rest of it needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import envs
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from benchmarks.gpu.host_memory import HostPages
from loomserve.platform.lending.engine.gpu_attention import RemoteFlashAttentionBackend
from loomserve.platform.lending.engine.gpu_worker import RemoteAttentionGpuModelRunner

LAYOUTS = RemoteFlashAttentionBackend.supported_kv_cache_layouts()
LAYERS, BLOCKS, OWN, PAGE = ["layers.0", "layers.1", "layers.2"], 12, 5, 2**14
BLOCK = (2, 16, 64)
"""Heads, tokens, and a head's keys and values: 2 KiB a head."""


def config(layout: KVCacheLayout) -> KVCacheConfig:
    """As a worker has its runner allocate: memory for own blocks, in addresses for all."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float16)
    layer, block, *_ = compute_layout_strides(spec, BLOCKS, len(LAYERS), layout)
    size = len(LAYERS) * BLOCKS * spec.page_size_bytes
    tensor = KVCacheTensor(size=size, layers=LAYERS, layer_stride=layer, block_stride=block)
    return KVCacheConfig(OWN, [tensor], [KVCacheGroupSpec(LAYERS, spec)])


def runner(layout: KVCacheLayout) -> Any:
    """Without a GPU: pages are of the host, and those that are not mapped end the process."""
    made = object.__new__(RemoteAttentionGpuModelRunner)
    made._pages = HostPages(PAGE)
    made.cache_config = SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout)
    layers = {name: SimpleNamespace(bind_kv_cache=lambda _: None) for name in LAYERS}
    made.compilation_config = SimpleNamespace(static_forward_context=layers)
    made.shared_kv_cache_layers, made.kv_caches = {}, []
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layer_has_memory_for_own_blocks_and_addresses_for_all(layout: KVCacheLayout) -> None:
    of = runner(layout)
    caches = of.initialize_kv_cache_tensors(config(layout), [16])
    assert list(caches) == LAYERS
    assert [each.data_ptr() for each in of.kv_caches] == [
        each.data_ptr() for each in caches.values()
    ]
    for number, cache in enumerate(caches.values()):
        assert cache.shape == (OWN, *BLOCK)
        assert not cache.any()
        cache.fill_(number + 1)
        longer = cache.as_strided((BLOCKS, *BLOCK), cache.stride())
        of.kv_memory.back(longer)
        longer[OWN:] = -number - 1
    for number, cache in enumerate(caches.values()):
        assert (cache == number + 1).all()
        assert (cache.as_strided((BLOCKS, *BLOCK), cache.stride())[OWN:] == -number - 1).all()


def test_each_head_begins_with_a_page_where_its_blocks_lie_together() -> None:
    of = runner(KVCacheLayout.LHBNC)
    caches = of.initialize_kv_cache_tensors(config(KVCacheLayout.LHBNC), [16])
    first = of.kv_caches[0].data_ptr()
    begins = [cache[0, head].data_ptr() - first for cache in caches.values() for head in range(2)]
    assert len(set(begins)) == len(begins)
    assert all(begin % PAGE == 0 for begin in begins)


@pytest.mark.parametrize(
    ("asked", "chosen"), [(None, "LBHNC"), ("LHBNC", "LHBNC"), ("LBNHC", None)]
)
def test_vllm_chooses_a_layout_in_which_no_tokens_lie_between_heads(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, chosen: str | None
) -> None:
    # Whoever made an engine in this process has had vLLM keep what it read.
    envs.disable_envs_cache()
    if asked is not None:
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", asked)
    supported = get_supported_kv_cache_layouts((RemoteFlashAttentionBackend,))
    cache = SimpleNamespace(kv_cache_layout=None)
    of: Any = SimpleNamespace(cache_config=cache, kv_transfer_config=None)
    if chosen is None:
        with pytest.raises(ValueError, match="LBNHC"):
            resolve_kv_cache_layout(of, [[each.name for each in supported]])
        return
    assert resolve_kv_cache_layout(of, [[each.name for each in supported]]).name == chosen
