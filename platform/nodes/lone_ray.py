"""Ray's processes of a machine that is all there is: started, and watched."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
from collections.abc import Callable, Mapping

import psutil

from loomserve.platform.base.errors import StartError
from loomserve.platform.nodes.ray_command import (
    LONE_ENVIRONMENT,
    RAYLET,
    free_ports,
    last_line_of,
    lone_command,
    tell_listen_port,
)
from loomserve.platform.nodes.reaping import adopt_orphans, has_ended, started
from loomserve.platform.run.ending import Interrupted
from loomserve.platform.run.folder import RunFolder

# One machine is all there is, so all that talks to itself stays on it, wherever the server listens.
LOOPBACK = "127.0.0.1"
DAEMONS = ("gcs_server", RAYLET)
"""What nothing goes on without, and what Ray starts once."""
_LOOK_S = 0.2
# Lines of Ray's logs that say what is wrong; those after them show where in its code.
_SAYS_WHY = re.compile(r"^\[.*? [ECF] \d+ \d+\] (.*)", re.MULTILINE)


class LoneRay:
    """Ray's processes on this machine, in a run whose environment this process has.

    They are this process's children, in a session of their own: Linux shares cores among sessions
    first, and a terminal's signals are for the command, which ends what it has started in order.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._log = run.path / "ray-start.log"
        self._daemons: dict[str, int] = {}
        """Descriptors of the processes, by their names."""

    def start(self, resources: Mapping[str, float], unless: Callable[[], object]) -> str:
        """Start them; returns where they are joined, once Ray's command says that they are up, or
        has lost its patience while they begin. Raises StartError if one of them has ended, or
        has not begun; Interrupted if ``unless`` has said something."""
        adopt_orphans()
        (port,) = free_ports(1)
        with self._log.open("wb") as out:
            command = subprocess.Popen(
                lone_command(LOOPBACK, port, resources, self._run.ray),
                env={**os.environ, **LONE_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        while command.poll() is None:
            if unless():
                raise Interrupted
            self._find(command.pid)
            if name := self.ended(_LOOK_S):
                raise StartError(f"Ray did not start: its {name} has ended ({self.said(name)})")
        self._find(os.getpid())
        if missing := [name for name in DAEMONS if name not in self._daemons]:
            said = last_line_of(self._log) or f"status {command.returncode}"
            raise StartError(f"Ray did not start: it has no {missing[0]} ({said})")
        return f"{LOOPBACK}:{port}"

    def ended(self, wait_s: float = 0.0) -> str | None:
        """One of them that has ended, waited for so long; None: none has."""
        fds = {descriptor: name for name, descriptor in self._daemons.items()}
        ready, _, _ = select.select([*fds], [], [], wait_s)
        return fds[ready[0]] if ready else None

    def close(self) -> None:
        """Watch them no more."""
        while self._daemons:
            os.close(self._daemons.popitem()[1])

    def said(self, name: str) -> str:
        """The last that one of them has said of what is wrong, or has said at all."""
        logs = self._run.ray / "session_latest" / "logs"
        files = [logs / f"{name}.{kind}" for kind in ("out", "err")]
        texts = [file.read_text(errors="replace") for file in files if file.exists()]
        why = [line for text in texts for line in _SAYS_WHY.findall(text)]
        last = [line for line in map(last_line_of, files) if line]
        return (why or last or [f"it said nothing in {logs}"])[-1]

    def _find(self, parent: int) -> None:
        with contextlib.suppress(psutil.Error):
            for each in started(parent, DAEMONS):
                name = each.name()
                # One of an earlier start may not have been waited for.
                if name not in self._daemons and not has_ended(each):
                    self._daemons[name] = os.pidfd_open(each.pid)
                    if name == RAYLET:
                        tell_listen_port(each.cmdline())


def busy() -> str:
    """The end of a sentence about what has not started in time: how busy the machine is."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores:
        return ""
    return (
        f". The machine is busy (load average {load:.0f} on {cores} cores): try again when it is "
        "less so"
    )
