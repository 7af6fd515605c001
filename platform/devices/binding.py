"""What binds processes and threads to their devices."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from loomserve.platform.config import Device


def engine_environment(device: Device) -> dict[str, str]:
    if device.kind == "cuda":
        return _visible([device])
    cores = ",".join(str(core) for core in device.cores)
    # oneDNN and OpenMP would else start a thread for every core of the machine.
    return {"VLLM_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": str(len(device.cores))}


def pipeline_environment(devices: Sequence[Device], layers: Sequence[int]) -> dict[str, str]:
    """Environment variables that bind each stage of a pipeline to its device, all of one kind."""
    partition = {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, layers))}
    if devices[0].kind == "cuda":
        return partition | _visible(devices)
    return partition | {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(
            ",".join(map(str, device.cores)) for device in devices
        ),
        # Each worker has a thread for every core that it is bound to.
        "OMP_NUM_THREADS": str(len(devices[0].cores)),
    }


def _visible(gpus: Sequence[Device]) -> dict[str, str]:
    """CUDA would else count the fastest first, and not as nvidia-smi does."""
    numbers = ",".join(str(each.gpu) for each in gpus)
    return {"CUDA_VISIBLE_DEVICES": numbers, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@contextmanager
def on_cores(device: Device) -> Iterator[None]:
    """Bind this thread, and those it starts, to a CPU device's cores."""
    before = os.sched_getaffinity(0)
    if device.kind == "cpu":
        os.sched_setaffinity(0, device.cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def place(device: Device) -> str:
    """Name the device's hardware for a person, such as ``cores 0,1`` or ``gpu 3 of node-2``."""
    of = f" of {device.node}" if device.node is not None else ""
    if device.kind == "cuda":
        return f"gpu {device.gpu}{of}"
    return f"core{'s' if len(device.cores) > 1 else ''} {','.join(map(str, device.cores))}{of}"
