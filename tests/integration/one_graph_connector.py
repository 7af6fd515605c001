"""The store's connector of an engine whose every step is one CUDA graph, as far as a CPU can be it.

vLLM replays a graph without calls around its layers, and says so to the connector.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.config import CUDAGraphMode

from loomserve.kvstore.engine.connector import StoreConnector


class OneGraphConnector(StoreConnector):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        context = replace(forward_context, cudagraph_runtime_mode=CUDAGraphMode.FULL)
        super().start_load_kv(context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass
