"""A fork server of a run that has nothing else."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from loomserve.platform.engine.process.forking import start_fork_server
from loomserve.platform.run.folder import RunFolder


@contextmanager
def fork_server_of(
    modules: Iterable[str],
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The run's folder, for ``RUN_VARIABLE``, and the server, which ends with the context.

    Args:
        modules: what its children have imported.
    """
    # Paths of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="run") as folder:
        run = RunFolder(Path(folder))
        run.sockets.mkdir()
        with start_fork_server(run, os.environ, modules) as server:
            yield folder, server
            server.kill()
