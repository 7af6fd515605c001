"""What a store announces of its blocks to those of other nodes: msgpack messages."""

from __future__ import annotations

import msgspec

from loomserve.kvstore.index.journal import Change
from loomserve.kvstore.index.radix import KEY_BYTES

NAMESPACE_BYTES = 16


class AnnouncedSpace(msgspec.Struct, frozen=True, array_like=True):
    """A namespace, its model, and the layout of its blocks."""

    namespace: bytes
    model: str
    layers: int
    layer_bytes: int


class Announcement(msgspec.Struct, tag=True, frozen=True):
    """Changes of a node's blocks. ``seq`` counts the messages of an ``epoch``, one start of it."""

    node: str
    epoch: int
    seq: int
    changes: list[Change]
    spaces: list[AnnouncedSpace] = []
    """New ones."""


class Contents(msgspec.Struct, tag=True, frozen=True):
    """All blocks of a node, and all namespaces, as of its message ``seq``."""

    node: str
    epoch: int
    seq: int
    changes: list[Change]
    spaces: list[AnnouncedSpace] = []


Message = Announcement | Contents


def well_formed(message: Message) -> bool:
    """Whether all namespaces and keys have their lengths."""
    return all(
        len(change.namespace) == NAMESPACE_BYTES and not len(change.keys) % KEY_BYTES
        for change in message.changes
    ) and all(
        len(space.namespace) == NAMESPACE_BYTES and space.layers > 0 and space.layer_bytes > 0
        for space in message.spaces
    )
