"""A GPU's engine sleeps although others take of the GPU's memory meanwhile."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

# With vLLM's CUDA wheel it needs a driver.
pytest.importorskip("vllm.device_allocator.cumem", exc_type=ImportError)

# isort: split
from vllm.v1.worker.gpu_worker import Worker

from loomserve.platform.engine.resumption import gpu_worker
from loomserve.platform.engine.resumption.gpu_worker import GREW_MEANWHILE, ResumingGpuWorker


def _slept(monkeypatch: pytest.MonkeyPatch, said: str | None) -> list[int]:
    levels: list[int] = []

    def sleep(self: Worker, level: int = 1) -> None:
        levels.append(level)
        if said is not None:
            raise AssertionError(said)

    monkeypatch.setattr(Worker, "sleep", sleep)
    ResumingGpuWorker.__new__(ResumingGpuWorker).sleep(2)
    return levels


def test_what_the_store_takes_of_the_gpu_is_given_back_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = SimpleNamespace(gave_back=0)
    store.give_back = lambda: setattr(store, "gave_back", 1)
    monkeypatch.setattr(gpu_worker, "own_worker", lambda: store)
    assert _slept(monkeypatch, None) == [2]
    assert store.gave_back


def test_vllm_counts_what_all_engines_of_the_gpu_take() -> None:
    assert f'assert freed_bytes >= 0, "{GREW_MEANWHILE}"' in inspect.getsource(Worker.sleep)


@pytest.mark.parametrize("said", [None, GREW_MEANWHILE])
def test_it_sleeps_whatever_others_take(said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _slept(monkeypatch, said) == [2]


def test_anything_else_that_does_not_hold_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="cumem"):
        _slept(monkeypatch, "cumem allocator is not available")
