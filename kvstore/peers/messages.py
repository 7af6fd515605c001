"""Members of the network of stores, and what they announce."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from loomserve.kvstore.index.journal import Change
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.storage.checksum import Space
from loomserve.kvstore.transport.protocol import PeerAddress
from loomserve.kvstore.wire import NAMESPACE_BYTES


class Member(NamedTuple):
    """A node's store: where it listens, and since which start."""

    node: str
    address: PeerAddress
    epoch: int


class Announcement(msgspec.Struct, frozen=True):
    """Changes of a node's blocks. ``seq`` counts the messages of an ``epoch``, one start of it.

    ``spaces`` are new namespaces. If it is ``whole``, these are all blocks of the node and all
    namespaces, as of its message ``seq``.
    """

    node: str
    epoch: int
    seq: int
    changes: list[Change]
    spaces: dict[bytes, Space] = {}
    whole: bool = False


def well_formed(message: Announcement) -> bool:
    """Whether all namespaces and keys have their lengths."""
    return all(
        len(change.namespace) == NAMESPACE_BYTES and not len(change.keys) % KEY_BYTES
        for change in message.changes
    ) and all(
        len(namespace) == NAMESPACE_BYTES
        and space.layout.layers > 0
        and space.layout.layer_bytes > 0
        for namespace, space in message.spaces.items()
    )
