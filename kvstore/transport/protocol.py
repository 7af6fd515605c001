"""What stores of two nodes say to each other, and the calls that any way of saying it has.

After the hello (:mod:`hello`) a connection carries frames: a length and a msgpack message. Blocks
follow their frame as they lie in their slots, without frames of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from loomserve.kvstore.index.radix import KEY_BYTES

MOST_FRAME_BYTES = 2**22
"""Of a request and its answer: the keys of a context of four million tokens."""
MOST_EVENTS_BYTES = 2**26
"""Of announced blocks: the keys of four million blocks."""
FETCH_S = 10.0
"""Seconds that a fetch may take, and that its blocks stay where they are for it."""
LONGEST_WAIT_S = 1.0
"""A holder that says nothing for two seconds counts as gone."""

_Namespace = Annotated[bytes, Meta(min_length=16, max_length=16)]


class PeerAddress(NamedTuple):
    """Where a node's store listens to others."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> PeerAddress:
        """The address that ``str`` writes; ``ValueError`` if it is none."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"{text!r} is not an address of the form host:port")
        return cls(host, int(port))


class FetchRequest(msgspec.Struct, tag=True, frozen=True):
    """Asks for blocks ``[first, len(keys))`` of a chain, in slots of ``slot_bytes`` each.

    A holder waits ``wait_s`` for blocks that are on their way into its memory: from its SSD, or
    from the engine that computes them.
    """

    namespace: _Namespace
    keys: bytes
    first: Annotated[int, Meta(ge=0, lt=2**32)]
    slot_bytes: Annotated[int, Meta(ge=1, lt=2**40)]
    wait_s: Annotated[float, Meta(ge=0, le=LONGEST_WAIT_S)] = 0.0

    @property
    def blocks(self) -> int:
        return len(self.keys) // KEY_BYTES - self.first


class Subscribe(msgspec.Struct, tag=True, frozen=True):
    """Asks for all that a store announces from now on, which ends other requests here.

    ``epoch`` and ``seq`` say what was heard last; if it cannot go on there, all contents come.
    """

    epoch: int = 0
    seq: int = 0


class Spoiled(msgspec.Struct, tag=True, frozen=True):
    """Tells a holder that the last block of a chain failed its checksum; it looks for itself."""

    namespace: _Namespace
    keys: bytes


class Sending(msgspec.Struct, tag=True, frozen=True):
    """Answer to :class:`FetchRequest`: so many blocks follow, those in memory of what was asked."""

    blocks: int


class Declined(msgspec.Struct, tag=True, frozen=True):
    """The request is not carried out, and why."""

    message: str


PeerRequest = FetchRequest | Subscribe | Spoiled
PeerAnswer = Sending | Declined


class PeerGoneError(Exception):
    """A peer does not answer, answers nonsense, or does not know the run's token."""


class PeerSilentError(PeerGoneError):
    """A peer says nothing for so long that it counts as gone."""


class PeerRefusedError(Exception):
    """A peer answered that it does not carry out the request."""


class HeldBlocks(NamedTuple):
    """Sealed blocks that keep their slots until they are released.

    The ``views`` are of their bytes one after the other, each of one slot or of several.
    """

    lease: int
    blocks: int
    views: Sequence[memoryview]


class BlockSource(Protocol):
    """A store, as one connection to its peers sees it. Calls come from that connection's thread."""

    def hold(self, request: FetchRequest) -> HeldBlocks:
        """Keep what of the request is in memory, for ``FETCH_S`` seconds at most.

        Raises:
            PeerRefusedError: the namespace's blocks have another size; or the store is away.
        """

    def release(self, held: HeldBlocks) -> None:
        """Let go of what was held."""

    def spoiled(self, namespace: bytes, keys: bytes) -> None:
        """Check the last block of a chain, and forget it if it is not whole."""

    def close(self) -> None:
        """End; no other call follows."""


class EventFeed(Protocol):
    """What a store announces, as one connection to a peer sees it."""

    def frames_after(self, epoch: int, seq: int, wait_s: float) -> tuple[list[bytes], int, int]:
        """Encoded messages that follow those heard, with the epoch and number of the last.

        None come if nothing happened within ``wait_s`` seconds.
        """


Arrived = Callable[[int], bool]
"""Is told how many blocks have come so far, soon after their bytes; False: no more are wanted."""


class OpenSource(Protocol):
    def __call__(self) -> BlockSource: ...


class EventStream(Protocol):
    """Announcements of one peer, as they come."""

    def next(self) -> bytes:
        """The next message.

        Raises:
            PeerGoneError: it ended, or nothing came for too long.
        """

    def shut(self) -> None:
        """End it, also while another thread waits for a message."""

    def close(self) -> None:
        """End it; no other call follows."""


class Transport(Protocol):
    """Calls by which blocks, and news of them, pass between nodes. For any number of threads.

    Another library would serve and fetch in its own way, and ask by the same requests.
    """

    def serve(self, host: str, open_source: OpenSource, feed: EventFeed) -> PeerAddress:
        """Let peers fetch what the sources hold and hear what the feed says.

        Raises:
            StartError: this node has no such address.
        """

    def fetch(
        self,
        peer: PeerAddress,
        request: FetchRequest,
        into: Sequence[memoryview],
        arrived: Arrived,
    ) -> int:
        """Fetch blocks into the views, which have room for all that are asked for.

        Returns:
            How many came, from the first on.

        Raises:
            PeerGoneError: it could not be reached, or was lost before all it had promised came.
            PeerRefusedError: it refused.
        """

    def spoiled(self, peer: PeerAddress, report: Spoiled) -> None:
        """Tell a holder of a block that was not whole; what goes wrong is passed over."""

    def follow(self, peer: PeerAddress, subscribe: Subscribe) -> EventStream:
        """Hear what a peer announces.

        Raises:
            PeerGoneError: it could not be reached.
        """

    def forget(self, peer: PeerAddress) -> None:
        """End the connections that are kept to a peer which is no longer one."""

    def close(self) -> None:
        """End all connections. Calls under way raise :class:`PeerGoneError`."""
