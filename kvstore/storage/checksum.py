"""Header and checksums of a block, which tell whether the block and its header are whole."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_digest, xxh3_64_intdigest

PAGE = 4096
"""Bytes. Slots and SSD records are whole pages, because O_DIRECT needs it."""

SEAL_BYTES = 8

_CHECKSUM = np.dtype("<u8")


class BlockHeader(NamedTuple):
    """Identity of a block and its place in its chain: enough to rebuild the index."""

    namespace: bytes
    """16 bytes."""
    key: bytes
    """16 bytes."""
    parent: bytes
    """Key of the block before it, 16 bytes; zeros for the first block of a chain."""
    depth: int
    """Blocks before it in its chain, below 2**32."""

    def packed(self, generation: int = 0) -> bytes:
        """Encode it in ``HEADER_BYTES``, with a number of 32 bits of who wrote the block when."""
        return _HEADER.pack(*self, generation)

    @classmethod
    def unpacked(cls, body: bytes) -> Self:
        return cls(*_HEADER.unpack(body)[:-1])


_HEADER = struct.Struct("<16s16s16sII")
HEADER_BYTES = _HEADER.size


def is_trusted(header: bytes) -> bool:
    """Whether what was checked under this header, sealed or not, stays as it is."""
    return any(header[HEADER_BYTES - 4 : HEADER_BYTES])


def seal(body: bytes, seed: int) -> bytes:
    """Append a checksum of ``SEAL_BYTES`` to ``body``; it is valid only under the same ``seed``."""
    return body + xxh3_64_digest(body, seed)


def unseal(record: bytes, seed: int) -> bytes | None:
    """Return the body of a sealed record; None if it is torn, empty or sealed for another place."""
    body = record[:-SEAL_BYTES]
    return body if xxh3_64_digest(body, seed) == record[-SEAL_BYTES:] else None


def seed(namespace: bytes, key: bytes) -> int:
    """Seed of a block's checksums, 64 bits: another block's bytes fail under it."""
    return xxh3_64_intdigest(namespace + key)


def layer_digest(piece: memoryview, layer: int, block_seed: int) -> int:
    # The layer is part of the seed, so that two layers of one block cannot change places.
    return xxh3_64_intdigest(piece, (block_seed + layer) % 2**64)


@dataclass(frozen=True)
class BlockLayout:
    """Layout of a block in its slot: ``layers`` pieces of ``layer_bytes`` each, then one checksum
    (xxh3_64, little-endian) a layer, then padding to whole pages.

    In its methods, ``view`` is the ``slot_bytes`` bytes of a slot, and ``block_seed`` is the
    :func:`seed` of the block.
    """

    layers: int
    layer_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_bytes

    @cached_property
    def slot_bytes(self) -> int:
        return round_up(self.checksum_offset(self.layers), PAGE)

    def pieces(self, view: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """View of all layers' bytes: ``[..., slot_bytes]`` to ``[..., layers, layer_bytes]``."""
        shape = (*view.shape[:-1], self.layers, self.layer_bytes)
        return view[..., : self.block_bytes].reshape(shape)

    def checksum_offset(self, layer: int) -> int:
        return round_up(self.block_bytes, _CHECKSUM.itemsize) + layer * _CHECKSUM.itemsize

    def checksums(self, view: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """View of all layers' checksums: ``[..., slot_bytes]`` to ``[..., layers]``."""
        begin, end = self.checksum_offset(0), self.checksum_offset(self.layers)
        return view[..., begin:end].view(_CHECKSUM)

    def check(self, view: NDArray[np.uint8], block_seed: int) -> bool:
        if view.nbytes != self.slot_bytes:
            return False
        data, size = view.data, self.layer_bytes
        return all(
            layer_digest(data[layer * size : (layer + 1) * size], layer, block_seed) == checksum
            for layer, checksum in enumerate(self.checksums(view).tolist())
        )


@dataclass(frozen=True)
class Space:
    """Model of a namespace and layout of its blocks."""

    model: str
    layout: BlockLayout


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
