"""A fork server of a run that has nothing else."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from loomserve.platform.engine.process.kept_fork_server import KeptForkServer
from loomserve.platform.run.folder import RunFolder


@contextmanager
def fork_server_of(modules: Iterable[str]) -> Iterator[tuple[str, KeptForkServer]]:
    """The run's folder, for ``RUN_VARIABLE``, and the server, which ends with the context.

    Args:
        modules: what its children have imported.
    """
    # Paths of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="run") as folder:
        run = RunFolder(Path(folder))
        run.sockets.mkdir()
        server = KeptForkServer(run, os.environ, modules)
        server.start()
        try:
            yield folder, server
        finally:
            server.stop()
            ended(server)


def kill(server: KeptForkServer) -> None:
    """Kill it, so that there is none until it is looked at."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    ended(server)


def ended(server: KeptForkServer) -> None:
    process = server._process
    assert process is not None
    process.wait(30)
