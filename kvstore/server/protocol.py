"""Protocol between engines and the store of their node: msgpack over a ZMQ socket.

``keys`` is the whole chain of a sequence from its first block, 16 bytes a block, so that a request
is one message however long its prompt is. ``slots`` is an array of little-endian int64.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from loomserve.kvstore.wire import Corrupt, Count, Namespace, Refused, Size
from loomserve.platform.state.kvstore import KvState

PROMPT_CHAIN = "loomserve_prompt_chain"
"""In a request's ``kv_transfer_params``: true, to get the chain of its prompt's full blocks.
In the answer's: that chain, as ``keys`` and, by rank, ``namespaces``, in hexadecimal."""
HANDS_OVER = "loomserve_hands_over"
"""In a request's ``kv_transfer_params``: another engine goes on after its prompt."""
HANDED_OVER = "loomserve_handed_over"
"""In that engine's: so many of its tokens have just been computed for it."""
HANDED_OVER_BY = "loomserve_handed_over_by"
"""In the answer's, and then in that engine's: the node whose store has them."""
WRITE_S = 60.0
"""Seconds after which a writer counts as dead, and its slots are given to others."""
_LONGEST_LEASE_S = 3600
MOST_TOGETHER = 64
"""Requests in a message: others wait until all are answered."""

# Linux has no higher one.
Pid = Annotated[int, Meta(ge=0, le=2**22)]
ModelName = Annotated[str, Meta(max_length=512)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
NodeName = Annotated[str, Meta(max_length=256)]
LeaseSeconds = Annotated[float, Meta(gt=0, le=_LONGEST_LEASE_S)]


class Lookup(msgspec.Struct, tag=True, frozen=True):
    """Asks how much of a chain is in the store, and leases blocks ``[skip, in_memory)`` of it.

    ``promote`` asks to bring blocks into memory that are only on SSD. ``use=False`` keeps the
    lookup out of the statistics by which blocks are evicted.

    ``block_s`` are the seconds that the engine computes a block for: blocks that other nodes have
    are fetched where that is quicker; 0: none is. ``holder`` names the node that has the whole
    chain, if an engine there hands it over.

    ``pid`` is the process on this machine with which the lease ends, if it ends first; 0: none.
    """

    namespace: Namespace
    keys: bytes
    skip: Count
    lease_s: LeaseSeconds
    promote: bool
    use: bool = True
    block_s: Seconds = 0.0
    holder: NodeName = ""
    pid: Pid = 0


class Found(msgspec.Struct, tag=True, frozen=True):
    """Answer to :class:`Lookup`. ``in_memory`` and ``resident`` (SSD included) are prefix lengths.

    Both are in blocks. ``lease`` is 0 if there is nothing to load. ``remote`` blocks that follow
    the resident ones are on their way from another node. ``ready_s`` estimates the seconds until
    blocks that are on their way, from there or from SSD, will be in memory; 0: none is.
    """

    in_memory: int
    resident: int
    lease: int
    slots: bytes
    ready_s: float
    remote: int = 0


class Reserve(msgspec.Struct, tag=True, frozen=True):
    """Asks for slots for the chain's blocks that are not in memory and that no engine is writing.

    It also declares the layout of the namespace's blocks, ``layers`` pieces of ``layer_bytes``
    each, and the name of the model for figures and quotas. ``pid`` is the process on this machine
    with which the write ends, if it ends first; 0: none.
    """

    namespace: Namespace
    keys: bytes
    model: ModelName
    layers: Size
    layer_bytes: Size
    pid: Pid = 0


class Reserved(msgspec.Struct, tag=True, frozen=True):
    """Slots for blocks ``[first, first + len(slots))``: fewer than asked if there is no room. Their
    headers will have the ``generation``, by which the writer knows its own blocks again."""

    first: int
    slots: bytes
    writer: int
    generation: int = 0


class Commit(msgspec.Struct, tag=True, frozen=True):
    """Reports that the reserved blocks are written and sealed.

    ``recompute_s`` predicts the seconds to compute one of them again. They stay in memory for
    ``keep_s`` whatever their value, since a reader is on its way. ``outdated`` is the key of the
    block that was in the place of the first of them when it held fewer tokens; nobody asks for it
    any more.
    """

    writer: int
    recompute_s: Seconds
    keep_s: Annotated[float, Meta(ge=0, le=_LONGEST_LEASE_S)] = 0.0
    outdated: Annotated[bytes, Meta(max_length=16)] = b""


class Outdated(msgspec.Struct, tag=True, frozen=True):
    """Forgets the last block of a chain, which is not full and for which nobody asks any more."""

    namespace: Namespace
    keys: bytes


class Abandon(msgspec.Struct, tag=True, frozen=True):
    writer: int


class Release(msgspec.Struct, tag=True, frozen=True):
    """Ends leases, whose blocks have been read or will not be."""

    leases: list[int]


class Pin(msgspec.Struct, tag=True, frozen=True):
    """Keep the part of this chain that is in memory now, until the same chain is unpinned. The
    answer says how many blocks of it are in memory."""

    namespace: Namespace
    keys: bytes
    pinned: bool


class Flush(msgspec.Struct, tag=True, frozen=True):
    """Forgets all blocks of a model, or of all models (empty name), but leased or pinned ones."""

    model: ModelName


class Hottest(msgspec.Struct, tag=True, frozen=True):
    """Asks for the chains in memory that were used last, of so many bytes together."""

    most_bytes: Count


class HotChain(msgspec.Struct, frozen=True):
    namespace: Namespace
    keys: bytes
    block_bytes: int


class HotChains(msgspec.Struct, tag=True, frozen=True):
    """Answer to :class:`Hottest`, the chain that was used last first."""

    chains: list[HotChain]


class Inspect(msgspec.Struct, tag=True, frozen=True):
    """Asks what the store holds."""


class Done(msgspec.Struct, tag=True, frozen=True):
    """The request was carried out, on ``blocks`` blocks."""

    blocks: int = 0


class StoreUsage(msgspec.Struct, tag=True, frozen=True):
    state: KvState


One = (
    Lookup
    | Reserve
    | Commit
    | Abandon
    | Outdated
    | Release
    | Corrupt
    | Pin
    | Flush
    | Hottest
    | Inspect
)
OneReply = Found | Reserved | HotChains | Done | Refused | StoreUsage


class Several(msgspec.Struct, tag=True, frozen=True):
    """Requests that are carried out one after the other."""

    requests: Annotated[list[One], Meta(max_length=MOST_TOGETHER)]


class Replies(msgspec.Struct, tag=True, frozen=True):
    """Answer to :class:`Several`: one to each request."""

    replies: list[OneReply]


Request = One | Several
Reply = OneReply | Replies

_SLOT = np.dtype("<i8")


def encode_slots(slots: Sequence[int] | array[int]) -> bytes:
    return np.asarray(slots, _SLOT).tobytes()


def decode_slots(data: bytes) -> list[int]:
    slots: list[int] = np.frombuffer(data, _SLOT).tolist()
    return slots


def encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=KvState.model_dump)


def reply_decoder() -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(Reply, dec_hook=lambda _, state: KvState.model_validate(state))
