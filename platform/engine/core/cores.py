"""On which cores the threads of an engine's process run.

Where a device is a core or some, the thread that computes and those of OpenMP, which it starts, are
bound to them. vLLM binds only workers that have a process of their own. Here scheduler, worker and
I/O share one, so the I/O threads are sent elsewhere, if there is an elsewhere.
"""

from __future__ import annotations

import os

_BIND = "VLLM_CPU_OMP_THREADS_BIND"

_device: set[int] = set()
_elsewhere: set[int] = set()


def bind_to_device() -> None:
    """Bind this thread, and those that it starts, to the device that the environment names. It does
    nothing where the environment names none, or one for each of several workers."""
    allowed = os.sched_getaffinity(0)
    _elsewhere.clear()
    _elsewhere.update(allowed)
    _device.clear()
    named = os.environ.get(_BIND, "")
    if not named or not set(named) <= set("0123456789,-"):
        return
    _device.update(_cores(named) & allowed)
    if _device:
        os.sched_setaffinity(0, _device)
        _elsewhere.difference_update(_device)


def bind_worker_to_stage(stage: int) -> int:
    """Bind this thread, and those that it starts, to the device of a pipeline's stage. Returns how
    many cores that device has; 0 where the environment names none for each stage."""
    stages = os.environ.get(_BIND, "").split("|")
    if len(stages) < 2:
        return 0
    cores = _cores(stages[stage])
    os.sched_setaffinity(0, cores)
    return len(cores)


def leave_device() -> None:
    """Let this thread run on all cores but the device's, if there are others."""
    if _device and _elsewhere:
        os.sched_setaffinity(0, _elsewhere)


def _cores(named: str) -> set[int]:
    """The cores of a list such as ``0,2-4``."""
    cores: set[int] = set()
    for part in named.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
