"""Measures devices: memory, bandwidth, arithmetic, the stages of models, and links."""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import permutations
from multiprocessing import get_context
from typing import TypeVar

import psutil
import torch

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Device
from loomserve.platform.devices.binding import place
from loomserve.platform.devices.machine import cpu_dtype
from loomserve.platform.placement.policy.device_times import (
    DeviceProfile,
    MeasuredDevice,
    MeasuredLink,
    ModelTimes,
    StageTimes,
)
from loomserve.platform.placement.shared_memory_link import time_link

Say = Callable[[str], None]
_T = TypeVar("_T")

_MATRIX = 4096
_REPETITIONS = 7
_SECONDS_EACH = 0.1
# PCIe 4.0 with 16 lanes through the host: the least between two GPUs of a machine.
_GPU_LINK = 2e-5, 20e9


def profile_devices(
    devices: Sequence[Device],
    models: Mapping[str, tuple[str, Sequence[Device]]],
    batches: Sequence[int],
    say: Say,
) -> DeviceProfile:
    """Measure one device after the other, each in its own process. ``models`` maps the source of
    each model whose stages are timed to its path and devices. Raises StartError if a device or a
    model cannot be measured."""
    cpus = sum(device.kind == "cpu" for device in devices)
    # Read once, as it changes while devices are measured.
    share = psutil.virtual_memory().available // max(1, cpus)
    measured = []
    for device in devices:
        say(f"measuring {device.name} ({place(device)})")
        # Forked, it has torch already, of which nothing runs yet.
        speed = _apart(_speed, device, share, method="fork")
        timed = []
        for source, (path, places) in models.items():
            # Stages are timed on CPUs only; on GPUs they are predicted.
            if device in places and device.kind == "cpu":
                say(f"timing {source} on {device.name}")
                # vLLM and OpenMP read their binding when they are loaded.
                times = _apart(_stages, device, path, tuple(batches), method="spawn")
                timed.append(ModelTimes(model=source, times=tuple(times)))
        measured.append(speed.model_copy(update={"models": tuple(timed)}))
    say("measuring links")
    return DeviceProfile(
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        devices=tuple(measured),
        links=tuple(
            _link(one, other) for one, other in permutations(devices, 2) if one.kind == other.kind
        ),
    )


def _apart(measure: Callable[..., _T], device: Device, *given: object, method: str) -> _T:
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as process:
        try:
            return process.submit(measure, device, *given).result()
        except Exception as error:
            raise StartError(f"device {device.name!r} cannot be measured: {error}") from error


def _speed(device: Device, memory: int) -> MeasuredDevice:
    if device.kind == "cpu":
        os.sched_setaffinity(0, device.cores)
        torch.set_num_threads(len(device.cores))
        where = torch.device("cpu")
        dtype = torch.float32 if cpu_dtype() == "float32" else torch.bfloat16
    else:
        # As nvidia-smi counts; this process has not touched CUDA yet.
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        where, dtype = torch.device("cuda", device.gpu or 0), torch.bfloat16
        memory = torch.cuda.mem_get_info(where)[0]
    matrix = torch.rand(_MATRIX, _MATRIX, device=where).to(dtype)
    vector, square = matrix[0].clone(), matrix[:1024, :1024].contiguous()
    return MeasuredDevice(
        name=device.name,
        place=place(device),
        memory=memory,
        bytes_per_s=matrix.nbytes / _seconds(lambda: matrix @ vector, where),
        flop_per_s=2 * 1024**3 / _seconds(lambda: square @ square, where),
        itemsize=matrix.element_size(),
    )


def _seconds(work: Callable[[], object], where: torch.device) -> float:
    """Median of repetitions. On a CPU it is the calling thread's time on its core, of whose work
    each other thread has as much: a device whose cores others use meanwhile is no slower for it."""
    clock = time.perf_counter if where.type == "cuda" else time.thread_time
    times = []
    for _ in range(_REPETITIONS):
        begin, rounds = clock(), 0
        while clock() - begin < _SECONDS_EACH:
            work()
            if where.type == "cuda":
                torch.cuda.synchronize(where)
            rounds += 1
        times.append((clock() - begin) / rounds)
    return statistics.median(times)


def _stages(device: Device, path: str, batches: tuple[int, ...]) -> list[StageTimes]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # It imports vLLM, which only this process needs.
    from loomserve.platform.engine.profiling.stage_timing import time_stages

    return time_stages(path, device, batches)


def _link(source: Device, target: Device) -> MeasuredLink:
    measured = source.kind == "cpu"
    latency_s, bytes_per_s = time_link(source.cores, target.cores) if measured else _GPU_LINK
    return MeasuredLink(
        source=source.name,
        target=target.name,
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        measured=measured,
    )
