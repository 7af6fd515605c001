"""Folders of Loomserve on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$LOOMSERVE_HOME``, or ``~/.cache/loomserve``."""
    return Path(os.environ.get("LOOMSERVE_HOME") or "~/.cache/loomserve").expanduser().absolute()
