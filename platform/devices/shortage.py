"""Memory and time that run short: how much is used and allowed, and engines that wait for room."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

_VARIABLE = "LOOMSERVE_MEMORY_THRESHOLD"
_DEFAULT = 0.95
_ENGINES_ADJUSTMENT = 800
_LOOK_S = 2.0
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_OOM_ADJUSTMENT = Path("/proc/self/oom_score_adj")


class MemoryBound(NamedTuple):
    """Bytes of a machine's memory, or of a container's bound, and those that new processes may
    take: what was read from files leaves memory when it is asked for."""

    total: int
    available: int


def threshold() -> float:
    """The share of memory beyond which replicas give theirs back."""
    try:
        return float(os.environ.get(_VARIABLE, _DEFAULT))
    except ValueError:
        return _DEFAULT


def memory_bounds(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> list[MemoryBound]:
    """The machine's, and those of the groups (version 2) that this process is in, if any."""
    machine = psutil.virtual_memory()
    found = [MemoryBound(machine.total, machine.available)]
    for each in own_groups(cgroups, own):
        with contextlib.suppress(OSError, ValueError):
            total = int((each / "memory.max").read_text())  # "max" where there is none
            used = int((each / "memory.current").read_text())
            stat = dict(line.split() for line in (each / "memory.stat").read_text().splitlines())
            found.append(MemoryBound(total, total - used + int(stat.get("inactive_file", 0))))
    return found


def has_quota(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> bool:
    """Whether a control group bounds this process's time, by either version's file."""
    files = {each / "cpu.max": "max" for each in own_groups(cgroups, own)}
    files[cgroups / "cpu/cpu.cfs_quota_us"] = "-1"
    return any(file.exists() and without not in file.read_text() for file, without in files.items())


def own_groups(cgroups: Path, own: Path) -> list[Path]:
    """The groups (version 2) that this process is in, its own first, as far as they can be seen."""
    path = ""
    with contextlib.suppress(OSError):
        path = own.read_text().rpartition("0::")[2].strip().lstrip("/")
    # Within a container its own group is the uppermost that can be seen.
    group = cgroups / path if (cgroups / path).is_dir() else cgroups
    return [group, *(each for each in group.parents if each.is_relative_to(cgroups))]


def used_share(bounds: Iterable[MemoryBound]) -> float:
    """The used share of the memory that has least left."""
    return max(1 - each.available / each.total for each in bounds)


def has_room(bounds: Iterable[MemoryBound], size: int) -> bool:
    most = threshold()
    return all(each.total - each.available + size <= most * each.total for each in bounds)


def note_given_back(folder: Path, model: str, size: int) -> None:
    """Have the next replica of a model wait for as many bytes as this one gives back."""
    with contextlib.suppress(OSError):
        _note(folder, model).write_text(str(size))


async def room_for_engine(
    folder: Path,
    model: str,
    say: Callable[[str], None],
    bounds: Callable[[], list[MemoryBound]] = memory_bounds,
) -> None:
    """Wait while memory is short, or until what an earlier replica gave back is free again."""
    note, told = _note(folder, model), False
    while True:
        size = 0
        with contextlib.suppress(OSError, ValueError):
            size = int(note.read_text())
        if has_room(bounds(), size):
            note.unlink(missing_ok=True)
            return
        if not told:
            told = True
            say(f"memory is short: an engine of {model} waits for {size >> 20} MiB and more")
        await asyncio.sleep(_LOOK_S)


def prefer_for_killing() -> None:
    """Have a kernel without memory end this process before the platform's others, which are no
    engines: its streams go on with other replicas."""
    with contextlib.suppress(OSError, ValueError):
        if int(_OOM_ADJUSTMENT.read_text()) < _ENGINES_ADJUSTMENT:
            _OOM_ADJUSTMENT.write_text(str(_ENGINES_ADJUSTMENT))


def _note(folder: Path, model: str) -> Path:
    return folder / f"gave-back-{model.replace('/', '-')}"
