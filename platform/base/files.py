"""Files that are looked at for changes, and replaced whole."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FileStamp = tuple[int, ...]


def stamp(path: Path) -> FileStamp | None:
    """What differs after a file was changed or replaced; None: there is none to look at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def replacing(path: Path, *, alone: bool = False) -> Iterator[Path]:
    """A path beside ``path`` for a new file, which takes its place when the block ends. If the
    block raises, the new file is removed. Of several writers the last one wins. ``alone``: there is
    one writer at a time, which first removes what a killed one left."""
    new = path.with_name(f"{path.name}.new" if alone else f"{path.name}.{secrets.token_hex(4)}.new")
    new.unlink(missing_ok=True)
    try:
        yield new
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file that others see whole: the former one, or the new one."""
    with replacing(path) as new:
        new.write_bytes(content.encode() if isinstance(content, str) else content)


def replace_private(path: Path, text: str) -> None:
    """Write a file that its user alone can read: after a crash it is the former one or the new. A
    link stays, and the file that it leads to is replaced. Raises OSError if it cannot be written:
    the former file is as it was."""
    path = path.resolve()
    with replacing(path) as new:
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
