"""What this machine has: cores that may be used, GPUs, free memory, bfloat16, a C++ compiler."""

from __future__ import annotations

import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from loomserve.platform.base.errors import StartError
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.config import Model
from loomserve.platform.devices.gpus import Gpu, gpus_here, vllm_is_for
from loomserve.platform.devices.shortage import memory_bounds

_NODES = Path("/sys/devices/system/node")
_CPUINFO = Path("/proc/cpuinfo")
# Of which oneDNN asks all before it multiplies bfloat16: on x86 its kernels for AVX512's core.
_NATIVE = (frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"}), frozenset({"bf16"}))


@dataclass(frozen=True)
class MachineParts:
    cores: tuple[tuple[int, ...], ...]
    """Those that engines here may use, by the memory (NUMA node) that they are next to; none where
    vLLM is installed for GPUs."""
    gpus: dict[int, Gpu]
    """GPUs by their numbers; none where vLLM is installed for CPUs."""
    memory: int
    """Bytes that are free for whatever is started."""


def parts_here() -> MachineParts:
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
    for node in _NODES.glob("node[0-9]*"):
        if (node / f"cpu{core}").exists():
            return int(node.name.removeprefix("node"))
    return 0


def check_compiler(models: Iterable[Model]) -> None:
    """Raises StartError if a model is compiled, or lends, and there is no C++ compiler."""
    models = list(models)
    compiles = any(
        # The platform compiles nothing of models that it places by itself.
        model.lending is None and not model.engine.get("enforce_eager", not model.is_placed)
        for model in models
    )
    if compiles and not _has_compiler():
        raise StartError(
            "vLLM compiles its kernels for this machine and finds no C++ compiler: install g++, "
            "or set engine: {enforce_eager: true} for every model"
        )
    if not may_lend() and any(model.lending is not None for model in models):
        raise StartError(
            "the task ring of models that lend or borrow is compiled for this machine, which has "
            "no C++ compiler: install g++, or set lending: null for every model"
        )


def may_lend() -> bool:
    """Whether the task ring of loans can be compiled here, or has been."""
    made = (Path(sys.prefix, "share/loomserve/native"), cache_folder() / "native")
    return _has_compiler() or any(folder.is_dir() for folder in made)


def _has_compiler() -> bool:
    return any(map(shutil.which, ("g++", "clang++")))


def cpu_dtype() -> str:
    """``auto`` (the checkpoint's own) where the CPU multiplies bfloat16 natively, else ``float32``.
    Without AVX512 or AMX, bfloat16 is emulated: a 512 x 576 by 576 x 1536 product takes nine times
    as long as in float32, and an engine's start minutes instead of seconds."""
    # Not torch's own word for it, which takes the controller seconds to import.
    flags = _flags()
    return "auto" if any(features <= flags for features in _NATIVE) else "float32"


def _flags() -> frozenset[str]:
    """What the first processor says that it can do; on Arm these are features."""
    with _CPUINFO.open(encoding="utf-8") as lines:
        fields = (line.partition(":") for line in lines)
        flags = (said for name, _, said in fields if name.strip() in {"flags", "Features"})
        return frozenset(next(flags, "").split())
