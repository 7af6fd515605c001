"""What an ended run left is removed, and nothing else is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from loomserve.platform.nodes.reaping import has_ended
from loomserve.platform.run import leftovers
from loomserve.platform.run.folder import RUN_VARIABLE, RunFolder
from loomserve.platform.run.leftovers import (
    end_guard,
    end_run,
    processes_of,
    remove_leftovers,
    start_guard,
)
from loomserve.platform.run.shared_memory import SHARED_MEMORY, RunMemory, mapped
from tests.unit.descriptors import no_descriptor_left
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.usefixtures("temporary_folder")

# Python starts a process beside it that would remove the memory, if it were not killed as well.
MAKER = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
time.sleep(60)
"""


@contextmanager
def maker(run: RunFolder) -> Iterator[tuple[psutil.Process, Path]]:
    """A process of a run, and shared memory that it has made."""
    environment = {**os.environ, RUN_VARIABLE: str(run.path)}
    made = subprocess.Popen(
        [sys.executable, "-c", MAKER], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert made.stdout is not None
    path = SHARED_MEMORY / made.stdout.readline().strip()
    try:
        yield psutil.Process(made.pid), path
    finally:
        made.kill()
        made.wait()
        path.unlink(missing_ok=True)


def test_processes_and_shared_memory_of_a_killed_run_are_gone_after_the_next_start() -> None:
    run = RunFolder.create()
    with maker(run) as (process, path):
        assert process in processes_of(run)
        remove_leftovers()
        assert process.is_running(), "the run lives"
        run.release()
        remove_leftovers()
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        assert not path.exists()
        assert processes_of(run) == []


def test_memory_whose_makers_ended_before_is_removed_too() -> None:
    run = RunFolder.create()
    with maker(run) as (process, path):
        RunMemory(run.memory).note([process])
        for one in processes_of(run):
            one.kill()
        psutil.wait_procs([process])
        assert path.exists()
        end_run(run)
        assert not path.exists()


def test_memory_of_a_run_that_another_start_has_removed_meanwhile_is_no_error() -> None:
    run = RunFolder.create()
    with maker(run) as (process, _):
        RunMemory(run.memory).note([process])
        memory = RunMemory(run.memory)
        run.release()
        remove_leftovers()
    shutil.rmtree(run.path, ignore_errors=True)
    memory.remove()


def test_queues_of_an_engine_that_ended_are_removed_while_the_run_goes_on() -> None:
    run = RunFolder.create()
    memory = RunMemory(run.memory)
    with maker(run) as (process, path):
        memory.note([process])
        memory.remove_queues()
        assert path.exists()
        for one in processes_of(run):
            one.kill()
        psutil.wait_procs([process])
        memory.remove_queues()
        assert not path.exists()
    run.release()


def test_what_somebody_maps_stays() -> None:
    run = RunFolder.create()
    memory = SharedMemory(create=True, size=4096)
    try:
        run.memory.write_text(f"{memory.name}\n")
        end_run(run)
        assert (SHARED_MEMORY / memory.name).exists()
    finally:
        memory.close()
        memory.unlink()


def test_what_cannot_be_looked_at_is_not_taken_for_what_nobody_maps() -> None:
    me = psutil.Process()
    with no_descriptor_left():
        assert not has_ended(me)
        with pytest.raises(OSError, match="Too many open files"):
            list(mapped(me.pid, SHARED_MEMORY))
    with subprocess.Popen(["true"]) as child:
        process = psutil.Process(child.pid)
        child.wait()
    assert has_ended(process)
    assert list(mapped(child.pid, SHARED_MEMORY)) == []


def test_only_the_platforms_own_files_are_removed(tmp_path: Path) -> None:
    own = ("psm_12ab34cd", "loomserve-ring-7-ab", "loomserve-0/8000/arena")
    others = ("weights/model.safetensors", "psm_1/x", "sem.mp-1")
    for name in (*own, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    noted = tmp_path / "noted"
    noted.write_text("".join(f"{name}\n" for name in (*own, *others)))
    RunMemory(noted, tmp_path).remove(keep=[tmp_path / own[1]])
    assert [name for name in own if (tmp_path / name).exists()] == [own[1]]
    assert all((tmp_path / name).exists() for name in others)


def test_a_guard_ends_the_run_of_a_command_that_was_killed() -> None:
    run = RunFolder.create()
    kept = SHARED_MEMORY / f"psm_{run.path.name[4:]}"
    kept.touch()
    run.memory.write_text(f"{kept.name}\n")
    guard = start_guard(run, [kept])
    try:
        with maker(run) as (process, path):
            assert guard.stdin is not None
            guard.stdin.close()
            assert guard.wait(PATIENCE_S) == 0
            assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
            assert not path.exists()
        assert kept.exists()
        # The next start knows of it.
        end_run(run)
        assert not kept.exists()
    finally:
        kept.unlink(missing_ok=True)


def test_a_command_that_ends_while_it_ends_its_run_leaves_the_rest_to_the_guard() -> None:
    """As Ray ends its client when the raylet is killed."""
    run = RunFolder.create()
    guard = start_guard(run, ())
    with maker(run) as (process, path):
        end_run(run)
        assert not path.exists()
        assert process not in processes_of(run)
        assert guard.poll() is None
    end_guard(guard)
    assert not psutil.pid_exists(guard.pid)
    run.remove()


def test_what_begins_while_a_run_is_ended_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.create()
    seen = [leftovers._processes_of, lambda _: iter(())]
    monkeypatch.setattr(leftovers, "_processes_of", lambda path: seen.pop()(path))
    with maker(run) as (process, _):
        end_run(run)
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    run.remove()


def test_the_logs_of_the_last_run_stay_until_another_has_ended() -> None:
    runs: list[RunFolder] = []
    for _ in range(2):
        run = RunFolder.create()
        (run.ray / "log").touch()
        run.release()
        remove_leftovers()
        assert (run.ray / "log").exists()
        assert not run.token.exists()
        assert not run.sockets.exists()
        # Times of files are coarser than this loop.
        os.utime(run.path, (0, 0))
        runs.append(run)
    assert not runs[0].path.exists()
