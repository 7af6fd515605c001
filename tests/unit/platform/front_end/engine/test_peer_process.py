"""That a process ends is seen at the other end of its socket, before it has closed that."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from loomserve.platform.front_end.engine.peer_process import (
    PeerState,
    peer,
    state_of,
    watch_peer,
)

LISTENER = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("bound", flush=True)
time.sleep(60)
"""


@pytest.fixture
def listening() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process, and its socket's ZMQ address."""
    # Paths of sockets must be short.
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "s")
        command = [sys.executable, "-c", LISTENER, path]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                yield process, f"ipc://{path}"
            finally:
                process.kill()


def test_a_sockets_process_is_known(listening: tuple[subprocess.Popen[bytes], str]) -> None:
    process, address = listening
    assert peer(address) == process.pid
    assert state_of(process.pid) is PeerState.RUNS


def test_a_process_that_is_killed_ends_although_nobody_has_waited_for_it(
    listening: tuple[subprocess.Popen[bytes], str],
) -> None:
    process, address = listening

    async def killed() -> None:
        watching = asyncio.create_task(watch_peer(address, lambda: None))
        await asyncio.sleep(0.2)
        assert not watching.done()
        process.kill()
        await asyncio.wait_for(watching, 5)

    asyncio.run(killed())
    assert state_of(process.pid) is PeerState.ENDS
    process.wait()
    assert state_of(process.pid) is PeerState.ENDS


def test_a_process_that_is_stopped_is_told_as_such_until_it_goes_on(
    listening: tuple[subprocess.Popen[bytes], str],
) -> None:
    process, address = listening
    told: list[float] = []

    async def stopped() -> None:
        watching = asyncio.create_task(watch_peer(address, lambda: told.append(0.0)))
        await asyncio.sleep(0.2)
        assert told == []
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1)
        assert len(told) > 2
        process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.5)
        count = len(told)
        await asyncio.sleep(0.2)
        assert len(told) == count
        assert not watching.done()

    asyncio.run(stopped())


def test_where_no_process_is_seen_nothing_ends() -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(watch_peer(f"ipc://{folder}/nobody", lambda: None), 0.2))
    assert peer("tcp://127.0.0.1:1") is None
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as unbound:
        unbound.bind(f"{folder}/s")
        assert peer(f"ipc://{folder}/s") is None, "it does not listen"
    assert state_of(os.getpid()) is PeerState.RUNS
