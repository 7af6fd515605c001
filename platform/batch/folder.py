"""The lane's folder: the database and the bytes of files, with one owner at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock, Timeout

from loomserve.platform.base.errors import StartError, Unavailable
from loomserve.platform.base.files import sync_folder
from loomserve.platform.base.paths import cache_folder, check_private
from loomserve.platform.config import Config

_RETRY_AFTER_S = 60.0


class BatchFolder:
    """Folder of the lane. Files are written under ``incoming``, and moved when they are whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / "owner.lock", thread_local=False)

    @property
    def database(self) -> Path:
        return self.path / "lane.sqlite"

    def claim(self, timeout_s: float) -> None:
        """Make the folder and own it until :meth:`release` or the end of the process. Raises
        StartError if another lane owns it, others can read it, or it cannot be written."""
        try:
            for one in (self.path, self._files, self._incoming):
                one.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_private(self.path, "batch.folder")
            self._lock.acquire(timeout=timeout_s)
        except Timeout:
            raise StartError(
                f"another platform keeps its batches in {self.path}: set batch.folder"
            ) from None
        except OSError as error:
            raise StartError(
                f"cannot keep batches in {self.path} ({error.strerror}): set batch.folder"
            ) from None

    def release(self) -> None:
        self._lock.release()

    def incoming(self, file_id: str) -> Path:
        return self._incoming / file_id

    def blob(self, file_id: str) -> Path:
        """Path of a whole file."""
        return self._files / file_id

    def publish(self, file_id: str) -> None:
        """Move a file that was written and synced from ``incoming`` to its place, durably."""
        self.incoming(file_id).replace(self.blob(file_id))
        sync_folder(self._files)

    def check_room(self, least: int) -> None:
        """Raises Unavailable if fewer than ``least`` bytes are free."""
        if shutil.disk_usage(self.path).free < least:
            raise Unavailable(
                "there is no room for files of batches now: delete files that you no longer need, "
                f"and tell the operator, who frees the disk of batch.folder to more than {least} "
                "bytes, or lowers batch.min_free_space",
                reason="batch_folder_full",
                retry_after_s=_RETRY_AFTER_S,
            )

    def remove(self, file_id: str) -> None:
        self.blob(file_id).unlink(missing_ok=True)

    def sweep(self, known: Iterable[str]) -> None:
        """Remove what a killed lane left: unfinished files, and files that no record names."""
        keep = set(known)
        for path in (*self._incoming.iterdir(), *self._files.iterdir()):
            if path.parent == self._incoming or path.name not in keep:
                path.unlink()

    @property
    def _files(self) -> Path:
        return self.path / "files"

    @property
    def _incoming(self) -> Path:
        return self.path / "incoming"


def batch_folder(config: Config, base: Path) -> Path | None:
    """Folder of the batches of a configuration in folder ``base``; None: it has no batch lane."""
    if config.batch is None:
        return None
    if config.batch.folder is None:
        return cache_folder() / "batch"
    return (base / Path(config.batch.folder).expanduser()).absolute()
