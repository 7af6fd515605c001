"""What is looked after while a run goes on: what its processes leave that have ended."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from loomserve.platform.run.folder import RunFolder
from loomserve.platform.run.shared_memory import RunMemory

_logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_PERIOD_S = 5.0
# A socket's file is there a moment before the kernel lists it.
_JUST_BOUND_S = 2.0
_BOUND_SOCKETS = Path("/proc/net/unix")
_PATH = 7


class RunUpkeep:
    """Notes the shared memory of a run's processes, and removes what those that ended have left. It
    is of the process that has started the run, and adopts its orphans."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._memory = RunMemory(run.memory)
        self._next = 0.0

    def look(self) -> None:
        """To be called again and again; most times it does nothing."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _PERIOD_S
        if self._memory.has_news():
            # This process has adopted the run's orphans, so all of the run's are its descendants.
            self._memory.note(psutil.Process().children(recursive=True))
        self._memory.remove_queues()
        # vLLM's own sockets are in the temporary folder.
        for folder in (self._run.sockets, self._run.temporary):
            remove_dead_sockets(folder)


def look_after(ended: threading.Event, *looks: Callable[[], object]) -> None:
    """Call each, whatever fails; not once the event is set."""
    for look in looks:
        try:
            if not ended.is_set():
                look()
        except Exception:
            if not ended.is_set():
                _logger.exception("cannot look after the run; trying again")


def keep_looking(ended: threading.Event, *looks: Callable[[], object]) -> None:
    """Call each again and again, until the event."""
    while not ended.wait(_LOOK_S):
        look_after(ended, *looks)


def remove_dead_sockets(folder: Path) -> None:
    """Remove the files of Unix sockets that no process has, which those leave that are killed."""
    bound = set[str]()
    for line in _BOUND_SOCKETS.read_text(errors="surrogateescape").splitlines():
        bound.update(line.split(maxsplit=_PATH)[_PATH:])
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            old = time.time() - path.lstat().st_mtime > _JUST_BOUND_S
            if path.is_socket() and old and str(path) not in bound:
                path.unlink()
