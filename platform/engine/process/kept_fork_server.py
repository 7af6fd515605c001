"""The fork server of a run, kept and restarted by the run's supervisor."""

from __future__ import annotations

import logging
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from loomserve.platform.engine.process.environment import FORK_SERVER_ENVIRONMENT
from loomserve.platform.engine.process.fork_server import UNFIT
from loomserve.platform.engine.process.forking import address
from loomserve.platform.run.folder import RunFolder

_logger = logging.getLogger(__name__)

FORK_SERVER = "loomserve.platform.engine.process.fork_server"
PYTHON_VARIABLE = "LOOMSERVE_FORK_SERVER_PYTHON"
"""A command that runs fork servers in Python's place, such as one that has imported vLLM."""
_LOG = "fork-server.log"
_BACKLOG = 128
# Before the next start, if one has ended soon; it doubles.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_STEADY_S = 20.0


class KeptForkServer:
    """A run's fork server: from :meth:`start` to :meth:`stop` it is restarted when it ends.

    Its socket is held here. So a process that asks while there is none waits for the next one, as
    for the first one's imports; and what one has forked goes on when it ends.
    """

    def __init__(
        self, run: RunFolder, environment: Mapping[str, str], preloaded: Iterable[str]
    ) -> None:
        """It listens in the run's folder from now on. ``environment`` is that of the run's
        processes, ``preloaded`` are the modules of its children."""
        self._log = run.path / _LOG
        self._environment = {**environment, **FORK_SERVER_ENVIRONMENT}
        self._python = shlex.split(environment.get(PYTHON_VARIABLE, "")) or [sys.executable]
        self._preloaded = [*preloaded]
        self._path = Path(address(run))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self._path))
        self._listener.listen(_BACKLOG)
        self._process: subprocess.Popen[bytes] | None = None
        self._began = self._pause_s = 0.0
        self._again_at: float | None = None
        # A signal's handler may stop it.
        self._changing = threading.RLock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        with self._changing, self._log.open("ab") as log:
            self._began = time.monotonic()
            self._process = subprocess.Popen(
                [*self._python, "-m", FORK_SERVER, str(self._listener.fileno()), *self._preloaded],
                env=self._environment,
                pass_fds=[self._listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Linux shares cores among sessions first, and its imports take one for seconds.
                start_new_session=True,
            )
            self._again_at = None

    def look(self) -> None:
        """Restart it if it has ended; to be called again and again."""
        with self._changing:
            if self._is_closed or self._process is None:
                return
            status, now = self._process.poll(), time.monotonic()
            if status == UNFIT:
                self._close()
            elif status is not None and self._again_at is None:
                _logger.warning("the fork server has ended (status %d), and starts anew", status)
                longer_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
                self._pause_s = 0.0 if now - self._began > _STEADY_S else longer_s
                self._again_at = now + self._pause_s
            if self._again_at is not None and now >= self._again_at:
                self.start()

    def stop(self) -> None:
        """End it; who asks from now on starts by itself."""
        with self._changing:
            self._close()
            if self._process is not None:
                self._process.terminate()

    @property
    def _is_closed(self) -> bool:
        return self._listener.fileno() < 0

    def _close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._listener.close()
