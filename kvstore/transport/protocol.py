"""What stores of two nodes say to each other.

After the hello (:mod:`hello`) a connection carries frames: a length and a msgpack message. Blocks
follow their frame as they lie in their slots, without frames of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Meta

from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.wire import UNREADABLE, Corrupt, Count, Namespace, Refused, Size

T = TypeVar("T")

MOST_EVENTS_BYTES = 2**26
"""Of announced blocks: the keys of four million blocks."""
FETCH_S = 10.0
"""Seconds that a fetch may take, and that its blocks stay where they are for it."""
MESSAGE_S = 5.0
"""Seconds for an announcement; one that says that nothing happened comes each second."""
LONGEST_WAIT_S = 1.0
"""A holder that says nothing for two seconds counts as gone."""


class PeerAddress(NamedTuple):
    """Where a node's store listens to others."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class FetchRequest(msgspec.Struct, tag=True, frozen=True):
    """Asks for blocks ``[first, len(keys))`` of a chain, in slots of ``slot_bytes`` each.

    A holder waits ``wait_s`` for blocks that are on their way into its memory: from its SSD, or
    from the engine that computes them.
    """

    namespace: Namespace
    keys: bytes
    first: Count
    slot_bytes: Size
    wait_s: Annotated[float, Meta(ge=0, le=LONGEST_WAIT_S)] = 0.0

    @property
    def blocks(self) -> int:
        return len(self.keys) // KEY_BYTES - self.first


class Subscribe(msgspec.Struct, tag=True, frozen=True):
    """Asks for all that a store announces from now on, which ends other requests here. ``epoch``
    and ``seq`` say what was heard last; if it cannot go on there, all contents come."""

    epoch: int = 0
    seq: int = 0


class Sending(msgspec.Struct, tag=True, frozen=True):
    """Answer to :class:`FetchRequest`: so many blocks follow, those in memory of what was asked."""

    blocks: int


PeerRequest = FetchRequest | Subscribe | Corrupt
PeerAnswer = Sending | Refused


class PeerGoneError(Exception):
    """A peer does not answer, answers nonsense, or does not know the run's token."""


class PeerSilentError(PeerGoneError):
    """A peer says nothing for so long that it counts as gone."""


class PeerRefusedError(Exception):
    """A peer answered that it does not carry out the request."""


class BlockSource(Protocol):
    """A store, as one connection to its peers sees it. Calls come from that connection's thread."""

    def hold(
        self, request: FetchRequest
    ) -> AbstractContextManager[tuple[int, Sequence[memoryview]]]:
        """Keep the requested blocks that are in memory, for ``FETCH_S`` seconds at most. Gives
        their number, and views of their bytes in order, each of one slot or of several. Raises
        PeerRefusedError if the namespace's blocks have another size, or the store is away."""

    def spoiled(self, namespace: bytes, keys: bytes) -> None:
        """Check the last block of a chain, and forget it if it is not whole."""

    def close(self) -> None:
        """End; no other call follows."""


OpenSource = Callable[[], BlockSource]
EventFeed = Callable[[int, int, float], tuple[list[bytes], int, int]]
"""Gives encoded messages that follow those heard: by epoch and number, and within so many seconds.
With them come the epoch and the number of the last."""
Arrived = Callable[[int], bool]
"""Gets how many blocks have come so far, soon after their bytes; False: no more are wanted."""


def decoded(decoder: msgspec.msgpack.Decoder[T], frame: bytes, what: str) -> T:
    """A frame as a message; ``PeerGoneError`` if it is not ``what`` the decoder decodes."""
    try:
        return decoder.decode(frame)
    except UNREADABLE as error:
        raise PeerGoneError(f"not {what}: {error}") from error
