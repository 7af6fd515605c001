"""Makes a model's folder once, also if several processes want it, and never half of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

_SOON_S = 1.0


def made_once(
    folder: Path, make: Callable[[Path], Path], waits: Callable[[str], None] = lambda _: None
) -> Path:
    """The folder, which ``make`` makes on first use; only a finished one is renamed to its place.
    ``make`` gets an empty folder, deleted afterwards, and returns what is to be renamed, in it.
    ``waits`` gets a line if another process makes it. Raises OSError if it cannot be written."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        held = lock.acquire(timeout=_SOON_S)
    except Timeout:
        waits(f"waiting for model {folder.name}, which {_holder(lock)} is making")
        held = lock.acquire()
    with held:
        if folder.exists():
            return folder
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            made = make(partial)
            for path in [*made.rglob("*"), made]:
                _sync(path)
            made.rename(folder)
            _sync(folder.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _holder(lock: FileLock) -> str:
    inode = os.stat(lock.lock_file).st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        # 1: FLOCK  ADVISORY  WRITE 1234 fe:01:5678 0 EOF
        _, kind, _, _, pid, place, *_ = line.split()
        if kind == "FLOCK" and place.endswith(f":{inode}"):
            return f"process {pid}"
    return "another process"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
