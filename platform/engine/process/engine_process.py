"""An engine's process as its replica sees it: forked by the node's fork server, or spawned."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Protocol

from loomserve.platform.engine.process.environment import VLLM_ENVIRONMENT
from loomserve.platform.engine.process.fork_server import LONGEST_MESSAGE
from loomserve.platform.run.folder import RUN_VARIABLE, RunFolder, own_run

_logger = logging.getLogger(__name__)

_CHILD = "loomserve.platform.engine.core.child"
_FORK_SERVER = "loomserve.platform.engine.process.fork_server"
_SOCKET = "fork-server"
_LOG = "fork-server.log"
_BACKLOG = 128
_STDOUT, _STDERR = 1, 2
_STATUS_TIMEOUT_S = 1.0
# Of a process whose fork server has ended before it.
_UNKNOWN_STATUS = 1
PRELOADED = (
    "loomserve.platform.engine.core.served_core",
    "loomserve.platform.engine.grammar_tokenizer",
    "loomserve.platform.lending.engine.scheduler",
    "loomserve.platform.lending.engine.worker",
    "loomserve.kvstore.engine.connector",
    "vllm.model_executor.models.llama",
)
"""What a fork server imports; whatever else an engine needs, it imports itself."""


class EngineProcess(Protocol):
    """What there is to do with it, besides speaking to it; ``subprocess.Popen`` has it all."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit status, as ``subprocess`` has it; None: it runs."""

    def kill(self) -> None: ...


class ForkedProcess:
    """A process that the node's fork server has forked."""

    def __init__(self, connection: socket.socket, pid: int, descriptor: int) -> None:
        """
        Args:
            connection: to the fork server, which kills the process when it ends.
            pid: the process's id.
            descriptor: refers to the process, whoever gets its id next.
        """
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


async def start_process(
    environment: Mapping[str, str], timeout_s: float, *, fork: bool = True
) -> tuple[socket.socket, EngineProcess]:
    """A process that waits to be told what engine to make, and the channel to it.

    It is forked, if it may be and this run has a fork server, else spawned. It ends with this
    process; a spawned one ends with this thread.

    Args:
        environment: what it has beyond this process's own.
        timeout_s: how long a fork server may take to import what it has to.
        fork: whether it may be forked.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        whole = {**os.environ, **environment}
        forked = None
        if fork and RUN_VARIABLE in os.environ:
            forked = await asyncio.to_thread(_forked, theirs.fileno(), whole, timeout_s)
        return ours, forked or _spawned(theirs.fileno(), whole)


def _forked(control: int, environment: dict[str, str], timeout_s: float) -> ForkedProcess | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        connection.connect(_address(own_run()))
        message = json.dumps(environment).encode()
        socket.send_fds(connection, [message], [control, _STDOUT, _STDERR])
        said, (descriptor,), _, _ = socket.recv_fds(connection, LONGEST_MESSAGE, 1)
        return ForkedProcess(connection, int(json.loads(said)), descriptor)
    except (OSError, ValueError) as error:
        connection.close()
        if not isinstance(error, FileNotFoundError):
            _logger.warning("no fork server: the engine takes longer to start (%r)", error)
        return None


def _spawned(control: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", _CHILD, str(control), str(os.getpid())],
        env=environment,
        pass_fds=[control],
        stdin=subprocess.DEVNULL,
    )


def start_fork_server(
    run: RunFolder, environment: Mapping[str, str], preloaded: Iterable[str] = PRELOADED
) -> subprocess.Popen[bytes]:
    """The fork server of a run, which ends with the run; requests wait until it has imported all.

    Args:
        run: where it listens.
        environment: that of the run's processes.
        preloaded: the modules that its children have.
    """
    log = (run.path / _LOG).open("wb")
    with log, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(_address(run))
        listener.listen(_BACKLOG)
        return subprocess.Popen(
            [sys.executable, "-m", _FORK_SERVER, str(listener.fileno()), _CHILD, *preloaded],
            env={**environment, **VLLM_ENVIRONMENT},
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _address(run: RunFolder) -> str:
    return str(run.sockets / _SOCKET)
