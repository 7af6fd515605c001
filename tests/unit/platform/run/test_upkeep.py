"""What processes of a run leave is removed while it goes on, and what others still have is not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from loomserve.platform.nodes.reaping import adopt_orphans
from loomserve.platform.run.folder import RunFolder
from loomserve.platform.run.shared_memory import SHARED_MEMORY, RunMemory
from loomserve.platform.run.upkeep import RunUpkeep, keep_looking, remove_dead_sockets
from tests.waiting import within

pytestmark = pytest.mark.usefixtures("temporary_folder")

# Its parent ends at once.
ORPHAN = """
import os, time
from multiprocessing.shared_memory import SharedMemory
if os.fork():
    os._exit(0)
memory = SharedMemory(create=True, size=4096)
print(os.getpid(), memory.name, flush=True)
time.sleep(600)
"""


def bound(path: Path, age_s: float = 60) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    since = path.stat().st_mtime - age_s
    os.utime(path, (since, since))
    return sock


def test_sockets_that_nobody_has_any_more_are_removed(temporary_folder: str) -> None:
    folder = Path(temporary_folder)
    names = ("listens", "is about to listen", "dead", "has just died")
    open_ones = {
        name: bound(folder / name, age_s=0 if name == "has just died" else 60) for name in names
    }
    open_ones["listens"].listen()
    (folder / "no socket").touch()
    for name in ("dead", "has just died"):
        open_ones[name].close()
    remove_dead_sockets(folder)
    left = {path.name for path in folder.iterdir()}
    assert left == {*names, "no socket"} - {"dead"}
    for sock in open_ones.values():
        sock.close()


def test_a_run_is_looked_after_until_its_end_whatever_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = RunFolder.create()
    dead = [folder / "dead" for folder in (run.sockets, run.temporary)]
    for path in dead:
        bound(path).close()
    ended = threading.Event()

    def fails() -> None:
        raise OSError("no descriptor is left")

    looks = (ended, fails, RunUpkeep(run).look)
    thread = threading.Thread(target=keep_looking, args=looks)
    thread.start()
    within(60, lambda: not any(path.exists() for path in dead))
    assert "no descriptor is left" in caplog.text
    ended.set()
    thread.join(60)
    assert not thread.is_alive()
    run.remove()


def test_memory_of_orphans_is_noted_and_no_environment_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adopt_orphans()
    run = RunFolder.create()
    monkeypatch.setattr(psutil.Process, "environ", lambda _: pytest.fail("of a neighbour"))
    command = [sys.executable, "-c", ORPHAN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, name = parent.stdout.readline().split()
        try:
            assert parent.wait() == 0
            RunUpkeep(run).look()
            assert name in run.memory.read_text().split()
        finally:
            os.kill(int(pid), signal.SIGKILL)
            os.waitpid(int(pid), 0)
            (SHARED_MEMORY / name).unlink(missing_ok=True)
    run.remove()


def test_processes_are_looked_at_only_where_there_is_new_memory(tmp_path: Path) -> None:
    memory = RunMemory(tmp_path / "noted", tmp_path / "shm")
    arena = tmp_path / "shm" / "loomserve-0/8000/arena"
    for there in (arena, tmp_path / "shm" / "weights" / "arena"):
        there.parent.mkdir(parents=True)
        there.touch()
    # A process may map a file a moment after it was looked at.
    assert [memory.has_news() for _ in range(4)] == [True, True, False, False]
    (tmp_path / "shm" / "psm_1").touch()
    assert [memory.has_news() for _ in range(3)] == [True, True, False]
    arena.unlink()
    assert not memory.has_news()
    arena.touch()
    assert memory.has_news()
