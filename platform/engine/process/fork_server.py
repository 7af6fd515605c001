"""A node's process that has imported vLLM, and forks processes of engines and gateways from itself.

To import vLLM takes most of their start. A forked process has it at once, and shares the memory of
what was imported with all others.

Whoever wants a child connects and sends one message, a :class:`ForkRequest`, with three
descriptors: one that the child's ``main`` is given, and those of its output and its errors. It is
sent the child's process id with a descriptor of it, and at the child's end its exit status. The
child has the connection as well: when its other end closes, as it does with whoever asked, the
kernel kills the child, whether there still is a fork server or not.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import logging
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import TypedDict

from setproctitle import setproctitle

_logger = logging.getLogger(__name__)

LONGEST_MESSAGE = 2**17
"""Bytes of a request."""
UNFIT = 3
"""Exit status of a fork server that could not import what it has to, or of whose children none
could compute: another one could not either."""

# As vLLM calls its processes.
_TITLE = "VLLM::ForkServer"
_DESCRIPTORS = 3
_STDOUT, _STDERR = 1, 2
_RECEIVE_TIMEOUT_S = 5.0
# Who has asked waits while there are no descriptors.
_PAUSE_S = 0.2
_CUDA_NOT_INITIALIZED = 3
_NOT_IMPORTED = ("ray", "sklearn")
"""What vLLM and transformers import if they can, and engines use nothing of. Ray takes from the
environment which worker it is when it is imported: a child that is a worker imports it itself."""


class ForkRequest(TypedDict):
    """What a child is to be."""

    child: str
    """The module whose ``main`` it runs, with a descriptor and the arguments."""
    arguments: list[str]
    environment: dict[str, str]
    """All that it has in its environment, but what imports have set."""


class ForkServer:
    """Forks a child for each connection, and tells there how it ended. It has but one thread and
    never waits for one child alone, so that it sees each end at once."""

    def __init__(self, listener: socket.socket, set_by_imports: dict[str, str]) -> None:
        """``set_by_imports``: environment variables that children have beside their own."""
        self._listener = listener
        self._set_by_imports = set_by_imports
        self._connections = set[socket.socket]()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._child: tuple[ForkRequest, int] | None = None

    def serve(self) -> tuple[ForkRequest, int]:
        """Fork children for ever; returns in each child, with its request and descriptor."""
        while True:
            for key, _ in self._selector.select():
                key.data()
                if self._child is not None:
                    return self._child

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            _logger.warning("cannot take a request to fork: %s", error)
            time.sleep(_PAUSE_S)
            return
        # One that says nothing would hold up all others.
        connection.settimeout(_RECEIVE_TIMEOUT_S)
        descriptors: list[int] = []
        try:
            message, descriptors, _, _ = socket.recv_fds(connection, LONGEST_MESSAGE, _DESCRIPTORS)
            request: ForkRequest = json.loads(message)
            descriptor, out, err = descriptors
            environment = request["environment"]
            pid = os.fork()
        except (OSError, ValueError, TypeError, KeyError) as error:
            _logger.warning("nothing is forked for a request: %s", error)
            connection.close()
        else:
            # Both see to it, as either may be stopped or killed now.
            end_with_other_end(connection, pid or os.getpid())
            if pid == 0:
                self._become(connection, environment, out, err)
                self._child = request, descriptor
                return
            self._attend(connection, pid)
        for descriptor in descriptors:
            os.close(descriptor)

    def _become(
        self, connection: socket.socket, environment: dict[str, str], out: int, err: int
    ) -> None:
        # It stays open until this process ends, whatever that executes.
        os.set_inheritable(connection.detach(), True)
        # Others' connections must end with the server, and not with its last child.
        self._listener.close()
        for each in self._connections:
            each.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
        self._selector.close()
        os.dup2(out, _STDOUT)
        os.dup2(err, _STDERR)
        os.close(out)
        os.close(err)
        os.environ.clear()
        os.environ.update(environment | self._set_by_imports)
        follow_environment()

    def _attend(self, connection: socket.socket, pid: int) -> None:
        child = os.pidfd_open(pid)
        self._connections.add(connection)
        ended = partial(self._has_ended, connection, child, pid)
        self._selector.register(child, selectors.EVENT_READ, ended)
        with suppress(OSError):  # who asked has ended, and so does the child
            socket.send_fds(connection, [json.dumps(pid).encode()], [child])

    def _has_ended(self, connection: socket.socket, child: int, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        with suppress(OSError):  # who asked has ended, too
            connection.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
        self._selector.unregister(child)
        self._connections.remove(connection)
        os.close(child)
        connection.close()


def end_with_other_end(connection: socket.socket, pid: int) -> None:
    """Have the kernel kill a process when the other end of its connection closes or sends. So it
    ends also while it is stopped, or computes without looking, and it needs no thread."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, pid)
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    looked = select.poll()
    looked.register(connection, 0)
    if looked.poll(0):
        # It has closed before the kernel was asked.
        os.kill(pid, signal.SIGKILL)


def follow_environment() -> None:
    """Have torch follow the environment, which it reads only when it is imported. vLLM compiles its
    sampler else, in the first step that samples: all streams stand still for ten seconds."""
    torch = sys.modules.get("torch")
    if torch is not None and (threads := os.environ.get("OMP_NUM_THREADS")):
        torch.set_num_threads(int(threads))
    dynamo = sys.modules.get("torch._dynamo.config")
    if dynamo is not None and os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        dynamo.disable = True  # type: ignore[attr-defined]


def cuda_is_initialized() -> bool:
    """Whether this process has initialized CUDA's driver, by torch or past it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False  # no library here is linked with it
    context = ctypes.c_void_p()
    return bool(driver.cuCtxGetCurrent(ctypes.byref(context)) != _CUDA_NOT_INITIALIZED)


def _import_all(modules: Iterable[str]) -> dict[str, str]:
    """Import what all children need, and have the collector leave it alone, which would copy it.
    Returns the environment variables that this has set, as vLLM's imports do. Raises RuntimeError
    if one of them has initialized CUDA."""
    before = dict(os.environ)
    for name in _NOT_IMPORTED:
        sys.modules[name] = None  # type: ignore[assignment]
    for module in modules:
        importlib.import_module(module)
    for name in _NOT_IMPORTED:
        del sys.modules[name]
    if cuda_is_initialized():
        raise RuntimeError("what was imported has initialized CUDA: no child could use a GPU")
    # In a child, whose environment is another, no title could be set for the first time.
    setproctitle(_TITLE)
    gc.collect()
    gc.freeze()
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def main(listener: int, modules: Iterable[str]) -> None:
    """Serve at the socket with this descriptor until this process is killed."""
    # A terminal sends it to all processes; the command decides when they end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        set_by_imports = _import_all(modules)
    except Exception:
        _logger.exception("engines and gateways start without a fork server, and take longer")
        sys.exit(UNFIT)
    server = ForkServer(socket.socket(fileno=listener), set_by_imports)
    request, descriptor = server.serve()
    importlib.import_module(request["child"]).main(descriptor, *request["arguments"])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
