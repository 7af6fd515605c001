"""What Ray starts for a worker in the place of Python: it asks for a fork that has vLLM and torch.

It is run as ``python -m loomserve.deployments.worker_launcher``, with the worker's title and then,
as Python would be, with the path of Ray's script of workers and that script's arguments. On a node
without a fork server it becomes that Python itself.
"""

from __future__ import annotations

import os
import sys

from loomserve.platform.engine.process.forking import fork
from loomserve.platform.run.folder import PYTHON_VARIABLE

_CHILD = "loomserve.deployments.forked_worker"
_STDIN = 0
# Of the fork server's imports, on a busy machine; one that has ended refuses at once.
_TIMEOUT_S = 600.0


def py_executable(title: str) -> str:
    """How a runtime environment names this launcher, for a process with a title without spaces. A
    shell on the worker's node expands it."""
    return f'"${{{PYTHON_VARIABLE}:-{sys.executable}}}" -m {__name__} {title}'


def _launch(title: str, *script: str) -> int:
    """Run a worker as a fork, and end with it, or become the worker."""
    try:
        worker = fork(_CHILD, (title, os.getcwd(), *script), os.environ, _STDIN, _TIMEOUT_S)
    except (OSError, ValueError) as error:
        print(f"no fork server: {title} takes longer to start ({error!r})", file=sys.stderr)
        worker = None
    if worker is None:
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *script])
    return worker.wait()


if __name__ == "__main__":
    sys.exit(_launch(*sys.argv[1:]))
