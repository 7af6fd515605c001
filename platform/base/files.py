"""Files that are looked at for changes, and replaced whole."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

FileStamp = tuple[int, ...]


def stamp(path: Path) -> FileStamp | None:
    """What differs after a file was changed or replaced; None: there is none to look at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def replace_private(path: Path, text: str) -> None:
    """Write a file that its user alone can read: after a crash it is the former one or the new.

    A link stays, and the file that it leads to is replaced.

    Raises:
        OSError: it cannot be written; the former file is as it was.
    """
    path = path.resolve()
    # Made for its user alone.
    handle, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
