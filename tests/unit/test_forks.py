"""Processes that are forked in the place of a Python are what that would be, and end with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from loomserve.platform.engine.process.forking import fork
from loomserve.platform.run.folder import RUN_VARIABLE
from tests.fork_servers import fork_server_of
from tests.forks import (
    FORKS_VARIABLE,
    descendants,
    in_the_place_of,
    platforms_environment,
    processes,
    python_with_vllm,
)
from tests.waiting import within

CHILD = "tests.unit.platform.engine.core.sleeping_child"
SAYS = """
import json, os, sys
with open(0) as given:
    has = "tests.forks" in sys.modules
    print(json.dumps([given.read(), os.environ["MINE"], os.getppid(), has]))
sys.exit(7)
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The process id of one from which others are forked."""
    with fork_server_of(["tests.forks"]) as (folder, server):
        monkeypatch.setenv(FORKS_VARIABLE, folder)
        assert server.pid is not None
        yield server.pid


def test_it_has_the_input_environment_and_end_of_that_python(
    server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "too")
    command = [*python_with_vllm(), "-u", "-c", SAYS]
    done = subprocess.run(command, input="hello", capture_output=True, text=True, check=False)
    assert done.stdout == f'["hello", "too", {server}, true]\n', done.stderr
    assert done.returncode == 7


def test_it_ends_with_who_it_stands_in_for(server: int) -> None:
    with subprocess.Popen([*python_with_vllm(), "-c", "import time; time.sleep(600)"]) as python:
        process = place_of(python.pid)
        assert process.ppid() == server
        python.kill()
    within(60, lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def place_of(pid: int) -> psutil.Process:
    """What was forked for the process with this id, once it has been."""
    within(60, lambda: in_the_place_of(psutil.Process(pid)))
    found = in_the_place_of(psutil.Process(pid))
    assert found is not None
    return found


def test_a_platforms_fork_server_is_forked_and_forks_as_any(
    server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in platforms_environment().items():
        monkeypatch.setenv(name, value)
    with fork_server_of(["json"]) as (folder, of_platform), open(os.devnull) as nothing:
        monkeypatch.setenv(RUN_VARIABLE, folder)
        asked = fork(CHILD, [], os.environ, nothing.fileno(), 60)
        assert asked is not None
        assert of_platform.pid is not None
        forks = place_of(of_platform.pid)
        assert forks.ppid() == server
        assert psutil.Process(asked.pid).ppid() == forks.pid
        assert {forks.pid, asked.pid} <= {each.pid for each in descendants(psutil.Process())}
        asked.kill()
        assert asked.wait() != 0
    within(60, lambda: not forks.is_running() or forks.status() == psutil.STATUS_ZOMBIE)


def test_where_none_can_be_forked_it_is_that_python_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with fork_server_of(["there_is_no_such_module"]) as (folder, server):
        monkeypatch.setenv(FORKS_VARIABLE, folder)
        monkeypatch.setenv("MINE", "too")
        within(60, lambda: server.look() or not any(Path(folder, "sockets").iterdir()))
        command = [*python_with_vllm(), "-c", SAYS]
        done = subprocess.run(command, input="hello", capture_output=True, text=True, check=False)
    assert done.stdout == f'["hello", "too", {os.getpid()}, false]\n', done.stderr
    assert done.returncode == 7


def test_without_one_there_is_nothing_of_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORKS_VARIABLE, raising=False)
    assert python_with_vllm() == [sys.executable]
    assert platforms_environment() == {}
    assert processes(3) == ["-n", "3"]
