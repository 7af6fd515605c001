"""The file that an audit log is kept in: private, bounded, and written beside the event loop."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import sys
import time
from io import TextIOWrapper
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import SimpleQueue

from loomserve.platform.base.errors import StartError
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.config import Server

_log = logging.getLogger("ray.serve")

FILE_BYTES = 10 * 2**20
_OLD_FILES = 9
# Until a process that has no file descriptor left gets one.
_RETRY_S = 0.2
_TRIES = 300


def audit_log_path(server: Server, base: Path) -> Path:
    if server.audit_log is None:
        # Platforms of one user differ in their port, and none may move another's file away.
        return cache_folder() / f"audit-{server.port}.log"
    return (base / Path(server.audit_log).expanduser()).absolute()


def check_audit_log(path: Path) -> None:
    """Make the file, and check that it can be written; raises StartError if not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(_open_private(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT))
    except OSError as error:
        raise StartError(
            f"server.audit_log: {path} cannot be written ({error.strerror}): set it to a file of "
            "your own"
        ) from None


class AuditLog:
    """Lines of text that a thread writes to a file, which is rotated when full.

    What cannot be written is lost, and logged once, but the thread waits for a file descriptor.
    Several processes may share the file.
    """

    def __init__(self, path: Path, *, file_bytes: int = FILE_BYTES) -> None:
        lines: SimpleQueue[logging.LogRecord] = SimpleQueue()
        self._queued = QueueHandler(lines)
        self._written = _PrivateFile(path, file_bytes)
        self._writer = QueueListener(lines, self._written)
        self._writer.start()

    def write(self, line: str) -> None:
        self._queued.handle(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        self._writer.stop()
        self._written.close()


class _PrivateFile(RotatingFileHandler):
    """File that no other user can read, which a full disk does not break for good."""

    def __init__(self, path: Path, file_bytes: int) -> None:
        super().__init__(
            path, maxBytes=file_bytes, backupCount=_OLD_FILES, encoding="utf-8", delay=True
        )
        self._broken = self._told = False
        self._fails = self._waits = False

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is not None and not self._is_current():
            self._leave()
        if self._broken:
            # What was cut off must not spoil the next line.
            record.msg = f"\n{record.msg}"
        for _ in range(_TRIES):
            self._fails = self._waits = False
            super().emit(record)
            if not self._waits:
                break
            time.sleep(_RETRY_S)
        self._broken = self._told = self._fails

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        error = sys.exc_info()[1]
        self._fails = True
        self._waits = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
        if not self._told:
            self._told = True
            _log.error("the audit log %s cannot be written: %s", self.baseFilename, error)
        # A stream that failed may be closed already, or fail for ever.
        self._leave()

    def doRollover(self) -> None:  # noqa: N802  # logging's name
        """Move the file away, unless another process has just done so."""
        if self.stream is None:
            super().doRollover()
            return
        # It is closed before it is moved, and the lock is to outlive that.
        locked = os.dup(self.stream.fileno())
        try:
            fcntl.flock(locked, fcntl.LOCK_EX)
            if self._is_current():
                super().doRollover()
            else:
                self._leave()
        finally:
            os.close(locked)

    def _is_current(self) -> bool:
        assert self.stream is not None
        try:
            return os.path.samestat(os.fstat(self.stream.fileno()), os.stat(self.baseFilename))
        except (OSError, ValueError):  # it has failed, and is closed
            return False

    def _leave(self) -> None:
        left, self.stream = self.stream, None
        if left is not None:
            with contextlib.suppress(OSError):
                left.close()

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    # A link may lead to a file of somebody else's, and a pipe would wait for its reader.
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            os.fchmod(handle, 0o600)
    except OSError:
        os.close(handle)
        raise
    return handle
