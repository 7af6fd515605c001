"""The process at the other end of a local socket: whether it runs, is stopped, or ends.

A process that is killed frees its memory first and closes its sockets then: with 3 GB its peers
read the end of file 0.5 to 0.8 s after the kill. That it is ending is seen in ``/proc`` at once, as
is that it has been stopped, which its sockets do not tell at all.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path

_LOOK_S = 0.05
_CONNECT_TIMEOUT_S = 1.0
_LOCAL = "ipc://"
_CREDENTIALS = struct.Struct("iII")
# Of proc_pid_stat(5), behind the name, which ends with the last parenthesis.
_STATE, _FLAGS = 0, 6
_STOPPED, _DEAD = "T", frozenset("ZX")
# PF_EXITING of linux/sched.h.
_EXITING = 0x4


class PeerState(Enum):
    """What a process is about to do."""

    RUNS = auto()
    STOPPED = auto()
    """By SIGSTOP or the like, until SIGCONT."""
    ENDS = auto()
    """It is ending, or has ended."""


def peer(address: str) -> int | None:
    """The process that listens at a ZMQ address; None: nobody does, or it is of another node.

    A local socket has the credentials of whoever bound it.
    """
    if not address.startswith(_LOCAL):
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
        asked.settimeout(_CONNECT_TIMEOUT_S)
        try:
            asked.connect(address.removeprefix(_LOCAL))
            said = asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return None
    pid, _, _ = _CREDENTIALS.unpack(said)
    # 0: of another PID namespace.
    return pid or None


def state_of(pid: int) -> PeerState:
    """As the kernel tells it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return PeerState.ENDS
    if fields[_STATE] in _DEAD or int(fields[_FLAGS]) & _EXITING:
        return PeerState.ENDS
    return PeerState.STOPPED if fields[_STATE] == _STOPPED else PeerState.RUNS


async def watch_peer(address: str, stopped: Callable[[], None]) -> None:
    """Returns when the process that listens at an address begins to end; never, if none is seen.

    Args:
        address: ZMQ's.
        stopped: is called again and again while the process is.
    """
    pid = peer(address)
    if pid is None or state_of(pid) is PeerState.ENDS:
        # Elsewhere, or hidden: the connection itself tells.
        await asyncio.Event().wait()
        return
    while True:
        match state_of(pid):
            case PeerState.ENDS:
                return
            case PeerState.STOPPED:
                stopped()
        await asyncio.sleep(_LOOK_S)
