"""The memory that a GPU's worker allocates; the rest of it needs a GPU."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from loomserve.platform.lending.engine.gpu_worker import RemoteAttentionGpuWorker

LAYERS, BLOCKS, OWN = ["first", "second", "third"], 12, 5


def config() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float16)
    page = spec.page_size_bytes
    tensor = KVCacheTensor(
        size=len(LAYERS) * BLOCKS * page,
        layers=LAYERS,
        layer_stride=BLOCKS * page,
        block_stride=page,
    )
    return KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(LAYERS, spec)])


def worker(layout: KVCacheLayout) -> RemoteAttentionGpuWorker:
    made = object.__new__(RemoteAttentionGpuWorker)
    made.cache_config = SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout)
    return made


def test_each_layer_has_memory_for_own_blocks_and_no_others() -> None:
    whole = config()
    own = worker(KVCacheLayout.LBHNC).own_memory(whole, OWN)
    caches = allocate_kv_cache(own, torch.device("cpu"), KVCacheLayout.LBHNC)
    assert list(caches) == LAYERS
    for number, cache in enumerate(caches.values()):
        assert cache.shape == (OWN, 2, 16, 64)
        assert cache.is_contiguous()
        cache.fill_(number + 1)
    assert [cache.unique().item() for cache in caches.values()] == [1, 2, 3]
    assert caches["first"].untyped_storage().nbytes() == whole.kv_cache_tensors[0].size * 5 // 12


def test_a_layout_in_which_heads_lie_apart_is_refused() -> None:
    with pytest.raises(ValueError, match="VLLM_KV_CACHE_LAYOUT=LBHNC"):
        worker(KVCacheLayout.LBNHC).own_memory(config(), OWN)


OF_A_GPUS_ENGINE = (
    "loomserve.platform.lending.engine.gpu_worker",
    "loomserve.platform.lending.engine.scheduler",
    "loomserve.platform.engine.executor",
    "loomserve.platform.engine.core.served_core",
    "loomserve.kvstore.engine.connector",
)


def test_an_engine_on_a_gpu_keeps_cudas_streams_and_events() -> None:
    # What vLLM's CPU worker imports replaces them by ones that do nothing, for the whole process:
    # nobody would wait for a copy any more.
    looks = (
        f"import {', '.join(OF_A_GPUS_ENGINE)}, sys\n"
        "found = [each for each in sys.modules if each.startswith('vllm.v1.worker.cpu')]\n"
        "sys.exit(' '.join(found) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", looks], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
