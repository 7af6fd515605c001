"""Engines of which vLLM compiles the model and captures graphs, its default: its own, and ours.

As :mod:`benchmarks.gpu.serve` has them. Without a GPU there is nothing to capture.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.engine import running_store
from benchmarks.gpu.engines import equal, save_model
from benchmarks.gpu.serve import ANSWER, CONTEXT, FITTING, STORE_BYTES, fresh, started, times
from benchmarks.gpu.step import HAS_GPU, Results, main

COMPILED = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [8, 16]}}


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
        found = []
        for whose, connected in (("vLLM's", None), ("ours", store.kv_transfer_config("graphs"))):
            begin = time.perf_counter()
            with started(model, connected, ours=connected is not None, **COMPILED) as llm:
                results.add(f"{whose}, seconds to start", time.perf_counter() - begin)
                found.append(fresh(llm, FITTING).tokens)
                results.add(f"{whose}, ms of answers", times(llm, lambda: None, ANSWER))
    results.add("tokens equal to vLLM's, of", [equal(*found), FITTING * ANSWER])
    results.end("an engine of the platform's options captured graphs")


if __name__ == "__main__":
    main(graphs)
