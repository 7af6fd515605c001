"""That a process ends, is stopped or works is seen at the other end of its socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loomserve.platform.engine.process.attentive_clock import PeerClock
from loomserve.platform.engine.process.peer_process import (
    PeerProcess,
    PeerState,
    nobody_listens,
    peer,
    seen_process,
)
from tests.unit.descriptors import no_descriptor_left

LISTENER = """
import ctypes, os, socket, subprocess, sys, threading, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
held = threading.Lock()
held.acquire()

def spin():
    while True:
        pass

kind = sys.argv[2]
if kind == "spins":
    threading.Thread(target=spin, daemon=True).start()
if kind == "has a worker":
    worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    threading.Thread(target=lambda: (sys.stdin.read(), worker.kill(), os._exit(0))).start()
print("bound", flush=True)
held.acquire()
"""


class Listening:
    """A process that listens, and its socket's ZMQ address."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.process, self.address = process, address

    def seen(self) -> PeerProcess:
        found = seen_process(self.address)
        assert found is not None
        return found


@contextmanager
def listening(kind: str) -> Iterator[Listening]:
    """One whose main thread waits for a lock, and that does this beside it."""
    # Paths of sockets must be short.
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "s")
        command = [sys.executable, "-c", LISTENER, path, kind]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                yield Listening(process, f"ipc://{path}")
            finally:
                if kind != "has a worker":
                    process.kill()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_sockets_process_is_known() -> None:
    with listening("waits") as one:
        assert peer(one.address) == one.process.pid
        assert one.seen().state() is PeerState.RUNS


def test_a_process_that_is_killed_ends_although_nobody_has_waited_for_it() -> None:
    with listening("waits") as one:
        seen = one.seen()
        one.process.kill()
        until(lambda: seen.state() is PeerState.ENDS)
        one.process.wait()
        assert seen.state() is PeerState.ENDS
        seen.close()


def test_a_process_is_stopped_until_it_goes_on() -> None:
    with listening("waits") as one:
        seen = one.seen()
        one.process.send_signal(signal.SIGSTOP)
        until(lambda: seen.state() is PeerState.STOPPED)
        one.process.send_signal(signal.SIGCONT)
        until(lambda: seen.state() is PeerState.RUNS)


def test_without_a_descriptor_left_a_process_runs_until_it_ends() -> None:
    with listening("waits") as one:
        seen = one.seen()
        with no_descriptor_left():
            with pytest.raises(OSError, match="Too many open files"):
                os.open("/", os.O_RDONLY)
            assert seen.state() is PeerState.RUNS
            assert seen.work().wants, "its threads cannot be seen"
            assert peer(one.address) is None
            assert seen_process(one.address) is None
            one.process.kill()
            until(lambda: seen.state() is PeerState.ENDS)


def test_an_address_is_nobodys_only_if_that_is_certain() -> None:
    async def play(one: Listening) -> None:
        assert not await nobody_listens(one.address)
        assert await nobody_listens(f"{one.address}.other")
        with socket.create_server(("127.0.0.1", 0)) as server:
            there = f"tcp://127.0.0.1:{server.getsockname()[1]}"
            assert not await nobody_listens(there)
        assert await nobody_listens(there)
        one.process.kill()
        one.process.wait()
        assert await nobody_listens(one.address)

    with listening("waits") as one:
        asyncio.run(play(one))


@pytest.mark.parametrize(
    ("kind", "most_share"), [("waits", None), ("spins", 0.2), ("has a worker", 0.2)]
)
def test_what_a_process_computes_counts_little_against_it(
    kind: str, most_share: float | None
) -> None:
    """Also in a worker of its own, and whatever share of a core a busy machine leaves it."""
    with listening(kind) as one:
        seen = one.seen()
        clock = PeerClock(time.monotonic, seen.work)
        clock.tick(late=True)
        counted, began = clock(), time.monotonic()
        while time.monotonic() - began < 2:
            time.sleep(0.25)
            clock.tick(late=True)
        share = (clock() - counted) / (time.monotonic() - began)
        if most_share is None:
            assert share > 0.6, "it sleeps, and all of the time counts"
        else:
            assert 0 < share < most_share


def test_where_no_process_is_seen_nothing_is() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as unbound:
        assert seen_process(f"ipc://{folder}/nobody") is None
        assert peer("tcp://127.0.0.1:1") is None
        unbound.bind(f"{folder}/s")
        assert peer(f"ipc://{folder}/s") is None, "it does not listen"
