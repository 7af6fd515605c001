"""Rebuilds chains of blocks from their headers, after a crash."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from loomserve.kvstore.index.radix import KEY_BYTES, key_at
from loomserve.kvstore.storage.checksum import BlockHeader

_NO_PARENT = bytes(KEY_BYTES)

BlockId = tuple[bytes, bytes]
"""Namespace and key of a block."""


class ChainRun(NamedTuple):
    """Blocks ``[first, first + len(places))`` of the chain ``keys``, at slots or locations."""

    namespace: bytes
    keys: bytes
    first: int
    places: list[int]


def header_at(namespace: bytes, keys: bytes, position: int) -> BlockHeader:
    parent = key_at(keys, position - 1) if position else _NO_PARENT
    return BlockHeader(namespace, key_at(keys, position), parent, position)


def chain_runs(
    places: Mapping[BlockHeader, int], known: Iterable[BlockHeader]
) -> Iterator[ChainRun]:
    """Runs of all blocks of ``places`` whose ancestors are all in ``known``, ancestors first.
    ``known`` includes the headers of ``places``. A header whose depth is not its parent's plus one
    counts as an orphan: no crash leaves one behind, but a foreign file might."""
    children: dict[BlockId, list[BlockHeader]] = defaultdict(list)
    roots: list[BlockHeader] = []
    for header in set(known):
        if header.parent == _NO_PARENT and header.depth == 0:
            roots.append(header)
        elif header.parent != _NO_PARENT:
            children[header.namespace, header.parent].append(header)
    stack = [(root, b"") for root in roots]
    while stack:
        header, above = stack.pop()
        run = ChainRun(header.namespace, above, header.depth, [])
        keys = [above]
        while True:
            keys.append(header.key)
            place = places.get(header)
            if place is not None:
                run.places.append(place)
            elif run.places:
                yield run._replace(keys=b"".join(keys[:-1]))
            if place is None:
                run = run._replace(first=header.depth + 1, places=[])
            below = [
                child
                for child in children[header.namespace, header.key]
                if child.depth == header.depth + 1
            ]
            if len(below) != 1:
                break
            (header,) = below
        chain = b"".join(keys)
        if run.places:
            yield run._replace(keys=chain)
        stack.extend((child, chain) for child in below)
