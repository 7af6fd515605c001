"""Devices where the configuration leaves them to the platform, and the memory of each.

Decoding reads all weights for each token, so that an engine is bound by memory and gains little
from many cores; on a device of its own it waits for nobody. So devices are small: a core each where
there are few, and never more than eight. But there are at least four where there are so many cores,
for engines that spread over them, and lend to one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import LOCAL_NODE, Device
from loomserve.platform.devices.gpus import Gpu
from loomserve.platform.devices.machine import MachineParts
from loomserve.platform.devices.memory import GPU_ENGINE_BYTES

# What is free should not be used to the last byte: of a node's memory, and of a GPU's, in which
# vLLM's own buffers are too.
_CPU_SHARE, _GPU_SHARE = 15 / 16, 0.9
_MIB = 2**20
_NAME = 48


@dataclass(frozen=True)
class NodeParts:
    """What a node has, and the bytes of it that all but engines will take."""

    parts: MachineParts
    taken: float

    @property
    def left(self) -> float:
        """Bytes that engines may take."""
        return _CPU_SHARE * self.parts.memory - self.taken


def own_devices(nodes: Mapping[str, NodeParts]) -> tuple[Device, ...]:
    """Devices of all that there is: GPUs where a node has some, else its cores. Of no cluster, the
    one node is ``LOCAL_NODE``."""
    return tuple(device for name, node in nodes.items() for device in _devices_of(name, node.parts))


def _devices_of(node: str, parts: MachineParts) -> Iterator[Device]:
    on = None if node == LOCAL_NODE else node
    prefix = f"{node[:_NAME]}-" if on else ""
    for gpu in parts.gpus:
        yield Device(name=f"{prefix}gpu{gpu}", kind="cuda", gpu=gpu, node=on)
    for cores in divided(parts.cores) if not parts.gpus else ():
        name = f"core{cores[0]}" if len(cores) == 1 else f"cores{cores[0]}-{cores[-1]}"
        yield Device(name=prefix + name, cores=cores, node=on)


def with_memory(devices: Sequence[Device], nodes: Mapping[str, NodeParts]) -> tuple[Device, ...]:
    """The devices, each with the memory that models on it may take together.

    What the configuration says stays. The CPU devices of a node share by their cores what is left
    of its memory; where there are none, its GPUs have equal parts of that.

    Raises StartError if no memory is left.
    """
    return tuple(
        _with_host(
            device if device.memory is not None else _with_share(device, devices, nodes[device.on]),
            devices,
            nodes[device.on],
        )
        for device in devices
    )


def _with_host(device: Device, devices: Sequence[Device], node: NodeParts) -> Device:
    if device.gpu is None or device.host_memory is not None:
        return device
    there = [each for each in devices if each.on == device.on]
    if any(each.kind == "cpu" for each in there):
        return device
    given = sum(each.host_memory or 0 for each in there)
    sharing = sum(each.host_memory is None for each in there)
    memory = (node.left - given) / sharing
    if memory < GPU_ENGINE_BYTES:
        raise _too_little(device, node, "devices.host_memory")
    return device.model_copy(update={"host_memory": int(memory) // _MIB * _MIB})


def _with_share(device: Device, devices: Sequence[Device], node: NodeParts) -> Device:
    if device.gpu is not None:
        gpu = node.parts.gpus.get(device.gpu)
        if gpu is None or _GPU_SHARE * gpu.free < _MIB:
            raise _nothing_free(device, gpu)
        memory = _GPU_SHARE * gpu.free
    else:
        there = [each for each in devices if each.kind == "cpu" and each.on == device.on]
        given = sum(each.memory or 0 for each in there)
        cores = sum(len(each.cores) for each in there if each.memory is None)
        memory = (node.left - given) * len(device.cores) / cores
    if memory < _MIB:
        raise _too_little(device, node, "devices.memory")
    return device.model_copy(update={"memory": int(memory) // _MIB * _MIB})


def _too_little(device: Device, node: NodeParts, field: str) -> StartError:
    where = "" if device.on == LOCAL_NODE else f" of node {device.on!r}"
    what = "models" if device.gpu is None else "engines on GPUs"
    return StartError(
        f"no memory is left for {what} on device {device.name!r}{where}: "
        f"{node.parts.memory / 2**30:.1f} GiB are free, and the platform needs "
        f"{node.taken / 2**30:.1f}: end other programs, or set {field}"
    )


def _nothing_free(device: Device, gpu: Gpu | None) -> StartError:
    on = f" on node {device.on!r}" if device.on != LOCAL_NODE else ""
    if gpu is None:
        return StartError(f"device {device.name!r} is GPU {device.gpu}, which is not there{on}")
    what = (
        f"{gpu.free / 2**30:.1f} of its {gpu.total / 2**30:.1f} GiB are free"
        if gpu.total
        else "its driver does not tell how much it has"
    )
    return StartError(
        f"no memory is known for models on device {device.name!r}, GPU {device.gpu}{on}: {what}; "
        "end other programs there, or set devices.memory"
    )


_MOST_CORES = 8
_FEW_DEVICES = 4


def divided(cores: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The cores of each device, of those given by the memory that they are next to; all have about
    as many, and none is next to two memories."""
    size = cores_a_device(sum(map(len, cores)))
    return [run for group in cores for run in _runs(group, max(1, len(group) // size))]


def cores_a_device(cores: int) -> int:
    """How many cores a device has, of so many: a power of two."""
    size = 1
    while size < _MOST_CORES and cores >= 2 * size * _FEW_DEVICES:
        size *= 2
    return size


def _runs(cores: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Consecutive runs whose lengths differ by one at most."""
    bounds = [at * len(cores) // count for at in range(count + 1)]
    return [tuple(cores[low:high]) for low, high in pairwise(bounds) if high > low]
