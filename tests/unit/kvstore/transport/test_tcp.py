"""Blocks pass between two transports over real sockets, and every wait ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field

import pytest

from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.transport import channel, tcp
from loomserve.kvstore.transport.protocol import (
    MESSAGE_S,
    MOST_EVENTS_BYTES,
    FetchRequest,
    PeerAddress,
    PeerGoneError,
    PeerRefusedError,
    Subscribe,
)
from loomserve.kvstore.transport.tcp import TcpTransport
from loomserve.kvstore.wire import Corrupt
from loomserve.platform.base.errors import StartError
from tests.waiting import PATIENCE_S

TOKEN = "a token of this run"
SPACE = b"n" * 16
SLOT = 8192
Held = tuple[int, list[memoryview]]


@dataclass
class Blocks:
    """A source of as many blocks as there are contents, of bytes that tell them apart."""

    count: int = 64
    held: int = 0
    closed: int = 0
    bad: list[bytes] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self) -> Blocks:
        return self

    @contextmanager
    def hold(self, request: FetchRequest) -> Iterator[Held]:
        if request.slot_bytes != SLOT:
            raise PeerRefusedError("another size")
        with self.lock:
            self.held += 1
        last = min(request.first + request.blocks, self.count)
        views = [memoryview(block(at)) for at in range(request.first, last)]
        yield len(views), views
        with self.lock:
            self.held -= 1

    def spoiled(self, namespace: bytes, keys: bytes) -> None:
        self.bad.append(keys)

    def close(self) -> None:
        self.closed += 1

    def frames_after(self, epoch: int, seq: int, wait_s: float) -> tuple[list[bytes], int, int]:
        if seq >= 3:
            time.sleep(wait_s)
            return [], epoch, seq
        return [f"{epoch} {seq + 1}".encode()], epoch, seq + 1


def block(at: int) -> bytes:
    return bytes([at]) * SLOT


def wanted(blocks: int, first: int = 0) -> FetchRequest:
    return FetchRequest(SPACE, bytes(blocks * KEY_BYTES), first, SLOT)


@contextmanager
def served(source: Blocks, token: str = TOKEN) -> Iterator[PeerAddress]:
    with closing(TcpTransport(token)) as transport:
        yield transport.serve("127.0.0.1", source, source.frames_after)


def fetched(
    transport: TcpTransport, peer: PeerAddress, request: FetchRequest, views: int = 1
) -> bytes:
    into = bytearray(request.blocks * SLOT)
    size = len(into) // views
    told: list[int] = []
    blocks = transport.fetch(
        peer,
        request,
        [memoryview(into)[at : at + size] for at in range(0, len(into), size)],
        lambda came: told.append(came) is None,
    )
    assert told == sorted(set(told))
    assert (told or [0])[-1] == blocks
    return bytes(into[: blocks * SLOT])


@pytest.mark.parametrize(("first", "blocks", "views"), [(0, 1, 1), (3, 64, 1), (0, 60, 60)])
def test_blocks_come_in_order_into_any_views(first: int, blocks: int, views: int) -> None:
    source = Blocks()
    with served(source) as peer, closing(TcpTransport(TOKEN)) as transport:
        got = fetched(transport, peer, wanted(blocks, first), views)
        assert got == b"".join(block(at) for at in range(first, blocks))
    # Its connections' threads have ended.
    assert (source.held, source.closed) == (0, 1)


def test_fewer_come_than_were_asked_for_and_the_connection_is_used_on() -> None:
    source = Blocks(count=5)
    with served(source) as peer, closing(TcpTransport(TOKEN)) as transport:
        for _ in range(3):
            assert fetched(transport, peer, wanted(10)) == b"".join(map(block, range(5)))
        assert fetched(transport, peer, wanted(10, 8)) == b""
        with pytest.raises(PeerRefusedError, match="another size"):
            transport.fetch(peer, FetchRequest(SPACE, bytes(16), 0, 4096), [], lambda came: True)
        assert fetched(transport, peer, wanted(2)) == block(0) + block(1)
        assert len(transport._open) == 1


def test_who_wants_no_more_is_sent_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "_WINDOW_BYTES", 2 * SLOT)
    source = Blocks()
    with served(source) as peer, closing(TcpTransport(TOKEN)) as transport:
        into = memoryview(bytearray(64 * SLOT))
        told: list[int] = []

        def arrived(came: int) -> bool:
            told.append(came)
            return came < 5

        assert transport.fetch(peer, wanted(64), [into], arrived) == 6
        assert told == [2, 4, 6]
        assert into[: 6 * SLOT] == b"".join(map(block, range(6)))
        assert not any(into[6 * SLOT :])
        assert not transport._open, "the others would come on this connection"


def test_many_threads_fetch_side_by_side() -> None:
    source = Blocks()
    with served(source) as peer, closing(TcpTransport(TOKEN)) as transport:
        wrong: list[int] = []

        def fetch() -> None:
            wrong.extend(
                at
                for at in range(30)
                if fetched(transport, peer, wanted(at + 2, at)) != block(at) + block(at + 1)
            )

        threads = [threading.Thread(target=fetch) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len(transport._open) <= 2
    assert source.held == 0


def test_a_connection_that_ended_meanwhile_is_made_anew() -> None:
    source = Blocks()
    with closing(TcpTransport(TOKEN)) as transport:
        with served(source) as peer:
            fetched(transport, peer, wanted(1))
        with pytest.raises(PeerGoneError, match="cannot be reached"):
            fetched(transport, peer, wanted(1))
        with closing(TcpTransport(TOKEN)) as again:
            other = again.serve("127.0.0.1", source, source.frames_after)
            assert fetched(transport, other, wanted(1)) == block(0)


def test_announcements_come_and_go_on_from_what_was_heard() -> None:
    source = Blocks()
    with served(source) as peer, closing(TcpTransport(TOKEN)) as transport:
        stream = transport.follow(peer, Subscribe(9, 1))

        def heard() -> bytes:
            return stream.receive_frame(MOST_EVENTS_BYTES, time.monotonic() + MESSAGE_S)

        assert [heard(), heard()] == [b"9 2", b"9 3"]
        assert heard() == b"", "it says each second that it lives"
        waiting = threading.Timer(0.2, stream.shut)
        waiting.start()
        with pytest.raises(PeerGoneError):
            list(iter(heard, b"no such message"))
        stream.close()


def test_a_holder_hears_of_a_bad_block() -> None:
    source = Blocks()
    with served(source) as peer, closing(TcpTransport(TOKEN)) as transport:
        transport.spoiled(peer, Corrupt(SPACE, b"k" * 32))
        until = time.monotonic() + PATIENCE_S
        while not source.bad:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert source.bad == [b"k" * 32]
        transport.spoiled(PeerAddress("127.0.0.1", 1), Corrupt(SPACE, b"k" * 32))


def test_who_does_not_know_the_token_gets_nothing() -> None:
    source = Blocks()
    with served(source) as peer, closing(TcpTransport("another token")) as stranger:
        with pytest.raises(PeerGoneError, match="does not know this run's token"):
            fetched(stranger, peer, wanted(1))
        with pytest.raises(PeerGoneError, match="no hello"):
            stranger.follow(peer, Subscribe())
    assert (source.held, source.closed) == (0, 0)


def test_a_peer_that_stops_in_the_middle_is_gone_within_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "SILENT_S", 0.3)
    goes_on = threading.Event()

    class Slow(Blocks):
        def hold(self, request: FetchRequest) -> AbstractContextManager[Held]:
            goes_on.wait(3 * PATIENCE_S)
            return super().hold(request)

    with served(Slow()) as peer, closing(TcpTransport(TOKEN)) as transport:
        with pytest.raises(PeerGoneError, match="nothing moved"):
            fetched(transport, peer, wanted(1))
        assert not goes_on.is_set()
        goes_on.set()


def test_closing_ends_fetches_under_way() -> None:
    held, goes_on = threading.Event(), threading.Event()

    class Endless(Blocks):
        def hold(self, request: FetchRequest) -> AbstractContextManager[Held]:
            held.set()
            goes_on.wait(3 * PATIENCE_S)
            return super().hold(request)

    with served(Endless()) as peer:
        transport = TcpTransport(TOKEN)

        def close() -> None:
            held.wait(PATIENCE_S)
            transport.close()

        threading.Thread(target=close).start()
        with pytest.raises(PeerGoneError):
            fetched(transport, peer, wanted(1))
        goes_on.set()
        with pytest.raises(PeerGoneError, match="has ended"):
            fetched(transport, peer, wanted(1))


def test_a_store_cannot_listen_where_its_node_is_not() -> None:
    with pytest.raises(StartError, match="cannot listen on"):
        TcpTransport(TOKEN).serve("203.0.113.1", Blocks(), Blocks().frames_after)


def test_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    source = Blocks()
    with closing(TcpTransport(TOKEN)) as one, closing(TcpTransport(TOKEN)) as other:
        try:
            peer = one.serve("::1", source, source.frames_after)
        except StartError:
            pytest.skip("no IPv6 here")
        assert fetched(other, peer, wanted(1)) == block(0)
