"""Namespaces of a store: the model that a namespace belongs to, and the layout of its blocks."""

from __future__ import annotations

import logging
from collections.abc import ItemsView
from pathlib import Path

import msgspec

from loomserve.kvstore.index.index import Index
from loomserve.kvstore.storage.checksum import Space, seal, unseal
from loomserve.platform.base.files import replace_file

_logger = logging.getLogger(__name__)

# Each model has one a rank and version of what it is computed with.
_MOST_SPACES = 1024
# An extent has its slots' headers too.
_HEADERS_BYTES = 4096


class Spaces:
    """Namespaces that the store knows; they are in the index too, and in a file.

    Block headers name only the namespace, so a successor reads the file: JSON, then a checksum,
    since one wrong digit there would have a model's blocks refused for good.
    """

    def __init__(self, file: Path, index: Index, extent_bytes: int) -> None:
        self._file = file
        self._index = index
        self._extent_bytes = extent_bytes
        self._spaces: dict[bytes, Space] = {}

    def __contains__(self, namespace: bytes) -> bool:
        return namespace in self._spaces

    def __getitem__(self, namespace: bytes) -> Space:
        return self._spaces[namespace]

    def items(self) -> ItemsView[bytes, Space]:
        return self._spaces.items()

    def slot_bytes(self, namespace: bytes) -> int:
        return self._spaces[namespace].layout.slot_bytes

    def of_model(self, model: str) -> set[bytes]:
        return {name for name, space in self._spaces.items() if space.model == model}

    def of_slot_bytes(self, slot_bytes: int) -> set[bytes]:
        return {name for name in self._spaces if self.slot_bytes(name) == slot_bytes}

    def declare(self, namespace: bytes, space: Space) -> str | None:
        """Add a namespace, if it is new, and save the file; returns why it cannot be used."""
        known = len(self._spaces)
        problem = self._add(namespace, space)
        if len(self._spaces) > known:
            self._save()
        return problem

    def load(self) -> None:
        """Add the namespaces of the file; without it, the blocks count as never saved."""
        try:
            text = unseal(self._file.read_bytes(), 0)
            spaces = msgspec.json.decode(text or b"{}", type=dict[str, Space])
        except (OSError, msgspec.DecodeError):
            return
        for name, space in spaces.items():
            self._add(bytes.fromhex(name), space)

    def _add(self, namespace: bytes, space: Space) -> str | None:
        known = self._spaces.get(namespace)
        if known is not None and known.layout != space.layout:
            return f"namespace {namespace.hex()} is known with blocks of another shape"
        if space.layout.slot_bytes + _HEADERS_BYTES > self._extent_bytes:
            return (
                f"a KV block of model {space.model!r} has {space.layout.block_bytes} bytes, more "
                f"than the {self._extent_bytes} of an extent: give the store more memory"
            )
        if known is None and len(self._spaces) >= _MOST_SPACES:
            return (
                f"{_MOST_SPACES} kinds of blocks are known, and there may be no more: stop the "
                f"store and remove {self._file}, with which it forgets its blocks"
            )
        if known is None:
            self._index.add_namespace(namespace, space.layout.block_bytes)
            self._spaces[namespace] = space
        return None

    def _save(self) -> None:
        text = msgspec.json.encode({name.hex(): space for name, space in self._spaces.items()})
        try:
            replace_file(self._file, seal(text, 0))
        except OSError as error:
            _logger.warning("KV blocks will not survive a crash of their store: %s", error)
