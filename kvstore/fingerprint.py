"""The namespace of KV blocks: all but the tokens that makes their bytes differ."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import xxhash

from loomserve.kvstore.protocol import NAMESPACE_BYTES

_CHUNK_BYTES = 2**24
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


def namespace(**inputs: Any) -> bytes:
    """16 bytes that differ whenever any input does; inputs must be JSON values."""
    text = json.dumps(inputs, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=NAMESPACE_BYTES).digest()


def folder_digest(folder: Path, cache: Path) -> str:
    """Digest of the weights and ``config.json`` in a model or adapter folder.

    Whole files are read, since fine-tunes of one model differ anywhere. As that takes a second a
    few GB, a file's digest is kept in ``cache`` under its path, size and time of change.

    Raises:
        FileNotFoundError: the folder holds no weights.
    """
    files = [
        file
        for file in sorted(folder.iterdir())
        if file.suffix in _WEIGHT_SUFFIXES or file.name.endswith("config.json")
    ]
    if not any(file.suffix in _WEIGHT_SUFFIXES for file in files):
        raise FileNotFoundError(f"no weights in {folder}")
    return json.dumps({file.name: _file_digest(file, cache) for file in files})


def _file_digest(file: Path, cache: Path) -> str:
    status = file.stat()
    identity = f"{file.resolve()}|{status.st_size}|{status.st_mtime_ns}"
    kept = cache / hashlib.sha256(identity.encode()).hexdigest()
    if kept.is_file():
        return kept.read_text()
    digest = xxhash.xxh3_128()
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    cache.mkdir(parents=True, exist_ok=True)
    # Several engines may start at once: each writes a file of its own, the last one wins.
    fresh = kept.with_suffix(f".{os.getpid()}")
    fresh.write_text(digest.hexdigest())
    fresh.replace(kept)
    return digest.hexdigest()
