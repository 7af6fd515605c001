"""Whether a ring's file is mapped by anybody; replicas ask, so this imports no torch."""

from __future__ import annotations

import fcntl
from io import FileIO
from pathlib import Path


def hold(file: FileIO) -> None:
    """Lock an open file of a ring for as long as the process maps it, in good order or not."""
    fcntl.flock(file, fcntl.LOCK_SH)


def is_held(path: Path) -> bool:
    """Whether any process maps a file of a ring, be it of another container; ``OSError`` if it
    cannot be opened."""
    with FileIO(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
