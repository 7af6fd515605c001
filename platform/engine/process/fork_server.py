"""A node's process that has imported vLLM, and forks engines' processes from itself.

To import vLLM takes most of an engine's start. A forked process has it at once, and shares the
memory of what was imported with all others.

A replica connects and sends one message: the child's whole environment, with the descriptors of
its control socket, its output and its errors. It is sent the child's process id with a descriptor
of it, and at the child's end its exit status. When the connection ends, as it does with the
replica, the child is killed.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress

_logger = logging.getLogger(__name__)

LONGEST_MESSAGE = 2**17
"""Bytes of a request."""

_DESCRIPTORS = 3
_STDOUT, _STDERR = 1, 2
_RECEIVE_TIMEOUT_S = 5.0


class ForkServer:
    """Forks a child for each connection, and tells there how it ended.

    It has but one thread and never waits for one child alone, so that it sees each end at once.
    """

    def __init__(self, listener: socket.socket, set_by_imports: dict[str, str]) -> None:
        """``set_by_imports``: environment variables that children have beside their own."""
        self._listener = listener
        self._set_by_imports = set_by_imports
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._control: int | None = None

    def serve(self) -> int:
        """Fork children for ever; returns in each child, with its control socket's descriptor."""
        while True:
            for key, _ in self._selector.select():
                key.data()
                if self._control is not None:
                    return self._control

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        # One that says nothing would hold up all others.
        connection.settimeout(_RECEIVE_TIMEOUT_S)
        descriptors: list[int] = []
        try:
            message, descriptors, _, _ = socket.recv_fds(connection, LONGEST_MESSAGE, _DESCRIPTORS)
            environment: dict[str, str] = json.loads(message)
            control, out, err = descriptors
        except (OSError, ValueError, TypeError) as error:
            _logger.warning("a request to fork was no such request: %s", error)
            connection.close()
        else:
            pid = os.fork()
            if pid == 0:
                connection.close()
                self._become(environment, control, out, err)
                return
            self._attend(connection, pid)
        for descriptor in descriptors:
            os.close(descriptor)

    def _become(self, environment: dict[str, str], control: int, out: int, err: int) -> None:
        """Make this process, which was just forked, the child that was asked for."""
        # Others' connections must end with the server, and not with its last child.
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()
        os.dup2(out, _STDOUT)
        os.dup2(err, _STDERR)
        os.close(out)
        os.close(err)
        os.environ.clear()
        os.environ.update(environment | self._set_by_imports)
        _follow_environment()
        self._control = control

    def _attend(self, connection: socket.socket, pid: int) -> None:
        child = _Child(self._selector, connection, pid)
        self._selector.register(connection, selectors.EVENT_READ, child.replica_is_gone)
        self._selector.register(child.descriptor, selectors.EVENT_READ, child.has_ended)
        with suppress(OSError):  # then the connection ends, which is seen next
            socket.send_fds(connection, [json.dumps(pid).encode()], [child.descriptor])


class _Child:
    """A forked process, and the connection of the replica that asked for it."""

    def __init__(
        self, selector: selectors.BaseSelector, connection: socket.socket, pid: int
    ) -> None:
        self.descriptor = os.pidfd_open(pid)
        self._selector = selector
        self._connection = connection
        self._pid = pid
        self._is_left = self._is_over = False

    def replica_is_gone(self) -> None:
        if self._is_over:
            return  # both ended at once
        self._is_left = True
        self._selector.unregister(self._connection)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)

    def has_ended(self) -> None:
        self._is_over = True
        _, status = os.waitpid(self._pid, 0)
        with suppress(OSError):  # the replica has ended, too
            self._connection.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
        self._selector.unregister(self.descriptor)
        if not self._is_left:
            self._selector.unregister(self._connection)
        os.close(self.descriptor)
        self._connection.close()


def _follow_environment() -> None:
    """Have torch, which reads it when it is imported, take as many threads as it says."""
    torch = sys.modules.get("torch")
    if torch is not None and (threads := os.environ.get("OMP_NUM_THREADS")):
        torch.set_num_threads(int(threads))


def _import_all(modules: Iterable[str]) -> dict[str, str]:
    """Import what all children need, and have the collector leave it alone, which would copy it.

    Returns:
        The environment variables that this has set, as vLLM's imports do.
    """
    before = dict(os.environ)
    for module in modules:
        importlib.import_module(module)
    if "vllm" in sys.modules:
        # In a child, whose environment is another, no title could be set for the first time.
        sys.modules["vllm.utils.system_utils"].set_process_title("ForkServer")
    gc.collect()
    gc.freeze()
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def main(listener: int, child: str, modules: Iterable[str]) -> None:
    """Serve until this process is killed.

    Args:
        listener: descriptor of the socket at which replicas connect.
        child: the module whose ``main`` a child runs, with its control socket's descriptor.
        modules: what children have imported.
    """
    # A terminal sends it to all processes; the command decides when they end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_by_imports = _import_all([child, *modules])
    control = ForkServer(socket.socket(fileno=listener), set_by_imports).serve()
    sys.modules[child].main(control)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
