"""That a process ends is seen at the other end of its socket, before it has closed that."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from loomserve.platform.front_end.engine.peer_process import ends, peer, until_peer_ends

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
    assert not ends(process.pid)


def test_a_process_that_is_killed_ends_although_nobody_has_waited_for_it(
    listening: tuple[subprocess.Popen[bytes], str],
) -> None:
    process, address = listening

    async def killed() -> None:
        watching = asyncio.create_task(until_peer_ends(address))
        await asyncio.sleep(0.2)
        assert not watching.done()
        process.kill()
        await asyncio.wait_for(watching, 5)

    asyncio.run(killed())
    assert ends(process.pid)
    process.wait()
    assert ends(process.pid)


def test_where_no_process_is_seen_nothing_ends() -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(until_peer_ends(f"ipc://{folder}/nobody"), 0.2))
    assert peer("tcp://127.0.0.1:1") is None
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as unbound:
        unbound.bind(f"{folder}/s")
        assert peer(f"ipc://{folder}/s") is None, "it does not listen"
    assert not ends(os.getpid())
