"""Namespaces of an engine's blocks in the store: one for each rank and adapter."""

from __future__ import annotations

from pathlib import Path

import torch
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.version import __version__ as vllm_version

from loomserve.kvstore.engine.fingerprint import folder_digest, namespace


class Namespaces:
    """Names under which an engine's blocks are stored, by rank, with and without an adapter.

    vLLM's block hashes cover the tokens, images, cache salt and an adapter's *name*; all else that
    makes a block's bytes differ is part of its namespace.
    """

    def __init__(
        self, vllm_config: VllmConfig, layout: str | None, spec: KVCacheSpec, digests: Path
    ) -> None:
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        cache = vllm_config.cache_config
        self.block_size: int = spec.block_size
        self._world_size = parallel.world_size
        self._digests = digests
        self._by_adapter: dict[tuple[str, str] | None, list[bytes]] = {}
        self._inputs = {
            "weights": _weights(model.model, model.revision, digests),
            "load_format": str(vllm_config.load_config.load_format),
            "model": model.compute_hash(),
            "kv_dtype": f"{cache.cache_dtype} {spec.dtype}",
            "block": [self.block_size, spec.page_size_bytes],
            "layout": f"{layout} {_inside_of_blocks(vllm_config)}",
            "layers": model.get_total_num_hidden_layers(),
            "parallel": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
            "vllm": vllm_version,
        }

    def of_ranks(self, adapter: LoRARequest | None) -> list[bytes]:
        """Namespaces for requests with this adapter, in the order of ranks. The first call reads
        the adapter's files; ``OSError`` if they are not there."""
        # A folder may get other weights, and then its adapter another name.
        known = (adapter.lora_name, adapter.lora_path) if adapter else None
        if known not in self._by_adapter:
            lora = folder_digest(Path(adapter.lora_path), self._digests) if adapter else None
            self._by_adapter[known] = [
                namespace(**self._inputs, rank=rank, lora=lora) for rank in range(self._world_size)
            ]
        return self._by_adapter[known]


def _weights(model: str, revision: str | None, digests: Path) -> str:
    if Path(model).is_dir():
        return folder_digest(Path(model), digests)
    from huggingface_hub import snapshot_download

    folder = snapshot_download(model, revision=revision, local_files_only=True)
    return folder_digest(Path(folder), digests)


def _inside_of_blocks(config: VllmConfig) -> str:
    """What the order of numbers within a block depends on, beside its layout."""
    if current_platform.is_cpu():
        return _instruction_set()
    # By these vLLM chooses the attention backend, whose keys and values lie as it has them.
    capability = current_platform.get_device_capability()
    return f"cuda {capability and tuple(capability)} {config.attention_config.compute_hash()}"


def _instruction_set() -> str:
    capabilities = torch.backends.cpu.get_cpu_capability()
    return f"{capabilities} amx={torch.cpu._is_amx_tile_supported()}"
