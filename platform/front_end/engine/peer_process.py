"""The process at the other end of a local socket, and when it begins to end.

A process that is killed frees its memory first and closes its sockets then: with 3 GB its peers
read the end of file 0.5 to 0.8 s after the kill. That it is ending is seen in ``/proc`` at once.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path

_LOOK_S = 0.05
_CONNECT_TIMEOUT_S = 1.0
_LOCAL = "ipc://"
_CREDENTIALS = struct.Struct("iII")
# Of proc_pid_stat(5), behind the name, which ends with the last parenthesis.
_STATE, _FLAGS = 0, 6
_DEAD = frozenset("ZX")
# PF_EXITING of linux/sched.h.
_EXITING = 0x4


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


def ends(pid: int) -> bool:
    """Whether a process is ending, or has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return fields[_STATE] in _DEAD or bool(int(fields[_FLAGS]) & _EXITING)


async def until_peer_ends(address: str) -> None:
    """Returns when the process that listens at an address begins to end; never, if none is seen."""
    pid = peer(address)
    if pid is None or ends(pid):
        # Elsewhere, or hidden: the connection itself tells.
        await asyncio.Event().wait()
        return
    while True:
        if ends(pid):
            return
        await asyncio.sleep(_LOOK_S)
