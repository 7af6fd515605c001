"""Makes a model's folder once, also if several processes want it, and never half of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def made_once(folder: Path, make: Callable[[Path], Path]) -> Path:
    """The folder, which ``make`` makes on first use.

    Only a finished folder is renamed to its place; what a killed process left is thrown away.

    Args:
        folder: where it is to be.
        make: gets an empty folder beside it, which is deleted afterwards, and returns what is to be
            renamed, in it.

    Raises:
        OSError: it cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
