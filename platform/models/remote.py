"""Models in remote folders (``s3://``, ``gs://``, ``https://`` and whatever else fsspec reads)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from loomserve.platform.base.errors import ConfigError, StartError
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.models.once import made_once


def is_remote(source: str) -> bool:
    return "://" in source


def folder_of(source: str) -> Path:
    name = source.rstrip("/").rpartition("/")[2] or "model"
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    return cache_folder() / "models" / f"{name}-{digest}"


def fetch(source: str, progress: Callable[[str], None]) -> Path:
    """The copy of a remote folder on this machine, made on first use and never refreshed: new
    content needs another path. Access is by what fsspec's filesystem finds in the environment.

    Raises ConfigError for an unknown scheme or a missing folder, StartError if it cannot be fetched
    or written.
    """
    folder = folder_of(source)
    try:
        return made_once(
            folder, lambda partial: _copied(source, partial / "model", progress), progress
        )
    except ConfigError:
        raise
    except Exception as error:  # each filesystem has errors of its own
        raise StartError(
            f"{source} cannot be fetched to {folder} ({error}): check the network and the access "
            "to it, make room there, or set LOOMSERVE_HOME to another folder"
        ) from error


def _copied(source: str, to: Path, progress: Callable[[str], None]) -> Path:
    from fsspec.core import url_to_fs  # it takes a moment, which only remote folders have to pay

    try:
        filesystem, path = url_to_fs(source)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"source {source!r} cannot be read ({error}): install what fsspec needs for it (for "
            "s3:// the package s3fs), or give a folder"
        ) from None
    if not filesystem.isdir(path):
        raise ConfigError(f"source {source!r}: there is no such folder; correct it")
    progress(f"fetching {source} (once)")
    filesystem.get(path.rstrip("/") + "/", f"{to}/", recursive=True)
    sizes = sorted(each["size"] for each in filesystem.find(path, detail=True).values())
    here = sorted(file.stat().st_size for file in to.rglob("*") if file.is_file())
    if sizes != here:
        raise StartError(f"{len(here)} files came of {len(sizes)}, or they were cut short")
    return to
