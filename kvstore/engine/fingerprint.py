"""Namespace of KV blocks: a digest of everything but the tokens that their bytes depend on."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import xxhash

from loomserve.kvstore.wire import NAMESPACE_BYTES
from loomserve.platform.base.files import replace_file

_CHUNK_BYTES = 2**24
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Configurations, and a model's own code.
_OTHER_SUFFIXES = (".json", ".py")
# Resolution of a file's time of change: a few milliseconds, on some filesystems a second.
_TIMESTAMP_NS = 2 * 10**9


def namespace(**inputs: Any) -> bytes:
    """Digest of 16 bytes of JSON values; it differs if any of them does."""
    text = json.dumps(inputs, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=NAMESPACE_BYTES).digest()


def folder_digest(folder: Path, cache: Path) -> str:
    """Digest of the weights, configurations and code in a folder of a model or adapter. It reads
    whole files, since fine-tunes may differ anywhere, a second for a few GB. So it keeps a file's
    digest in ``cache`` until the file changes. ``FileNotFoundError``: there are no weights."""
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
    # Images and archives set the file's time of change; that of its inode cannot be set.
    changed_ns = status.st_ctime_ns
    identity = [str(file.resolve()), status.st_dev, status.st_ino, status.st_size, changed_ns]
    kept = cache / hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    if kept.is_file():
        return kept.read_text()
    digest = xxhash.xxh3_128()
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    # A file that changed just now could change again within the same timestamp.
    if changed_ns < begin_ns - _TIMESTAMP_NS:
        cache.mkdir(parents=True, exist_ok=True)
        replace_file(kept, digest.hexdigest())
    return digest.hexdigest()
