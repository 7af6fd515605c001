"""What is known of a block beside its bytes, and the checksums that tell whether both are whole."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_digest, xxh3_64_intdigest

PAGE = 4096
"""Bytes. Slots and SSD records are whole pages, as O_DIRECT wants them."""

SEAL_BYTES = 8

_CHECKSUM = np.dtype("<u8")


class BlockHeader(NamedTuple):
    """Which block it is: all that a rebuild of the index needs to know of it."""

    namespace: bytes
    """16 bytes."""
    key: bytes
    """16 bytes."""
    parent: bytes
    """The key of the block before it, 16 bytes; zeros for a root."""
    depth: int
    """Blocks before it in its chain, below 2**32."""


HEADER = struct.Struct("<16s16s16sI4x")
"""The fields of a ``BlockHeader``, in 56 bytes."""


def seal(body: bytes, seed: int) -> bytes:
    """``body`` and its checksum, ``SEAL_BYTES`` longer; valid only where ``seed`` is the same."""
    return body + xxh3_64_digest(body, seed)


def unseal(record: bytes, seed: int) -> bytes | None:
    """The body of what ``seal`` made; None where the record is torn, empty or another place's."""
    body = record[:-SEAL_BYTES]
    return body if xxh3_64_digest(body, seed) == record[-SEAL_BYTES:] else None


def seed(namespace: bytes, key: bytes) -> int:
    """The 64-bit seed of a block's checksums: another block's bytes fail under it."""
    return xxh3_64_intdigest(namespace + key)


def layer_digest(piece: NDArray[np.uint8], layer: int, block_seed: int) -> int:
    """The checksum of a layer's bytes of a block."""
    # The layer is part of the seed, so that two layers of one block cannot change places.
    return xxh3_64_intdigest(piece.data, (block_seed + layer) % 2**64)


@dataclass(frozen=True)
class BlockLayout:
    """How a block lies in its slot: ``layers`` pieces of ``layer_bytes`` each, then one checksum
    (xxh3_64, little-endian) a layer, then padding to whole pages.

    A ``view`` is a slot's ``slot_bytes`` bytes, a ``block_seed`` what ``seed`` made of the block's
    namespace and key.
    """

    layers: int
    layer_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of the block alone."""
        return self.layers * self.layer_bytes

    @cached_property
    def slot_bytes(self) -> int:
        return round_up(self.checksum_offset(self.layers), PAGE)

    def piece(self, view: NDArray[np.uint8], layer: int) -> NDArray[np.uint8]:
        """The layer's bytes themselves, ``layer_bytes`` of them."""
        return view[layer * self.layer_bytes : (layer + 1) * self.layer_bytes]

    def pieces(self, view: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The layers' bytes: of ``[..., slot_bytes]``, ``[..., layers, layer_bytes]``."""
        shape = (*view.shape[:-1], self.layers, self.layer_bytes)
        return view[..., : self.block_bytes].reshape(shape)

    def checksum_offset(self, layer: int) -> int:
        return round_up(self.block_bytes, _CHECKSUM.itemsize) + layer * _CHECKSUM.itemsize

    def checksums(self, view: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """The layers' checksums: of ``[..., slot_bytes]``, ``[..., layers]``."""
        begin, end = self.checksum_offset(0), self.checksum_offset(self.layers)
        return view[..., begin:end].view(_CHECKSUM)

    def check_layer(self, view: NDArray[np.uint8], layer: int, block_seed: int) -> bool:
        """Whether the layer's bytes are those that were sealed as this layer of this block."""
        if view.nbytes != self.slot_bytes:
            return False
        digest = layer_digest(self.piece(view, layer), layer, block_seed)
        return bool(self.checksums(view)[layer] == digest)

    def check(self, view: NDArray[np.uint8], block_seed: int) -> bool:
        """``check_layer`` of all layers."""
        return all(self.check_layer(view, layer, block_seed) for layer in range(self.layers))


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
