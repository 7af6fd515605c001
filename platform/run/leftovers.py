"""What runs leave that end by themselves or are killed: processes, shared memory, folders.

Ray ends most of its processes with the command, but some linger, and none gives shared memory back.
So a run has a guard: a process that ends the run once its command is gone, however that ended.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
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
    """End and remove what ended runs of this user left; of the last one, the logs stay. The next
    run goes on with the shared memory in ``keep``. ``StartError``: others can get into the folder
    of all runs."""
    with ended_runs() as ended:
        for run in ended:
            end_run(run, keep)
        for run in ended[:-1]:
            run.remove()


def end_run(
    run: RunFolder, keep: Collection[Path] = (), children: Collection[psutil.Process] = ()
) -> None:
    """Kill the processes of a run, and remove its shared memory, and its folder but for logs.
    Shared memory in ``keep`` stays. ``children`` are the command's, of which those that began
    before the run are not known by it."""
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


def start_guard(run: RunFolder, keep: Collection[Path]) -> subprocess.Popen[bytes]:
    """A guard for the run of this process, which it is no part of: so it goes on if who ends the
    run is killed meanwhile. Shared memory in ``keep`` outlives the run.
    """
    command = [sys.executable, "-m", __name__, str(run.path), *map(str, keep)]
    # In a session of its own, what kills the command's whole process group spares it.
    own = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=own)


def end_guard(guard: subprocess.Popen[bytes]) -> None:
    """End a guard whose run has been ended."""
    guard.kill()
    guard.wait()
    if guard.stdin is not None:
        guard.stdin.close()


def main() -> None:
    # Nothing is ever written: the pipe closes when the command has ended.
    sys.stdin.buffer.read()
    path, *keep = map(Path, sys.argv[1:])
    end_run(RunFolder(path), keep)


if __name__ == "__main__":
    main()
