"""What Ray starts for a gateway's worker in the place of Python: it asks for a fork that has vLLM.

It is run as ``python -m loomserve.deployments.worker_launcher``, with the path of Ray's script of
workers and that script's arguments, as Python would be. On a node without a fork server it becomes
that Python itself.
"""

from __future__ import annotations

import os
import sys

from loomserve.platform.engine.process.forking import fork
from loomserve.platform.run.folder import PYTHON_VARIABLE

_CHILD = "loomserve.deployments.forked_worker"
_STDIN = 0
# Of the fork server's imports, on a busy machine.
_TIMEOUT_S = 120.0


def py_executable() -> str:
    """How a runtime environment names this launcher; a shell on the worker's node expands it."""
    return f'"${{{PYTHON_VARIABLE}:-{sys.executable}}}" -m {__name__}'


def _launch(script: list[str]) -> int:
    """Run a worker as a fork, and end with it, or become the worker."""
    try:
        worker = fork(_CHILD, (os.getcwd(), *script), os.environ, _STDIN, _TIMEOUT_S)
    except (OSError, ValueError) as error:
        print(f"no fork server: the gateway takes longer to start ({error!r})", file=sys.stderr)
        worker = None
    if worker is None:
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *script])
    return worker.wait()


if __name__ == "__main__":
    sys.exit(_launch(sys.argv[1:]))
