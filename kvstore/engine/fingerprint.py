"""The namespace of KV blocks: all but the tokens that makes their bytes differ."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import xxhash

from loomserve.kvstore.server.protocol import NAMESPACE_BYTES

_CHUNK_BYTES = 2**24
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Configurations, and code that a model brings along.
_OTHER_SUFFIXES = (".json", ".py")
# Times of change are a few milliseconds apart at the least, on some filesystems a second.
_TIMESTAMP_NS = 2 * 10**9


def namespace(**inputs: Any) -> bytes:
    """16 bytes that differ whenever any input does; inputs must be JSON values."""
    text = json.dumps(inputs, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=NAMESPACE_BYTES).digest()


def folder_digest(folder: Path, cache: Path) -> str:
    """Digest of the weights, configurations and code in a model or adapter folder.

    Whole files are read, since fine-tunes of one model differ anywhere. As that takes a second a
    few GB, a file's digest is kept in ``cache`` until the file changes.

    Raises:
        FileNotFoundError: the folder holds no weights.
    """
    files = [
        file
        for file in sorted(folder.iterdir())
        if file.suffix in (*_WEIGHT_SUFFIXES, *_OTHER_SUFFIXES)
    ]
    if not any(file.suffix in _WEIGHT_SUFFIXES for file in files):
        raise FileNotFoundError(f"no weights in {folder}")
    return json.dumps({file.name: _file_digest(file, cache) for file in files})


def _file_digest(file: Path, cache: Path) -> str:
    begin_ns = time.time_ns()
    status = file.stat()
    # The time of the inode's change cannot be set, as images and archives do with the file's.
    changed_ns = status.st_ctime_ns
    identity = [str(file.resolve()), status.st_dev, status.st_ino, status.st_size, changed_ns]
    kept = cache / hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    if kept.is_file():
        return kept.read_text()
    digest = xxhash.xxh3_128()
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    # What changed just now could change again and bear the same time.
    if changed_ns < begin_ns - _TIMESTAMP_NS:
        _keep(kept, digest.hexdigest())
    return digest.hexdigest()


def _keep(kept: Path, digest: str) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    # Several engines may start at once: each writes a file of its own, the last one wins.
    fresh = kept.with_suffix(f".{os.getpid()}")
    fresh.write_text(digest)
    fresh.replace(kept)
