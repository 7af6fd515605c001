"""What this machine has that devices can be made of: cores that may be used, GPUs, free memory."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from loomserve.platform.devices.gpus import Gpu, gpus_here, vllm_is_for
from loomserve.platform.devices.shortage import memory_bounds

_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class MachineParts:
    """
    Attributes:
        cores: Those that engines here may use, by the memory (NUMA node) that they are next to;
            none where vLLM is installed for GPUs.
        gpus: GPUs by their numbers; none where vLLM is installed for CPUs.
        memory: Bytes that are free for whatever is started.
    """

    cores: tuple[tuple[int, ...], ...]
    gpus: dict[int, Gpu]
    memory: int


def parts_here() -> MachineParts:
    """What this machine has at this moment."""
    if vllm_is_for() == "cpu":
        return MachineParts(_cores(), {}, available_memory())
    return MachineParts((), gpus_here(), available_memory())


def available_memory() -> int:
    """Bytes that new processes may take: of the machine, and of the container if that is less."""
    return min(bound.available for bound in memory_bounds())


def _cores() -> tuple[tuple[int, ...], ...]:
    allowed = sorted(os.sched_getaffinity(0))
    next_to: defaultdict[int, list[int]] = defaultdict(list)
    for core in allowed:
        next_to[_memory_of(core)].append(core)
    return tuple(tuple(cores) for _, cores in sorted(next_to.items()))


def _memory_of(core: int) -> int:
    """The number of the memory that a core is next to."""
    for node in _NODES.glob("node[0-9]*"):
        if (node / f"cpu{core}").exists():
            return int(node.name.removeprefix("node"))
    return 0
