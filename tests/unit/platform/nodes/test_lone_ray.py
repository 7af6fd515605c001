"""Ray's processes are watched from the first moment, and what is known of their end is said."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.nodes import lone_ray
from loomserve.platform.nodes.lone_ray import LoneRay
from loomserve.platform.nodes.ray_command import lone_command, tell_listen_port
from loomserve.platform.run.ending import Interrupted
from loomserve.platform.run.folder import RUN_VARIABLE, RunFolder
from loomserve.platform.run.leftovers import end_run, processes_of

# Ray's command: starts processes of the names that it is given, and ends once that of a file's.
COMMAND = """
import os, subprocess, sys, time
from pathlib import Path
folder, status, *names = sys.argv[1:]
for name in names:
    subprocess.Popen([Path(folder, name), "1000"], start_new_session=True)
print("what Ray said at last", flush=True)
while status == "waits":
    time.sleep(0.05)
sys.exit(int(status))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    monkeypatch.setenv("TMPDIR", "/tmp")
    made = RunFolder.create()
    monkeypatch.setenv(RUN_VARIABLE, str(made.path))
    for name in lone_ray.DAEMONS:
        shutil.copy(shutil.which("sleep") or "", tmp_path / name)
    yield made
    end_run(made)
    made.release()
    made.remove()


def ray_that(
    monkeypatch: pytest.MonkeyPatch, run: RunFolder, tmp_path: Path, status: str, *names: str
) -> LoneRay:
    command = [sys.executable, "-c", COMMAND, str(tmp_path), status, *names]
    monkeypatch.setattr(lone_ray, "lone_command", lambda *_: command)
    return LoneRay(run)


def never() -> bool:
    return False


def one(run: RunFolder, name: str) -> psutil.Process:
    deadline = time.monotonic() + 60
    while True:
        for process in processes_of(run):
            if process.name() == name:
                return process
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_processes_are_up_once_rays_command_has_ended(
    monkeypatch: pytest.MonkeyPatch, run: RunFolder, tmp_path: Path
) -> None:
    ray = ray_that(monkeypatch, run, tmp_path, "0", *lone_ray.DAEMONS)
    assert ray.start({}, never).startswith("127.0.0.1:")
    assert ray.ended() is None
    one(run, "gcs_server").kill()
    assert ray.ended(wait_s=60) == "gcs_server"


def test_processes_that_are_watched_no_more_take_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, run: RunFolder, tmp_path: Path
) -> None:
    before = os.listdir("/proc/self/fd")
    ray = ray_that(monkeypatch, run, tmp_path, "0", *lone_ray.DAEMONS)
    ray.start({}, never)
    assert len(os.listdir("/proc/self/fd")) == len(before) + len(lone_ray.DAEMONS)
    ray.close()
    assert os.listdir("/proc/self/fd") == before
    assert ray.ended() is None


def test_rays_own_patience_ends_no_start(
    monkeypatch: pytest.MonkeyPatch, run: RunFolder, tmp_path: Path
) -> None:
    ray = ray_that(monkeypatch, run, tmp_path, "1", *lone_ray.DAEMONS)
    ray.start({}, never)
    assert ray.ended() is None


def test_what_does_not_begin_is_said_with_rays_last_line(
    monkeypatch: pytest.MonkeyPatch, run: RunFolder, tmp_path: Path
) -> None:
    ray = ray_that(monkeypatch, run, tmp_path, "1", "gcs_server")
    with pytest.raises(StartError, match=r"it has no raylet \(what Ray said at last\)"):
        ray.start({}, never)


def test_a_raylet_that_ends_is_said_at_once_with_why(
    monkeypatch: pytest.MonkeyPatch, run: RunFolder, tmp_path: Path
) -> None:
    logs = run.ray / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text(
        "[2026-01-01 00:00:00,000 I 7 7] (raylet) main.cc:1: begins\n"
        "[2026-01-01 00:00:09,000 C 7 7] (raylet) node.cc:2: Timed out waiting for file x\n"
        "*** StackTrace Information ***\n"
    )
    ray = ray_that(monkeypatch, run, tmp_path, "waits", *lone_ray.DAEMONS)

    def kill_raylet() -> bool:
        for process in processes_of(run):
            if process.name() == "raylet" and "raylet" in ray._daemons:
                process.kill()
        return False

    with pytest.raises(StartError) as raised:
        ray.start({}, kill_raylet)
    assert str(raised.value) == (
        "Ray did not start: its raylet has ended ((raylet) node.cc:2: Timed out waiting for file x)"
    )


def test_a_start_that_nobody_wants_is_left(
    monkeypatch: pytest.MonkeyPatch, run: RunFolder, tmp_path: Path
) -> None:
    ray = ray_that(monkeypatch, run, tmp_path, "waits", *lone_ray.DAEMONS)
    with pytest.raises(Interrupted):
        ray.start({}, lambda: "raylet" in ray._daemons)


def test_a_lone_ray_is_told_its_ports_and_to_stay_on_this_machine() -> None:
    command = lone_command("127.0.0.1", 7001, {"loomserve_state": 1}, Path("/tmp/run/ray"))
    given = dict(each.partition("=")[::2] for each in command if "=" in each)
    assert given["--port"] == "7001"
    assert given["--node-ip-address"] == "127.0.0.1"
    assert given["--include-dashboard"] == "false"
    assert int(given["--object-store-memory"]) == 128 * 2**20
    assert "--block" not in command, "it ends once Ray is up"
    agents = [int(port) for name, port in given.items() if "agent" in name]
    assert len(set(agents)) == 3
    assert min(agents) > 1024


def test_a_raylet_finds_the_port_of_its_agent_before_that_has_begun(tmp_path: Path) -> None:
    agent = "python agent.py --node-id=a1 --listen-port=41234 --session-dir=elsewhere"
    command = ["raylet", "--node_id=a1", f"--session_dir={tmp_path}"]
    tell_listen_port(command)
    assert not list(tmp_path.iterdir())
    tell_listen_port([*command, f"--dashboard_agent_command={agent}"])
    (file,) = tmp_path.iterdir()
    assert file.name == "dashboard_agent_listen_port_a1"
    assert file.read_text() == "41234"
