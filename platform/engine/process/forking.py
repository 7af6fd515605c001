"""A process that the node's fork server forks."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

from loomserve.platform.engine.process.fork_server import LONGEST_MESSAGE, ForkRequest
from loomserve.platform.run.folder import RUN_VARIABLE, RunFolder, own_run

_SOCKET = "fork-server"
_STDOUT, _STDERR = 1, 2
_STATUS_TIMEOUT_S = 1.0
# Of a process whose fork server has ended before it.
_UNKNOWN_STATUS = 1


class ForkedProcess:
    """A process that the node's fork server has forked."""

    def __init__(self, connection: socket.socket, pid: int, descriptor: int) -> None:
        """``connection`` leads to the fork server and the process, which is killed when it ends.
        ``descriptor`` refers to the process, even when another gets its id."""
        connection.setblocking(False)
        self._connection = connection
        self._descriptor = descriptor
        self._status: int | None = None
        self.pid = pid

    def poll(self) -> int | None:
        if self._status is None and select.select([self._descriptor], [], [], 0)[0]:
            self._status = self._told()
            self._connection.close()
            os.close(self._descriptor)
        return self._status

    def wait(self) -> int:
        while (status := self.poll()) is None:
            select.select([self._descriptor], [], [])
        return status

    def kill(self) -> None:
        if self._status is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def _told(self) -> int:
        """The exit status that the fork server tells as soon as it has seen the end."""
        self._connection.settimeout(_STATUS_TIMEOUT_S)
        with suppress(OSError, ValueError):
            return int(json.loads(self._connection.recv(LONGEST_MESSAGE)))
        return _UNKNOWN_STATUS


def fork(
    child: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    descriptor: int,
    timeout_s: float,
) -> ForkedProcess | None:
    """Fork a process by this run's fork server, with this one's output and errors.

    It runs ``main`` of the module ``child`` with the descriptor and the arguments. The fork server
    may be one that is started in the place of one that has ended, and has ``timeout_s`` to import
    what it has to. Returns None if this process is of no run, or its run has no fork server. Raises
    OSError if the fork server has ended meanwhile, or does not answer in time; ValueError if it
    does not answer as a fork server does.
    """
    if RUN_VARIABLE not in os.environ:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address(own_run()))
        request: ForkRequest = {
            "child": child,
            "arguments": [*arguments],
            "environment": {**environment},
        }
        message = json.dumps(request).encode()
        socket.send_fds(connection, [message], [descriptor, _STDOUT, _STDERR])
        said, (process,), _, _ = socket.recv_fds(connection, LONGEST_MESSAGE, 1)
        return ForkedProcess(connection, int(json.loads(said)), process)
    except FileNotFoundError:
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise


def address(run: RunFolder) -> str:
    return str(run.sockets / _SOCKET)
