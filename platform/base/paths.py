"""Folders of Loomserve on this machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from loomserve.platform.base.errors import StartError


def cache_folder() -> Path:
    """``$LOOMSERVE_HOME``, or ``~/.cache/loomserve``."""
    return Path(os.environ.get("LOOMSERVE_HOME") or "~/.cache/loomserve").expanduser().absolute()


def check_private(folder: Path, setting: str) -> None:
    """Check that a folder of users' data, named by a ``setting``, is this user's alone. Raises
    StartError if it is another's, or open to others; OSError if it cannot be looked at."""
    seen = folder.stat()
    if seen.st_uid != os.geteuid():
        raise StartError(
            f"{folder} is to hold users' data and belongs to another user (uid {seen.st_uid}): "
            f"chown {os.geteuid()} {folder}, or set {setting} to a folder of your own"
        )
    if stat.S_IMODE(seen.st_mode) & 0o077:
        raise StartError(
            f"{folder} is to hold users' data and others can get into it: "
            f"chmod 700 {folder}, or set {setting} to another folder"
        )
