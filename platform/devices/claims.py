"""Which device a replica runs on: claimed by a lock that the kernel frees when the process ends.

A replica of a model must have a device to itself among that model's replicas. Ray knows amounts,
not which core, and replica ranks are renumbered when replicas come and go; a lock on a file is held
exactly as long as the process lives, whatever way it ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Device


class DeviceClaim:
    """One held device. Kept until :meth:`release` or the end of the process."""

    def __init__(self, device: Device, descriptor: int) -> None:
        self.device = device
        self._descriptor = descriptor

    def release(self) -> None:
        os.close(self._descriptor)


def try_claim(model: str, devices: Sequence[Device], folder: Path) -> DeviceClaim | None:
    """Take the first device that no other replica of the model holds; None if all are held."""
    folder.mkdir(parents=True, exist_ok=True)
    for device in devices:
        name = re.sub(r"[^A-Za-z0-9._-]", "--", f"{model}@{device.name}")
        # Python opens with O_CLOEXEC, so engine processes do not inherit the lock.
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            return DeviceClaim(device, descriptor)
    return None


async def claim(
    model: str, devices: Sequence[Device], folder: Path, timeout_s: float
) -> DeviceClaim:
    """Like :func:`try_claim`, but waits for a replica that is on its way out.

    Raises:
        StartError: every device stayed taken for ``timeout_s``.
    """
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
    """The environment variables that bind an engine's worker to the device."""
    if device.kind == "cuda":
        return {"CUDA_VISIBLE_DEVICES": str(device.gpu)}
    cores = ",".join(str(core) for core in device.cores)
    # oneDNN and OpenMP would else start a thread for every core of the machine.
    return {"VLLM_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": str(len(device.cores))}


def pipeline_environment(devices: Sequence[Device], layers: Sequence[int]) -> dict[str, str]:
    """The same for an engine whose stages are on these devices, of one kind, in this order."""
    partition = {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, layers))}
    if devices[0].kind == "cuda":
        return partition | {"CUDA_VISIBLE_DEVICES": ",".join(str(each.gpu) for each in devices)}
    return partition | {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(
            ",".join(map(str, device.cores)) for device in devices
        ),
        # Each worker has a thread for every core that it is bound to.
        "OMP_NUM_THREADS": str(len(devices[0].cores)),
    }


@contextmanager
def on_cores(device: Device) -> Iterator[None]:
    """Binds this thread, and those that it starts; a GPU's are left where they are."""
    before = os.sched_getaffinity(0)
    if device.kind == "cpu":
        os.sched_setaffinity(0, device.cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def place(device: Device) -> str:
    """The device as a person would say it."""
    if device.kind == "cuda":
        return f"gpu {device.gpu}"
    return f"core{'s' if len(device.cores) > 1 else ''} {','.join(map(str, device.cores))}"
