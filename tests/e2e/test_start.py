"""A start that cannot be had says why once, and one that is not wanted ends, at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from loomserve.platform.run.shared_memory import SHARED_MEMORY
from tests.e2e.test_leftovers import START_TIMEOUT_S, engine_of, ready, write_config

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MARK = "LOOMSERVE_TEST"
LIMIT_S = 120
# Of each Python that begins.
SLOW_AGENTS = """
import sys, time
if any("agent" in word and word.endswith(".py") for word in sys.orig_argv):
    time.sleep(40)
"""
MAIN = "from loomserve.platform.cli.main import main; main()"
CANNOT_JOIN = f"""
from loomserve.deployments import ray_start
def fails(address):
    raise RuntimeError("no way to it")
ray_start.join = fails
{MAIN}
"""


@pytest.fixture(autouse=True)
def _whole_again() -> None:
    """In the place of the shared platform's, which these tests do without."""


class Started:
    """A command, and how many of Ray's it has had at a time."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, mark: str) -> None:
        self.process, self.mark, self._log = process, mark, log
        self.most_rays = 0
        self._ended = threading.Event()
        self._counting = threading.Thread(target=self._count)
        self._counting.start()

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def processes(self) -> list[psutil.Process]:
        """All that have come from it, wherever they are."""
        return [one for one in psutil.process_iter() if _mark_of(one) == self.mark]

    def end(self) -> None:
        self._ended.set()
        self._counting.join()
        self.process.kill()
        for one in self.processes:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait()

    def _count(self) -> None:
        while not self._ended.wait(0.2):
            rays = [one for one in self.processes if "gcs_server" in " ".join(_words(one)[:1])]
            self.most_rays = max(self.most_rays, len(rays))


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except psutil.Error:
        return None


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@contextmanager
def started(config: Path, main: str = MAIN, **environment: str) -> Iterator[Started]:
    log = config.parent / "serve.log"
    mark = str(config)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", main, "serve", str(config)],
            stdout=out,
            stderr=out,
            env={**os.environ, MARK: mark, **environment},
        )
    command = Started(process, log, mark)
    try:
        yield command
    finally:
        command.end()


def until(command: Started, holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not holds():
        assert command.process.poll() is None, command.said
        assert time.monotonic() < deadline, command.said
        time.sleep(0.1)


def left_of(command: Started) -> list[psutil.Process]:
    return psutil.wait_procs(command.processes, timeout=LIMIT_S)[1]


def test_slow_agents_of_rays_are_waited_for(tmp_path: Path) -> None:
    config, port = write_config(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENTS)
    with started(config, PYTHONPATH=str(tmp_path)) as command:
        until(command, lambda: ready(port)(psutil.Process(command.process.pid)))
        assert command.most_rays == 1
        assert "Traceback" not in command.said


def test_a_ray_that_cannot_be_joined_is_said_once_and_no_other_is_started(tmp_path: Path) -> None:
    config, _ = write_config(tmp_path)
    with started(config, CANNOT_JOIN) as command:
        assert command.process.wait(START_TIMEOUT_S) == 2
        assert command.most_rays == 1
        *_, said = command.said.splitlines()
        assert said.startswith("loomserve: Ray did not start: no way to it")
        assert "Traceback" not in command.said
        assert left_of(command) == []


def begins(command: Started) -> object:
    return True


def prepares(command: Started) -> object:
    return "admin token" in command.said


def starts_ray(command: Started) -> object:
    return "starting Ray" in command.said


def has_raylet(command: Started) -> object:
    return any("raylet/raylet" in " ".join(_words(one)[:1]) for one in command.processes)


def deploys(command: Started) -> object:
    return "loading" in command.said


def has_engine(command: Started) -> object:
    return engine_of(psutil.Process(command.process.pid))


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        (begins, signal.SIGTERM),
        (prepares, signal.SIGINT),
        (starts_ray, signal.SIGHUP),
        (has_raylet, signal.SIGTERM),
        (deploys, signal.SIGINT),
        (has_engine, signal.SIGHUP),
    ],
)
def test_a_signal_ends_a_start_at_any_moment_and_nothing_is_left(
    tmp_path: Path, moment: Callable[[Started], object], number: signal.Signals
) -> None:
    config, _ = write_config(tmp_path)
    before = set(SHARED_MEMORY.iterdir())
    with started(config) as command:
        until(command, lambda: moment(command))
        command.process.send_signal(number)
        status = command.process.wait(LIMIT_S)
        # Before it can have started anything, Python ends as others do.
        assert status == 0 or (moment is begins and status == -number)
        assert left_of(command) == []
        assert "Traceback" not in command.said
    assert {one for one in SHARED_MEMORY.iterdir() if one not in before} == set()
