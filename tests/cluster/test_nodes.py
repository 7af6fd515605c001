"""The nodes that other tests stand on: apart from each other, and gone at the end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cluster.nodes import Node, network

# Leaves a process that nobody waits for.
ORPHAN = "import os; os.fork() or (os.fork() or os._exit(0), os._exit(0)); os.wait()"
SERVER = """
import socket
with socket.create_server(("0.0.0.0", 4000)) as server:
    print("listens", flush=True)
    while True:
        connection, _ = server.accept()
        connection.sendall(connection.recv(100))
"""


CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], 4000), timeout=5) as connection:
    connection.sendall(b"x")
    print(connection.recv(1).decode(), end="")
"""


def until(holds: Callable[[], object], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def reaches(address: str) -> bool:
    try:
        with socket.create_connection((address, 4000), timeout=1) as connection:
            connection.sendall(b"x")
            connection.settimeout(1)
            return connection.recv(1) == b"x"
    except OSError:
        return False


def test_each_has_its_own_name_address_shared_memory_and_processes(
    nodes: tuple[Node, ...], tmp_path: Path
) -> None:
    one, two = nodes
    assert [node.output("hostname").strip() for node in nodes] == [one.name, two.name]
    assert one.address in one.output("ip", "addr", "show", "eth0")
    one.output("touch", "/dev/shm/mine")
    assert "mine" in one.output("ls", "/dev/shm")
    assert "mine" not in two.output("ls", "/dev/shm")
    assert "mine" not in [path.name for path in Path("/dev/shm").iterdir()]
    two.start([sys.executable, "-c", SERVER], tmp_path / "log")
    until(lambda: "listens" in (tmp_path / "log").read_text())
    assert one.output(sys.executable, "-c", CLIENT, two.address) == "x"
    pids = two.output("sh", "-c", "ls -d /proc/[0-9]*").split()
    assert "/proc/1" in pids
    assert len(pids) < 6


def test_a_command_gets_signals_and_tells_its_status(
    nodes: tuple[Node, ...], tmp_path: Path
) -> None:
    kind = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    log = tmp_path / "log"
    command = nodes[0].start(
        [sys.executable, "-c", kind + "print('up', flush=True)\ntime.sleep(1000)"], log
    )
    until(lambda: log.exists() and "up" in log.read_text())
    assert command.poll() is None
    command.send_signal(signal.SIGTERM)
    assert command.wait(10) == 7


def test_whoever_ends_is_reaped(nodes: tuple[Node, ...]) -> None:
    node = nodes[0]
    node.output(sys.executable, "-c", ORPHAN)
    until(lambda: node.processes() == [])


def test_a_partition_heals_and_a_node_without_power_boots_empty(
    nodes: tuple[Node, ...], tmp_path: Path
) -> None:
    node = nodes[1]
    node.start([sys.executable, "-c", SERVER], tmp_path / "log")
    until(lambda: reaches(node.address))
    node.partition()
    assert not reaches(node.address)
    node.heal()
    until(lambda: reaches(node.address))
    left = node.processes()
    node.output("touch", "/dev/shm/mine")
    node.cut_power()
    until(lambda: not any(process.is_running() for process in left))
    assert not reaches(node.address)
    node.boot()
    assert node.processes() == []
    assert "mine" not in node.output("ls", "/dev/shm")


def test_nothing_is_left_of_nodes_whose_test_failed() -> None:
    def links() -> str:
        return subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout

    def broken() -> None:
        with network("short") as (node,):
            node.start(["sleep", "1000"], Path("/dev/null"))
            until(node.processes)
            inside.extend(node.processes())
            assert "nodes" in links()
            raise ZeroDivisionError

    inside: list[psutil.Process] = []
    before = links()
    with pytest.raises(ZeroDivisionError):
        broken()
    assert inside
    until(lambda: links() == before)
    assert not any(process.is_running() for process in inside)


KILLED = """
import os, signal, sys
from tests.cluster.nodes import network
with network("short") as (node,):
    node.start(["sleep", "1000"], __import__("pathlib").Path("/dev/null"))
    print(node._init.pid, node._outer.pid, node._hub, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_nodes_whose_tests_were_killed() -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], capture_output=True, text=True, check=False
    )
    pids = [int(pid) for pid in killed.stdout.split()]
    assert len(pids) == 3, killed.stderr

    def gone(pid: int) -> bool:
        # Without an init that reaps, as in some containers, they stay as zombies.
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    until(lambda: all(map(gone, pids)))
