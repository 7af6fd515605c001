"""A node is kept: started again when it ends, its orphans reaped, and nothing of it left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from loomserve.platform.nodes.node import NodeOptions, start_command
from loomserve.platform.run.folder import RunFolder
from tests.waiting import PATIENCE_S

# It takes long, so that it begins first.
pytestmark = pytest.mark.xdist_group("nodes")

OPTIONS = NodeOptions(
    name="n1", head=("10.0.0.1", 6379), is_head=False, ip="10.0.0.2", token="t" * 32
)
# Ray's part is a process that leaves an orphan and a child of its own, and ends when told to.
KEEPER = """
import os, sys, threading
from functools import partial
from pathlib import Path
from loomserve.platform.engine.process.kept_fork_server import KeptForkServer
from loomserve.platform.nodes import node
from tests.unit.platform.nodes.test_node import OPTIONS

folder = Path(sys.argv[1])
PART = '''
import os, subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
if os.fork() == 0:
    if os.fork() == 0:
        os._exit(0)
    os._exit(0)
left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
raylet = subprocess.Popen([folder / "raylet", "1000"])
(folder / "raylet.pid").write_text(str(raylet.pid))
starts = folder / "starts"
starts.write_text(starts.read_text() + f"{left.pid} {os.environ['LOOMSERVE_RUN']}\\\\n")
print("Ray runtime started", flush=True)
while not (folder / "end").exists():
    time.sleep(0.05)
(folder / "end").unlink()
print("the raylet is gone", flush=True)
sys.exit(1)
'''
node.start_command = lambda options, temporary: [sys.executable, "-c", PART, str(folder)]
beside = partial(KeptForkServer, preloaded=["json"])
stopped = threading.Event()
kept = node.SupervisedNode(OPTIONS, lambda line: print(line, flush=True), beside, stopped)
threading.Thread(target=lambda: (sys.stdin.read(), stopped.set())).start()
kept.run()
print("zombies", sum(one.status() == "zombie" for one in __import__("psutil").Process().children()))
"""


def fork_servers(keeper: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Those that run."""
    return [
        child
        for child in psutil.Process(keeper.pid).children()
        if child.status() != psutil.STATUS_ZOMBIE
        and any("fork_server" in word or "ForkServer" in word for word in child.cmdline())
    ]


def left_by_a_killed_process(folder: Path) -> Path:
    path = folder / "left"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    return path


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.usefixtures("short_temporary")
def test_a_node_is_started_again_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    starts, log = tmp_path / "starts", tmp_path / "log"
    starts.touch()
    shutil.copy(shutil.which("sleep") or "", tmp_path / "raylet")
    with log.open("w") as out:
        keeper = subprocess.Popen(
            [sys.executable, "-c", KEEPER, str(tmp_path)], stdin=subprocess.PIPE, stdout=out
        )
    try:
        until(lambda: log.read_text().count("node n1 is up at 10.0.0.2") == 1)
        (tmp_path / "end").touch()
        until(lambda: log.read_text().count("node n1 is up at 10.0.0.2") == 2)
        (first, one), (second, other) = (line.split() for line in starts.read_text().splitlines())
        assert one != other, "each start is a run of its own"
        assert not psutil.pid_exists(int(first)), "what the first start left has ended"
        assert psutil.pid_exists(int(second))
        (forks,) = fork_servers(keeper)
        dead = left_by_a_killed_process(RunFolder(Path(other)).sockets)
        forks.kill()
        until(lambda: set(fork_servers(keeper)) - {forks} and not dead.exists())
        # One that was told to leave ends in good order, which Ray's command takes no notice of.
        os.kill(int((tmp_path / "raylet.pid").read_text()), signal.SIGTERM)
        until(lambda: log.read_text().count("node n1 is up at 10.0.0.2") == 3)
    finally:
        keeper.communicate(timeout=PATIENCE_S)
    assert keeper.returncode == 0
    said = log.read_text()
    assert "node n1 has ended: Ray runtime started / the raylet is gone; again in 1 s" in said
    assert "zombies 0" in said
    assert not psutil.pid_exists(int(second))


@pytest.fixture
def short_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run's folder, whose path must be short."""
    monkeypatch.setenv("TMPDIR", "/tmp")


def option(command: list[str], name: str) -> str | None:
    return next((each.partition("=")[2] for each in command if each.startswith(f"{name}=")), None)


def test_ray_is_told_where_the_head_is_and_what_the_node_offers() -> None:
    command = start_command(OPTIONS, Path("/tmp/run/ray"))
    assert option(command, "--address") == "10.0.0.1:6379"
    assert option(command, "--node-ip-address") == "10.0.0.2"
    assert "loomserve_core:n1:0" in (option(command, "--resources") or "")
    assert "--head" not in command
    assert "loomserve_state" not in (option(command, "--resources") or "")
    agents = [int(each.partition("=")[2]) for each in command if "agent" in each]
    assert len(set(agents)) == 3
    assert min(agents) > 1024


def test_the_head_listens_where_it_is_told_and_may_keep_the_state() -> None:
    head = NodeOptions(
        name="h",
        head=("10.0.0.1", 7000),
        is_head=True,
        ip="10.0.0.1",
        token="t" * 32,
        state=Path("/state"),
        ports=(20000, 20099),
    )
    command = start_command(head, Path("/tmp/run/ray"))
    assert "--head" in command
    assert option(command, "--port") == "7000"
    assert option(command, "--address") is None
    assert "loomserve_state" in (option(command, "--resources") or "")
    assert option(command, "--min-worker-port") == "20000"
    assert option(command, "--max-worker-port") == "20099"
