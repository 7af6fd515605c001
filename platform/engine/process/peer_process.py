"""The process at the other end of a local socket: whether it runs, is stopped or ends, and works.

A process that is killed frees its memory first and closes its sockets then: with 3 GB its peers
read the end of file 0.5 to 0.8 s after the kill. ``/proc`` shows at once that it is ending, and
that it has been stopped, which its sockets do not tell at all.

Only a process that does not exist has ended. Whatever else goes wrong in a look, such as that this
process has no descriptor left, says nothing about the other one.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from enum import Enum, auto
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loomserve.platform.base.processes import NOBODY, threads, with_descendants
from loomserve.platform.engine.process.attentive_clock import AttentiveClock, PeerClock, Work
from loomserve.platform.engine.process.policy.silence import sends_nothing, wedged

_LOCAL = "ipc://"
_CREDENTIALS = struct.Struct("iII")
_NETWORK_TIMEOUT_S = 0.5
_MOST_BYTES = 4096
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
# Of proc_pid_stat(5), behind the name, which ends with the last parenthesis.
_STATE, _FLAGS, _TIMES = 0, 6, slice(11, 13)
_STOPPED, _DEAD, _WANTS = "T", frozenset("ZX"), frozenset("RD")
# PF_EXITING of linux/sched.h.
_EXITING = 0x4
POLL_INTERVAL_S = 1.0


class PeerState(Enum):
    RUNS = auto()
    STOPPED = auto()
    """By SIGSTOP or the like, until SIGCONT."""
    ENDS = auto()
    """It is ending, or has ended."""


def peer(address: str) -> int | None:
    """The process that listens at a ZMQ address; None: nobody does, or it cannot be seen. A local
    socket has the credentials of whoever bound it."""
    if not address.startswith(_LOCAL):
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            asked.setblocking(False)
            asked.connect(address.removeprefix(_LOCAL))
            said = asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return None
    pid, _, _ = _CREDENTIALS.unpack(said)
    # 0: of another PID namespace.
    return pid or None


def seen_process(address: str) -> PeerProcess | None:
    """The process that listens at a ZMQ address; None: it cannot be seen, or not now."""
    pid = peer(address)
    if pid is None or pid == os.getpid():
        return None
    try:
        return PeerProcess(pid)
    except OSError:
        return None


async def nobody_listens(address: str) -> bool:
    """Whether a ZMQ address is certainly nobody's, as that of a process that has ended."""
    if address.startswith(_LOCAL):
        path = address.removeprefix(_LOCAL)
        asked = asyncio.open_unix_connection(path)
    else:
        there = urlsplit(address)
        asked = asyncio.open_connection(there.hostname, there.port)
    try:
        async with asyncio.timeout(_NETWORK_TIMEOUT_S):
            _, writer = await asked
    except (*NOBODY, ConnectionRefusedError):
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


class PeerProcess:
    """A process of this node; it is looked at by a descriptor that is open from the start. So
    nothing has to be opened to see its end, and no other process is taken for it."""

    def __init__(self, pid: int) -> None:
        """Raises ``OSError`` if it cannot be looked at, or not at this moment."""
        self.pid = pid
        self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._stat)

    def state(self) -> PeerState:
        try:
            fields = _fields(os.pread(self._stat, _MOST_BYTES, 0))
        except ProcessLookupError:
            return PeerState.ENDS
        if fields[_STATE] in _DEAD or int(fields[_FLAGS]) & _EXITING:
            return PeerState.ENDS
        return PeerState.STOPPED if fields[_STATE] == _STOPPED else PeerState.RUNS

    def work(self) -> Work:
        """What it has done; where its threads cannot be seen, it is said to want a core."""
        cpu_s, wants = 0.0, False
        try:
            cpu_s = _cpu_s(_fields(os.pread(self._stat, _MOST_BYTES, 0)))
            for pid in with_descendants(self.pid):
                if pid != self.pid:
                    cpu_s += _cpu_s(_fields(Path(f"/proc/{pid}/stat").read_bytes()))
                wants = wants or any(_thread_wants(each) for each in threads(pid))
        except OSError as error:
            wants = wants or error.errno not in (errno.ENOENT, errno.ESRCH)
        return Work(cpu_s, wants)


def _fields(stat: bytes) -> list[str]:
    return stat.decode(errors="replace").rpartition(")")[2].split()


def _cpu_s(fields: list[str]) -> float:
    return sum(map(int, fields[_TIMES])) / _TICKS_A_SECOND


def _thread_wants(thread: Path) -> bool:
    try:
        return _fields((thread / "stat").read_bytes())[_STATE] in _WANTS
    except NOBODY:
        return False


async def until_wedged(
    pid: int, turn: Callable[[], Coroutine[Any, Any, int]], *, limit_s: float, look_s: float
) -> str:
    """Ask an engine for a turn again and again; returns why it has to be ended, once it has.

    ``turn`` returns once the engine's loop has come by, between two steps, with how much its
    thread that sends outputs has done, which is more at each turn; what it raises is raised.
    ``limit_s`` are seconds of standing still that count, ``look_s`` those between two looks.
    """
    sent, unsent_turns = -1, 0
    while True:
        asked = asyncio.ensure_future(turn())
        try:
            await asyncio.wait([asked], timeout=look_s)
            if not asked.done():
                with suppress(OSError):  # it has ended, or cannot be looked at just now
                    if (why := await _wedged(pid, asked, limit_s, look_s)) is not None:
                        return why
            if asked.done():
                before, sent = sent, asked.result()
                unsent_turns = unsent_turns + 1 if sent == before else 0
                if (why := sends_nothing(unsent_turns)) is not None:
                    return why
        finally:
            asked.cancel()
        await asyncio.sleep(look_s)


async def _wedged(
    pid: int, asked: asyncio.Future[int], limit_s: float, look_s: float
) -> str | None:
    """None: it has taken its turn."""
    # What this process does not see while it has no core itself does not count.
    attended = AttentiveClock(time.monotonic, 2 * look_s)
    with closing(PeerProcess(pid)) as process:
        counted = PeerClock(attended, process.work)
        while not asked.done():
            stopped = process.state() is PeerState.STOPPED
            why = wedged(attended(), counted(), limit_s, stopped=stopped)
            if why is not None:
                return why
            await asyncio.wait([asked], timeout=look_s)
            attended.tick()
            counted.tick(late=True)
    return None
