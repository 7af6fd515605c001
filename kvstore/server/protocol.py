"""What engines say to the store of their node, and what it answers: msgpack over a ZMQ socket.

``keys`` is always the whole chain of a sequence from its first block, 16 bytes a block, so that
one request is one message however long its prompt is. ``slots`` are little-endian int64 arrays.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

PROMPT_CHAIN = "loomserve_prompt_chain"
"""In a request's ``kv_transfer_params``: true, to be told the chain of its prompt's full blocks.
In the answer's: that chain, as ``keys`` and, by rank, ``namespaces``, in hexadecimal."""
HANDS_OVER = "loomserve_hands_over"
"""In a request's ``kv_transfer_params``: another engine goes on after its prompt."""
HANDED_OVER = "loomserve_handed_over"
"""In that engine's: so many of its tokens have just been computed for it."""
NAMESPACE_BYTES = 16
WRITE_S = 60.0
"""A writer that takes longer has died, and its slots go to others."""
_LONGEST_LEASE_S = 3600

Namespace = Annotated[bytes, Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)]
Count = Annotated[int, Meta(ge=0, lt=2**32)]
Size = Annotated[int, Meta(ge=1, lt=2**40)]
LeaseSeconds = Annotated[float, Meta(gt=0, le=_LONGEST_LEASE_S)]


class Lookup(msgspec.Struct, tag=True, frozen=True):
    """How much of this chain is there? Blocks ``[skip, in_memory)`` get leased.

    ``promote`` asks for blocks that are on SSD only to be brought into memory. Without ``use`` the
    lookup says nothing about how likely the blocks are to be wanted again.
    """

    namespace: Namespace
    keys: bytes
    skip: Count
    lease_s: LeaseSeconds
    promote: bool
    use: bool = True


class Found(msgspec.Struct, tag=True, frozen=True):
    """``in_memory`` and ``resident`` (SSD included) are lengths in blocks from the chain's start.

    ``lease`` is 0 where there is nothing to load; ``ready_s`` estimates when what is only on SSD
    will be in memory, 0 where nothing is on its way.
    """

    in_memory: int
    resident: int
    lease: int
    slots: bytes
    ready_s: float


class Reserve(msgspec.Struct, tag=True, frozen=True):
    """Room for those of the chain's blocks that are not in memory and nobody is writing.

    It also says what the namespace's blocks are: ``layers`` pieces of ``layer_bytes`` each, of a
    model that figures and quotas know as ``model``.
    """

    namespace: Namespace
    keys: bytes
    model: str
    layers: Size
    layer_bytes: Size


class Reserved(msgspec.Struct, tag=True, frozen=True):
    """Slots for blocks ``[first, first + len(slots))``; fewer than asked where there is no room."""

    first: int
    slots: bytes
    writer: int


class Commit(msgspec.Struct, tag=True, frozen=True):
    """The reserved blocks are written and sealed.

    ``recompute_s`` predicts what computing one of them again would take. For ``keep_s`` they stay
    in memory whatever they are worth, since a reader is on its way.
    """

    writer: int
    recompute_s: float
    keep_s: Annotated[float, Meta(ge=0, le=_LONGEST_LEASE_S)] = 0.0


class Abandon(msgspec.Struct, tag=True, frozen=True):
    """The reserved blocks will not be written."""

    writer: int


class Release(msgspec.Struct, tag=True, frozen=True):
    """The leases' blocks have been read, or will not be."""

    leases: list[int]


class Corrupt(msgspec.Struct, tag=True, frozen=True):
    """The last block of this chain failed its checksum; the store looks for itself."""

    namespace: Namespace
    keys: bytes


class Pin(msgspec.Struct, tag=True, frozen=True):
    """Keep what of this chain's prefix is in memory now, until the same chain is unpinned.

    The answer says how many blocks of it are in memory.
    """

    namespace: Namespace
    keys: bytes
    pinned: bool


class Flush(msgspec.Struct, tag=True, frozen=True):
    """Forget every unleased, unpinned block of a model, or of all models (empty name)."""

    model: str


class Inspect(msgspec.Struct, tag=True, frozen=True):
    """Tell what the store holds."""


class Done(msgspec.Struct, tag=True, frozen=True):
    """Carried out; ``blocks`` were concerned."""

    blocks: int = 0


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Not carried out, and why."""

    message: str


class ModelUsage(msgspec.Struct, frozen=True):
    """What a model holds in the store, and how it was used since the store started."""

    model: str
    blocks_in_memory: int
    blocks_on_ssd: int
    bytes_in_memory: int
    bytes_on_ssd: int
    hit_blocks: int
    missed_blocks: int
    evicted_blocks: int


class StoreUsage(msgspec.Struct, tag=True, frozen=True):
    """What the store holds; bytes, seconds."""

    capacity_bytes: int
    used_bytes: int
    ssd_capacity_bytes: int
    ssd_used_bytes: int
    leases: int
    writers: int
    corrupt_blocks: int
    models: list[ModelUsage]


Request = Lookup | Reserve | Commit | Abandon | Release | Corrupt | Pin | Flush | Inspect
Reply = Found | Reserved | Done | Refused | StoreUsage
