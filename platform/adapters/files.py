"""An adapter's files on this node: a copy under the digest of what is in it.

Engines read an adapter when it is loaded, and again when they are started anew. They read the copy,
so what is written over, moved or deleted where it came from changes nothing that is loaded.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from loomserve.platform.adapters.peft import CONFIG_FILE, WEIGHTS_FILE, Shape, check_adapter
from loomserve.platform.base.errors import ConfigError
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.models import remote
from loomserve.platform.models.once import made_once
from loomserve.platform.models.remote import is_remote

_FILES = (CONFIG_FILE, WEIGHTS_FILE)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DIGEST_BYTES = 16
_CHUNK_BYTES = 2**22


@dataclass(frozen=True)
class KeptAdapter:
    """An adapter whose files are kept here."""

    digest: str
    rank: int
    folder: Path


def kept_folder(digest: str) -> Path:
    """Where this node keeps the files of that digest, if it does."""
    return cache_folder() / "adapters" / digest


def find(source: str, base: Path, progress: Callable[[str], None] = lambda _: None) -> Path:
    """The folder of an adapter's source, which is fetched if need be.

    Args:
        source: a folder relative to ``base``, a remote one, or a hub id.
        base: a folder.
        progress: called with a line of text for what is slow.

    Raises:
        ConfigError: there is no such folder.
        StartError: it cannot be fetched.
    """
    if is_remote(source):
        return remote.fetch(source, progress)
    folder = (base / Path(source).expanduser()).absolute()
    if folder.is_dir():
        return folder
    if _HUB_ID.fullmatch(source) and not folder.parent.exists():
        return _from_hub(source)
    raise ConfigError(f"source {source!r}: there is no folder {folder}; correct the path")


def keep(folder: Path, max_rank: int, model: Mapping[str, Shape] | None) -> KeptAdapter:
    """Copy an adapter's files, and check the copy.

    Args:
        folder: that of the adapter, as PEFT saves it.
        max_rank: the largest that its model takes.
        model: shapes of the model's tensors; None: they are not known here.

    Raises:
        ConfigError: it is none that this model takes.
    """
    # A file that is missing is named by its place, not by that of the copy.
    check_adapter(folder, max_rank, model)
    parent = cache_folder() / "adapters"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=parent) as temporary:
            copy = Path(temporary) / "adapter"
            digest = _copied(folder, copy)
            rank = check_adapter(copy, max_rank, model)
            kept = made_once(kept_folder(digest), lambda _: copy)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be copied to {parent}: {error}") from None
    return KeptAdapter(digest, rank, kept)


def _copied(folder: Path, to: Path) -> str:
    """The digest of what was copied."""
    to.mkdir()
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in _FILES:
        digest.update(f"{name} {os.stat(folder / name).st_size}\n".encode())
        with (folder / name).open("rb") as source, (to / name).open("wb") as copy:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                copy.write(chunk)
    return digest.hexdigest()


def _from_hub(source: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=list(_FILES)))
    except Exception as error:  # its client has errors of its own, of the network above all
        raise ConfigError(
            f"source {source!r} is no folder, and cannot be fetched from the hub ({error})"
        ) from None
