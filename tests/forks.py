"""Processes that run tests side by side, forked from one that has imported what they need.

vLLM's import takes 20 s of a core, and that of all tests as long again, which each process would
need else. Run as a program, this stands in for a Python, such as xdist starts: it has a process
forked that does what it was told to.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path

import psutil
from setproctitle import setproctitle

from loomserve.platform.engine.process.fork_server import ForkServer
from loomserve.platform.engine.process.forking import ForkedProcess, fork
from loomserve.platform.engine.process.kept_fork_server import FORK_SERVER, PYTHON_VARIABLE
from loomserve.platform.run.folder import RUN_VARIABLE, RunFolder
from loomserve.platform.run.upkeep import keep_looking

FORKS_VARIABLE = "LOOMSERVE_TESTS_FORKS"
"""Names the folder of the run of whose fork server tests have processes."""
_START_S = 600.0
_STDIN = 0
_TITLE = "tests: in the place of "
_COLLECT = "--collect-only"
_FIRST_MODULE = 3
"""Of its arguments, behind the descriptor at which it listens."""


@contextmanager
def forks() -> Iterator[None]:
    """Within it this process and those below have a fork server, which has imported vLLM."""
    from loomserve.deployments.forked_worker import preloaded
    from loomserve.platform.devices.gpus import vllm_is_for
    from tests.fork_servers import fork_server_of

    modules = (*preloaded(vllm_is_for()), "tests.forks", "openai")
    ended = threading.Event()
    with fork_server_of(modules) as (folder, server), _set(FORKS_VARIABLE, folder):
        threading.Thread(target=keep_looking, args=(ended, server.look), daemon=True).start()
        try:
            yield
        finally:
            ended.set()


@contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    """Within it the environment has a variable of this value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def collected(folders: Sequence[str]) -> Iterator[dict[str, str]]:
    """The environment in which processes are forked from one that has also imported the tests of
    these folders.

    Of that none can be forked that is a worker of Ray's, which tests import.
    """
    with tempfile.TemporaryDirectory(prefix="run") as folder:
        run = RunFolder(Path(folder))
        run.sockets.mkdir()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(run.sockets / "fork-server"))
            listener.listen()
            server = _forked([_COLLECT, *folders], listener.fileno())
        if server is None:
            yield dict(os.environ)
            return
        yield os.environ | {FORKS_VARIABLE: folder}
        server.kill()


def processes(number: int) -> list[str]:
    """The options of xdist for so many."""
    if FORKS_VARIABLE not in os.environ:
        return ["-n", str(number)]
    return ["--tx", f"{number}*popen//python={shlex.join(python_with_vllm())}"]


def python_with_vllm() -> list[str]:
    """The command of a Python that has imported vLLM, if there is a fork server that has."""
    return [sys.executable, *(["-P", __file__] if FORKS_VARIABLE in os.environ else [])]


def platforms_environment() -> dict[str, str]:
    """What has the fork server of a platform forked, if it can be."""
    return {PYTHON_VARIABLE: shlex.join(python_with_vllm())} if FORKS_VARIABLE in os.environ else {}


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """All processes that it has started, and what was forked elsewhere for them."""
    found = dict.fromkeys(process.children(recursive=True))
    for each in [*found]:
        if (forked := in_the_place_of(each)) is not None:
            found |= dict.fromkeys([forked, *forked.children(recursive=True)])
    return [*found]


def in_the_place_of(process: psutil.Process) -> psutil.Process | None:
    """The process that was forked for this one, if this is such a stand-in."""
    with suppress(psutil.NoSuchProcess):
        if pid := " ".join(process.cmdline()).partition(_TITLE)[2]:
            return psutil.Process(int(pid))
    return None


def main(descriptor: int, asked: str, umask: str, *arguments: str) -> None:
    """Be what :func:`_forked` was asked for, in a process that was just forked.

    Args:
        descriptor: of a listening socket, or of standard input.
        asked: in JSON, the names of the environment's variables that no import has set.
        umask: of whoever asked.
        arguments: of Python: ``-c`` and a program, or ``-m`` with a fork server's; or folders to
            collect the tests of.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(int(umask))
    if "-c" in arguments:
        os.dup2(descriptor, _STDIN)
        os.close(descriptor)
        exec(arguments[arguments.index("-c") + 1], {"__name__": "__main__"})
        return
    if arguments[0] == _COLLECT:
        _collect(arguments)
    else:
        # Its supervisor decides when it ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for module in arguments[_FIRST_MODULE:]:
            importlib.import_module(module)
    # It would copy their memory in each process.
    gc.collect()
    gc.freeze()
    set_by_imports = {name: os.environ[name] for name in os.environ.keys() - {*json.loads(asked)}}
    request, given = ForkServer(socket.socket(fileno=descriptor), set_by_imports).serve()
    importlib.import_module(request["child"]).main(given, *request["arguments"])


def _collect(arguments: Sequence[str]) -> None:
    import pytest

    with redirect_stdout(io.StringIO()):
        pytest.main([*arguments, "-qq", "--no-summary", "-p", "no:cacheprovider"])


def _forked(arguments: Sequence[str], descriptor: int) -> ForkedProcess | None:
    """A process of the fork server that the environment names; None: that forks none."""
    environment = dict(os.environ)
    os.umask(umask := os.umask(0))
    given = json.dumps([*environment]), str(umask), *arguments
    with _set(RUN_VARIABLE, environment[FORKS_VARIABLE]):
        try:
            return fork("tests.forks", given, environment, descriptor, _START_S)
        except (OSError, ValueError):
            return None


def _stand_in(arguments: Sequence[str]) -> int:
    """Have what Python is told to do done in a forked process, and end as that does.

    Without a fork server that forks, this becomes that Python, which takes longer.
    """
    descriptor = _STDIN
    if arguments[:2] == ["-m", FORK_SERVER]:
        descriptor = int(arguments[_FIRST_MODULE - 1])
    forked = _forked(arguments, descriptor)
    if forked is None:
        os.execv(sys.executable, [sys.executable, *arguments])
    setproctitle(f"{_TITLE}{forked.pid}")
    return forked.wait()


if __name__ == "__main__":
    sys.exit(_stand_in(sys.argv[1:]))
