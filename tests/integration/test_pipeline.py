"""A real engine whose layers are unevenly divided between two cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine import end, offline_engine
from loomserve.platform.config import Device
from loomserve.platform.devices.binding import pipeline_environment
from loomserve.platform.engine.executor import NonSpinningExecutor
from loomserve.platform.models import catalog

pytestmark = pytest.mark.engine

PROMPTS = ["The capital of France is", "Once upon a time", "1 2 3 4 5", "def main():"]
OPTIONS = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 64 * 2**20,
    "dtype": "float32",
    "worker_cls": "loomserve.platform.engine.worker.NonSpinningWorker",
}


def greedy(llm: object) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    try:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)  # type: ignore[attr-defined]
        return [list(output.outputs[0].token_ids) for output in outputs]
    finally:
        end(llm)


@pytest.mark.slow
def test_an_uneven_pipeline_answers_as_a_single_engine_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(catalog.resolve("demo", tmp_path))
    alone = greedy(offline_engine(model, None, **OPTIONS))

    cores = [Device(name=f"core{core}", cores=(core,)) for core in (0, 1)]
    environment = pipeline_environment(cores, [21, 9])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    pipeline = offline_engine(
        model,
        None,
        core=environment["VLLM_CPU_OMP_THREADS_BIND"],
        pipeline_parallel_size=2,
        distributed_executor_backend=NonSpinningExecutor,
        **OPTIONS,
    )
    assert greedy(pipeline) == alone
