"""Adapters on their way from their sources to this node: found, checked, and copied.

The copy is kept under the digest of what is in it. Engines read an adapter when it is loaded, and
again when they are restarted. They read the copy, so what is written over, moved or deleted where
it came from changes nothing that is loaded.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from loomserve.platform.adapters.peft import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Shape,
    base_shapes,
    check_adapter,
)
from loomserve.platform.base.errors import ConfigError, LoomserveError
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.config import AdapterSource, Model
from loomserve.platform.models import catalog, remote
from loomserve.platform.models.once import made_once
from loomserve.platform.models.remote import is_remote

_FILES = (CONFIG_FILE, WEIGHTS_FILE)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DIGEST_BYTES = 16
_CHUNK_BYTES = 2**22
T = TypeVar("T")


@dataclass(frozen=True)
class KeptAdapter:
    """An adapter whose files are kept on this node."""

    digest: str
    rank: int
    folder: Path


def kept_folder(digest: str) -> Path:
    """Folder in which this node keeps the files of that digest, if it does."""
    return cache_folder() / "adapters" / digest


def find(source: str, base: Path) -> Path:
    """The folder of an adapter's source, which is fetched if need be. ``source`` is a folder
    relative to ``base``, a remote folder, or a hub id. Raises ConfigError if there is no such
    folder; StartError if it cannot be fetched."""
    if is_remote(source):
        return remote.fetch(source, _silent)
    folder = (base / Path(source).expanduser()).absolute()
    if folder.is_dir():
        return folder
    if _HUB_ID.fullmatch(source) and not folder.parent.exists():
        return _from_hub(source)
    raise ConfigError(f"source {source!r}: there is no folder {folder}; correct the path")


def keep(folder: Path, max_rank: int, base: Mapping[str, Shape] | None) -> KeptAdapter:
    """Copy the files of an adapter's folder, and check the copy. Args and errors as of
    :func:`check_adapter`."""
    # A file that is missing is named by its place, not by that of the copy.
    check_adapter(folder, max_rank, base)
    parent = cache_folder() / "adapters"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=parent) as temporary:
            copy = Path(temporary) / "adapter"
            digest = _copied(folder, copy)
            rank = check_adapter(copy, max_rank, base)
            kept = made_once(kept_folder(digest), lambda _: copy)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be copied to {parent}: {error}") from None
    return KeptAdapter(digest, rank, kept)


def _copied(folder: Path, to: Path) -> str:
    """Copy the files; returns their digest."""
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


def take(model: Model, source: str, base: Path) -> KeptAdapter:
    """Find an adapter for a model, check it, and keep its files; it blocks. The adapter's source
    and the model's are relative to ``base``. Raises ConfigError if there is no such adapter, or the
    model does not take it; StartError if it cannot be fetched."""
    assert model.adapters is not None
    return keep(find(source, base), model.adapters.max_lora_rank, _shapes(model, base))


def take_configured(model: Model, base: Path) -> list[tuple[AdapterSource, KeptAdapter]]:
    """Take all adapters of a model's configuration; errors name the field."""
    return _each(model, lambda source: take(model, source, base))


def check_configured(model: Model, base: Path) -> None:
    """Check the adapters of a model's configuration, but for those that would be fetched. Raises
    ConfigError, which names the field, if one is wrong."""
    shapes = _shapes(model, base) if model.adapter_names else None

    def check(source: str) -> None:
        if model.adapters is not None and not is_remote(source) and (base / source).parent.exists():
            check_adapter(find(source, base), model.adapters.max_lora_rank, shapes)

    _each(model, check)


def _each(model: Model, do: Callable[[str], T]) -> list[tuple[AdapterSource, T]]:
    done = []
    for index, one in enumerate(model.adapters.load if model.adapters is not None else ()):
        try:
            done.append((one, do(one.source)))
        except LoomserveError as error:
            field = f"adapters.load[{index}].source"
            raise type(error)(f"model {model.name!r}, {field}: {error}") from None
    return done


def _shapes(model: Model, base: Path) -> Mapping[str, Shape] | None:
    """The shapes of a model's tensors; None where its weights are not here."""
    try:
        copy = catalog.copy_of(model.source)
        if copy is not None and not copy.exists():
            return None
        path = catalog.resolve(model.source, base, _silent, revision=model.revision)
        if not isinstance(path, Path):
            from huggingface_hub import snapshot_download

            path = Path(snapshot_download(path, revision=model.revision, local_files_only=True))
        return base_shapes(path)
    except (LoomserveError, OSError, ValueError):
        return None


def _silent(_: str) -> None:
    pass
