"""Reads what is in a folder that is given as a model: names, sizes, first bytes, small JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path

from loomserve.platform.models.policy.folder_kind import JSON_FILES, FolderListing, FoundFile

# A model's own files lie at the top; what a folder is otherwise, two levels below it tell, and a
# download's leftovers three.
_DEPTH = 3
# Whoever gives a home folder shall not wait for all of it.
_MOST_FILES = 5000
_HEAD_BYTES = 64
_MOST_JSON_BYTES = 4 << 20


def read_listing(folder: Path) -> FolderListing:
    """
    Raises:
        OSError: the folder cannot be read.
    """
    files: dict[str, FoundFile] = {}
    folders: set[str] = set()
    for here, inner, names in os.walk(folder, onerror=_raise_at(folder)):
        place = Path(here).relative_to(folder)
        if len(place.parts) >= _DEPTH:
            inner.clear()
        inner.sort()
        folders |= {(place / name).as_posix() for name in inner}
        for name in sorted(names):
            files[(place / name).as_posix()] = _found(Path(here, name), top=not place.parts)
        if len(files) > _MOST_FILES:
            break
    json_files = {name: _json(folder / name) for name in JSON_FILES if name in files}
    return FolderListing(folder.name, files, frozenset(folders), json_files)


def _raise_at(folder: Path):  # type: ignore[no-untyped-def]  # os.walk's
    def failed(error: OSError) -> None:
        if error.filename == str(folder):
            raise error

    return failed


def _found(path: Path, *, top: bool) -> FoundFile:
    try:
        size = path.stat().st_size
        head = b""
        if top and path.is_file():
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
    except OSError:  # a link that leads nowhere, or a file that may not be read
        return FoundFile(None)
    return FoundFile(size, head)


def _json(path: Path) -> dict[str, object]:
    """Empty for what is not a JSON object, which whoever needs it says."""
    try:
        if path.stat().st_size > _MOST_JSON_BYTES:
            return {}
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
