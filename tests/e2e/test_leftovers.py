"""A platform that ends in whatever way leaves no process, and the next start no shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from loomserve.platform.run.folder import RUN_VARIABLE
from loomserve.platform.run.shared_memory import SHARED_MEMORY, mapped
from tests.e2e.conftest import ENGINE, HOT, LOOMSERVE, free_port
from tests.waiting import within

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

START_TIMEOUT_S = 300
ENDED_S = 15
# Running requests and the engine's processes may finish first.
STOPPED_S = 60


@pytest.fixture(autouse=True)
def _whole_again() -> None:
    """In the place of the shared platform's, which these tests do without."""


def write_config(folder: Path, drain_timeout_s: float = 5) -> tuple[Path, int]:
    port = free_port()
    config = {
        "devices": [{"name": "core0", "kind": "cpu", "cores": [0]}],
        "models": [
            {
                "name": HOT,
                "source": "demo",
                "devices": ["core0"],
                "kv_cache_memory": "64MiB",
                "engine": ENGINE,
            }
        ],
        "kvstore": {"memory": "64MiB"},
        "server": {"port": port, "drain_timeout_s": drain_timeout_s},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path, port


@contextmanager
def started(config: Path, until: Callable[[psutil.Process], bool]) -> Iterator[psutil.Process]:
    with (config.parent / "serve.log").open("ab") as out:
        command = [LOOMSERVE, "serve", str(config)]
        process = subprocess.Popen(command, stdout=out, stderr=out, process_group=0)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not until(psutil.Process(process.pid)):
            assert process.poll() is None, out
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield psutil.Process(process.pid)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(90)


def ready(port: int) -> Callable[[psutil.Process], bool]:
    def asked(_: psutil.Process) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
        except httpx.HTTPError:
            return False

    return asked


def engine_of(process: psutil.Process) -> list[psutil.Process]:
    """EngineCore, as far as it has begun."""
    return [one for one in process.children(recursive=True) if is_engine(one)]


def is_engine(process: psutil.Process) -> bool:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(word in words for word in ("VLLM::", "engine.core.child"))


def of_run(folder: str | None) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if run_of(process) == folder]


def run_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(RUN_VARIABLE)
    except psutil.Error:
        return None


def memory_of(processes: list[psutil.Process]) -> set[Path]:
    return {
        SHARED_MEMORY / name
        for process in processes
        for name in mapped(process.pid, SHARED_MEMORY)
        if "(deleted)" not in name
    }


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_platform_that_is_stopped_while_it_starts_ends_well(
    tmp_path: Path, how: signal.Signals
) -> None:
    config, _ = write_config(tmp_path)
    log = tmp_path / "serve.log"
    with started(config, lambda _: "loading" in log.read_text()) as command:
        command.send_signal(how)
        assert command.wait(STOPPED_S) == 0
    assert "received" not in log.read_text()
    assert log.read_text().endswith("stopped\n")


@pytest.mark.parametrize(
    ("how", "forks_first"),
    [
        (signal.SIGINT, False),
        (signal.SIGTERM, False),
        (signal.SIGHUP, False),
        (signal.SIGKILL, False),
        (signal.SIGKILL, True),
    ],
)
def test_nothing_is_left_of_a_command_that_was_ended(
    how: signal.Signals, forks_first: bool, tmp_path: Path
) -> None:
    config, port = write_config(tmp_path)
    with started(config, ready(port)) as command:
        children = command.children(recursive=True)
        memory = memory_of(children)
        (run,) = {run_of(child) for child in children} - {None}
        assert {path.name for path in memory} >= {"arena"}
        if forks_first:
            # What it has forked has another parent then.
            (forks,) = (one for one in children if one.cmdline()[:1] == ["VLLM::ForkServer"])
            forks.kill()
        command.send_signal(how)
        ended = ENDED_S if how is signal.SIGKILL else STOPPED_S
        assert psutil.wait_procs([command, *children], timeout=ended)[1] == []
    assert run is not None
    within(ENDED_S, lambda: of_run(run) == [] and not Path(run, "sockets").exists())
    if how is signal.SIGKILL:
        # Of the same port, so it goes on with the store's arena until it stops.
        with started(config, lambda process: len(process.children(recursive=True)) > 3):
            assert {path.name for path in memory if path.exists()} <= {"arena"}
    assert [path for path in memory if path.exists()] == []


@pytest.mark.parametrize("daemon", ["gcs_server", "raylet"])
def test_a_command_whose_ray_has_ended_says_so_and_ends(daemon: str, tmp_path: Path) -> None:
    config, port = write_config(tmp_path)
    with started(config, ready(port)) as command:
        children = command.children(recursive=True)
        (run,) = {run_of(child) for child in children} - {None}
        (killed,) = (child for child in children if child.name() == daemon)
        killed.kill()
        assert command.wait(ENDED_S) == 2
        assert psutil.wait_procs(children, timeout=ENDED_S)[1] == []
    assert of_run(run) == []
    said = (tmp_path / "serve.log").read_text()
    assert f"Ray's {daemon} has ended" in said
    assert "requests may finish" not in said


@pytest.mark.parametrize(("ends", "status"), [("SIGHUP", 0), ("gcs_server", 2)])
def test_a_stream_ends_before_the_platform_does(ends: str, status: int, tmp_path: Path) -> None:
    config, port = write_config(tmp_path, drain_timeout_s=600)
    asked = {"model": HOT, "prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with started(config, ready(port)) as command:
        url = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", url, json=asked, timeout=600) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            if ends == "SIGHUP":
                command.send_signal(signal.SIGHUP)
            else:
                (daemon,) = (one for one in command.children() if one.name() == ends)
                daemon.kill()
            data = [line for line in lines if line]
        assert data[-1] == "data: [DONE]"
        assert len(data) > 100
        assert command.wait(600) == status
    said = (tmp_path / "serve.log").read_text()
    assert "Traceback" not in said
    if ends == "gcs_server":
        assert said.index("Ray's gcs_server has ended") < said.index("stopped")


def test_a_signal_to_all_processes_at_once_ends_them(tmp_path: Path) -> None:
    config, port = write_config(tmp_path)
    with started(config, ready(port)) as command:
        children = command.children(recursive=True)
        (run,) = {run_of(child) for child in children} - {None}
        os.killpg(command.pid, signal.SIGTERM)
        assert psutil.wait_procs([command, *children], timeout=STOPPED_S)[1] == []
    assert of_run(run) == []


def test_a_replica_killed_while_it_starts_leaves_no_engine(tmp_path: Path) -> None:
    config, _ = write_config(tmp_path)
    with started(config, lambda process: bool(engine_of(process))) as command:
        core = engine_of(command)[0]
        replica = core.parent()
        assert replica is not None
        replica.kill()
        assert psutil.wait_procs([core], timeout=ENDED_S)[1] == []
