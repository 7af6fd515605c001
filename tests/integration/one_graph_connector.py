"""The store's connector as a GPU's engine has it whose every step is one CUDA graph, on a CPU.

vLLM replays a graph without calls around its layers, and says so to the connector. Blocks are
copied by their addresses, and staged.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from vllm.config import CUDAGraphMode

from loomserve.kvstore.engine import connector_worker
from loomserve.kvstore.engine.connector import StoreConnector
from loomserve.kvstore.engine.transfers.batched_memory import BatchedMemory
from tests.unit.kvstore.engine.transfers.test_batched_memory import ByCpu

# Only an engine's own process imports this module to make a connector of it.
connector_worker.memory_of = partial(BatchedMemory, copy=ByCpu())


class OneGraphConnector(StoreConnector):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        context = replace(forward_context, cudagraph_runtime_mode=CUDAGraphMode.FULL)
        super().start_load_kv(context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass
