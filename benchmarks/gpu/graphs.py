"""Engines of which vLLM compiles the model and captures graphs, its default: its own, and ours.

As :mod:`benchmarks.gpu.serve` has them. Without a GPU there is nothing to capture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.engine import running_store
from benchmarks.gpu.engines import save_model
from benchmarks.gpu.serve import ANSWER, CONTEXT, STORE_BYTES, both, compare, flush, started, times
from benchmarks.gpu.step import HAS_GPU, Results, main

COMPILED: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [8, 16]},
}


def graphs(results: Results) -> None:
    if not HAS_GPU:
        results.end("there is nothing to capture")
        return
    with (
        TemporaryDirectory(dir="/dev/shm") as name,
        running_store(Path(name), STORE_BYTES) as store,
    ):
        model = Path(name, "model")
        save_model(model, CONTEXT)
        with started(model, None, ours=False, **COMPILED) as llm:
            stock = both(llm)
            measured(results, "vLLM's", llm, lambda: None)
        with started(model, store.kv_transfer_config("graphs"), **COMPILED) as llm:
            compare(results, llm, stock)
            measured(results, "ours", llm, partial(flush, store))
    results.end("an engine of the platform's options captured graphs")


def measured(results: Results, whose: str, llm: Any, prepare: Callable[[], object]) -> None:
    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name
    results.add(f"{whose}, kinds of graphs", mode)
    results.add(f"{whose}, ms of answers", times(llm, prepare, ANSWER))


if __name__ == "__main__":
    main(graphs)
