"""What runs leave that end by themselves or are killed: processes, shared memory, folders."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

from loomserve.platform.run.folder import RUN_VARIABLE, RunFolder, ended_runs
from loomserve.platform.run.shared_memory import RunMemory

_END_TIMEOUT_S = 5.0


def processes_of(run: RunFolder) -> list[psutil.Process]:
    """This user's processes of a run, but for the calling one."""
    return list(_processes_of(str(run.path)))


def remove_leftovers(keep: Collection[Path] = ()) -> None:
    """End and remove what ended runs of this user left; of the last one, the logs stay.

    Args:
        keep: shared memory that the next run goes on with.

    Raises:
        StartError: others can get into the folder of all runs.
    """
    with ended_runs() as ended:
        for run in ended:
            end_run(run, keep)
        for run in ended[:-1]:
            run.remove()


def end_run(
    run: RunFolder, keep: Collection[Path] = (), children: Collection[psutil.Process] = ()
) -> None:
    """Kill the processes of a run, and remove its shared memory, and its folder but for logs.

    Args:
        keep: shared memory that stays.
        children: the command's, of which those that began before the run are not known by it.
    """
    memory = RunMemory(run.memory)
    left = {*processes_of(run), *children}
    # What cannot be looked at is killed all the same.
    with contextlib.suppress(OSError):
        memory.note(left)
    _kill(left)
    # Some had just started another.
    _kill(processes_of(run))
    memory.remove(keep)
    run.clear()


def _kill(processes: Collection[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has just ended
            process.kill()
    psutil.wait_procs(processes, timeout=_END_TIMEOUT_S)


def _processes_of(path: str) -> Iterator[psutil.Process]:
    own = psutil.Process()
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(RUN_VARIABLE) == path
            if marked and process.uids().real == own.uids().real and process != own:
                yield process
        except psutil.Error:  # another user's, or it has just ended
            continue
