"""Claims on devices: file locks, which the kernel frees however the process ends.

Each replica of a model has a device of its own. Ray counts resources but does not say which core a
replica gets, and replica ranks change.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Device


class DeviceClaim:
    """A device that this process holds until :meth:`release`, its own end, or this object's."""

    def __init__(self, device: Device, lock: FileLock) -> None:
        self.device = device
        self._lock = lock

    def release(self) -> None:
        self._lock.release()


def try_claim(model: str, devices: Sequence[Device], folder: Path) -> DeviceClaim | None:
    """Take the first device that no other replica of the model holds; None if all are held."""
    folder.mkdir(parents=True, exist_ok=True)
    for device in devices:
        name = re.sub(r"[^A-Za-z0-9._-]", "--", f"{model}@{device.name}")
        # A soft lock would outlive the process. Engine processes do not inherit the lock.
        lock = FileLock(folder / name, mode=0o600, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            continue
        return DeviceClaim(device, lock)
    return None


async def claim(
    model: str, devices: Sequence[Device], folder: Path, timeout_s: float
) -> DeviceClaim:
    """Like :func:`try_claim`, but wait for a replica that is stopping; raises StartError if
    every device stays taken for ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        held = try_claim(model, devices, folder)
        if held is not None:
            return held
        if time.monotonic() > deadline:
            names = ", ".join(device.name for device in devices)
            raise StartError(
                f"every device of model {model!r} ({names}) already runs a replica of it; "
                "scale it down or give it another device"
            )
        await asyncio.sleep(0.25)


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
