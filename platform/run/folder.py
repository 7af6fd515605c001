"""The folder of a run: what its processes share, and nobody else gets into.

::

    TMPDIR/loomserve-UID/run-XXXXXXXX/
        ray/        Ray's session, with the logs
        sockets/    where engines and the batch lane listen
        tmp/        temporary folder of all processes of the run
        token       what Ray's processes ask each other for
        memory      shared memory that they have mapped

The command holds a lock on the folder while it lives, and every process of the run has the
folder's path in its environment. So what an ended run left can be distinguished from what runs.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loomserve.platform.base.errors import StartError
from loomserve.platform.base.paths import cache_folder, check_private

RUN_VARIABLE = "LOOMSERVE_RUN"
PYTHON_VARIABLE = "LOOMSERVE_PYTHON"
# A socket's path has at most 107 bytes, of which Ray's own part takes 68.
_LONGEST_PATH = 39


class RunFolder:
    """A run's folder; it belongs to the run whose command holds its lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ray = path / "ray"
        self.sockets = path / "sockets"
        self.temporary = path / "tmp"
        self.token = path / "token"
        self.memory = path / "memory"
        self._lock: int | None = None

    @classmethod
    def create(cls, token: str | None = None) -> RunFolder:
        """A new folder, owned by this process. ``token`` is what Ray's processes ask each other for
        on all nodes of a cluster; a run that is alone makes its own. ``StartError``: the folder
        cannot be made, or is not the user's own."""
        parent = runs_folder()
        with _locked(parent):
            run = cls(Path(tempfile.mkdtemp(prefix="run-", dir=parent)))
            if len(os.fsencode(run.path)) > _LONGEST_PATH:
                run.remove()
                raise StartError(
                    f"the path {run.path} is too long for sockets: set TMPDIR to a folder whose "
                    "path is shorter, such as /tmp"
                )
            run.own()
        for folder in (run.ray, run.sockets, run.temporary):
            folder.mkdir(mode=0o700)
        descriptor = os.open(run.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token or secrets.token_hex(32))
        return run

    def environment(self) -> dict[str, str]:
        """What the processes of the run have in their environment."""
        return {
            RUN_VARIABLE: str(self.path),
            PYTHON_VARIABLE: sys.executable,
            "TMPDIR": str(self.temporary),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            # Titles of processes would be written over their environment, and the run's path in it.
            "SPT_NOENV": "1",
            # torch would keep what it compiled in the temporary folder, which ends with the run.
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            or str(cache_folder() / "torchinductor"),
        }

    def own(self) -> bool:
        """Take the lock until :meth:`release` or this process's end; False: another has it."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._lock = descriptor
        return True

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def clear(self) -> None:
        """Remove all but the logs, and what is known of its shared memory."""
        for folder in (self.sockets, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)
        self.token.unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def own_run() -> RunFolder:
    """The folder of the run that this process belongs to."""
    return RunFolder(Path(os.environ[RUN_VARIABLE]))


def runs_folder() -> Path:
    """Folder of this user's runs; ``StartError`` if others can get into it."""
    folder = Path(tempfile.gettempdir(), f"loomserve-{os.geteuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        check_private(folder, "TMPDIR")
    except OSError as error:
        raise StartError(
            f"cannot make {folder} ({error.strerror}): set TMPDIR to a folder of your own"
        ) from None
    return folder


@contextmanager
def ended_runs() -> Iterator[list[RunFolder]]:
    """Folders of runs whose commands have ended, the oldest first; owned meanwhile."""
    parent = runs_folder()
    with _locked(parent):
        found = [RunFolder(path) for path in sorted(parent.glob("run-*"), key=_changed)]
        ended = [run for run in found if run.own()]
        try:
            yield ended
        finally:
            for run in ended:
                run.release()


def _changed(path: Path) -> float:
    return path.stat().st_mtime


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait for the lock of the folder of runs: a new run is not to be taken for an ended one."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
