"""Which of vLLM's executors an engine gets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from loomserve.platform.engine import executor
from loomserve.platform.engine.executor import (
    NonSpinningExecutor,
    OneProcessExecutor,
    executor_class,
    one_process_executor,
)


def config(backend: str, workers: int) -> SimpleNamespace:
    parallel = SimpleNamespace(distributed_executor_backend=backend, world_size=workers)
    return SimpleNamespace(parallel_config=parallel)


@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "cuda"])
@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_one_worker_shares_its_engines_process_and_answers_calls_of_loans(
    backend: str, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM chooses uni on GPUs, and mp on CPUs.
    monkeypatch.setattr(executor.current_platform, "is_cpu", lambda: on_cpu)
    assert one_process_executor(config(backend, 1)) is OneProcessExecutor  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("on_cpu", "chosen"), [(True, NonSpinningExecutor), (False, MultiprocExecutor)]
)
def test_stages_of_a_pipeline_have_processes_of_their_own(
    on_cpu: bool, chosen: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor.current_platform, "is_cpu", lambda: on_cpu)
    for choose in (one_process_executor, executor_class):
        assert choose(config("mp", 2)) is chosen  # type: ignore[arg-type]
