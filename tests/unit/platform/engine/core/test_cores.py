from __future__ import annotations

import os
import threading

import pytest

from loomserve.platform.engine.core import cores


def in_a_thread(*steps: object) -> set[int]:
    """The cores of a thread that is then left to end."""
    seen: set[int] = set()

    def run() -> None:
        for step in steps:
            step()  # type: ignore[operator]
        seen.update(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core only")
def test_the_thread_that_computes_is_on_the_device_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", str(first))
    assert in_a_thread(cores.bind_to_device) == {first}
    assert in_a_thread(cores.bind_to_device, cores.leave_device) == set(others)


@pytest.mark.parametrize("named", ["", "auto", "nobind", "0|1", "9999"])
def test_where_no_core_is_named_nothing_is_bound(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", named)
    every = os.sched_getaffinity(0)
    assert in_a_thread(cores.bind_to_device) == every
    assert in_a_thread(cores.bind_to_device, cores.leave_device) == every


@pytest.mark.skipif(len(os.sched_getaffinity(0)) != 2, reason="it counts two cores")
def test_a_device_of_all_cores_leaves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    every = os.sched_getaffinity(0)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    assert in_a_thread(cores.bind_to_device, cores.leave_device) == every


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core only")
def test_a_stages_worker_is_on_the_cores_of_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")
    assert in_a_thread(lambda: cores.bind_worker_to_stage(1)) == {second}
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{second}|{first},{second}")
    threads: list[int] = []
    assert in_a_thread(lambda: threads.append(cores.bind_worker_to_stage(1))) == {first, second}
    assert threads == [2]


@pytest.mark.parametrize("named", ["", "0", "nobind"])
def test_a_worker_without_stages_is_left_where_it_is(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", named)
    every = os.sched_getaffinity(0)
    threads: list[int] = []
    assert in_a_thread(lambda: threads.append(cores.bind_worker_to_stage(0))) == every
    assert threads == [0]
