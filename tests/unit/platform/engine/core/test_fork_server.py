"""A node's fork server is kept: another one is there when it ends, and none where it cannot be."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from loomserve.platform.engine.process import kept_fork_server
from loomserve.platform.engine.process.forking import fork
from loomserve.platform.run.folder import RUN_VARIABLE
from tests.fork_servers import fork_server_of, kill
from tests.waiting import within

CHILD = "tests.unit.platform.engine.core.sleeping_child"


def test_it_is_started_anew_with_longer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(kept_fork_server.time, "monotonic", lambda: now)
    with fork_server_of([]) as (_, server):
        for pause_s in (1, 2, 4, 8, 16, 30, 30):
            before = server.pid
            server.look()
            assert server.pid == before, "it runs"
            kill(server)
            for waited_s in (0, pause_s - 1):
                now += waited_s
                server.look()
                assert server.pid == before
            now += 1
            server.look()
            assert server.pid != before
        now += 100
        before = server.pid
        kill(server)
        server.look()
        assert server.pid != before, "it had run long"


def test_what_is_asked_of_a_killed_one_is_done_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with fork_server_of([]) as (folder, server), open(os.devnull) as nothing:
        monkeypatch.setenv(RUN_VARIABLE, folder)
        children = []
        for _ in range(2):
            asked = fork(CHILD, [], os.environ, nothing.fileno(), 60)
            assert asked is not None
            assert psutil.Process(asked.pid).ppid() == server.pid
            children.append(asked)
            before = server.pid
            kill(server)
            within(60, lambda before=before: server.look() or server.pid != before)
        assert [child.poll() for child in children] == [None, None]
        for child in children:
            child.kill()
            assert child.wait() != 0


@pytest.mark.parametrize("server_ends", [False, True])
def test_a_child_that_executes_something_else_ends_with_who_asked(
    server_ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fork_server_of([]) as (folder, server), open(os.devnull) as nothing:
        monkeypatch.setenv(RUN_VARIABLE, folder)
        asked = fork(CHILD, ["sleep", "600"], os.environ, nothing.fileno(), 60)
        assert asked is not None
        child = psutil.Process(asked.pid)
        within(60, lambda: child.cmdline() == ["sleep", "600"])
        if server_ends:
            kill(server)
        asked._connection.close()
        within(60, lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_where_it_cannot_be_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with fork_server_of(["there_is_no_such_module"]) as (folder, server):
        monkeypatch.setenv(RUN_VARIABLE, folder)
        before = server.pid

        def given_up() -> bool:
            server.look()
            return not any(Path(folder, "sockets").iterdir())

        within(60, given_up)
        assert server.pid == before
        assert fork(CHILD, [], os.environ, 0, 60) is None
        said = Path(folder, "fork-server.log").read_text()
    assert "there_is_no_such_module" in said


def test_it_bears_that_no_process_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with fork_server_of([]) as (folder, server), open(os.devnull) as nothing:
        monkeypatch.setenv(RUN_VARIABLE, folder)
        assert server.pid is not None
        asked = fork(CHILD, [], os.environ, nothing.fileno(), 60)
        assert asked is not None
        process = psutil.Process(server.pid)
        had = process.rlimit(psutil.RLIMIT_NOFILE)
        # It cannot take what comes, but will.
        process.rlimit(psutil.RLIMIT_NOFILE, (3, had[1]))
        with pytest.raises(TimeoutError):
            fork(CHILD, [], os.environ, nothing.fileno(), 1)
        process.rlimit(psutil.RLIMIT_NOFILE, had)
        again = fork(CHILD, [], os.environ, nothing.fileno(), 60)
        assert again is not None
        assert server._process is not None
        assert server._process.poll() is None
        for each in (asked, again):
            each.kill()
            assert each.wait() == -signal.SIGKILL
