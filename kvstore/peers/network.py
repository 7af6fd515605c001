"""This node's store among those of other nodes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from loomserve.kvstore.index.directory import Directory
from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.journal import Journal
from loomserve.kvstore.index.sources import LinkRate
from loomserve.kvstore.peers.announcer import Announcer
from loomserve.kvstore.peers.follower import Follower
from loomserve.kvstore.peers.messages import Member
from loomserve.kvstore.storage.checksum import Space
from loomserve.kvstore.transport.protocol import (
    Arrived,
    FetchRequest,
    OpenSource,
    PeerAddress,
    PeerGoneError,
    PeerRefusedError,
)
from loomserve.kvstore.transport.tcp import TcpTransport
from loomserve.kvstore.wire import Corrupt

_MOST_SPACES = 1024
_SHUNNED_S = 2.0
"""A peer that was lost in a fetch is asked for nothing more for so long."""


class PeerNetwork:
    """Members, their blocks as they announce them, and the rate of each link.

    ``journal`` gets this node's own changes, and ``most_blocks`` bounds the directory. The
    store's thread asks and ticks; membership and fetches may come from any thread.
    """

    def __init__(self, node: str, transport: TcpTransport, most_blocks: int) -> None:
        self.node = node
        self.journal: Journal = []
        self.announcer = Announcer(node)
        self.directory = Directory(most_blocks)
        self.failures: Counter[str] = Counter()
        """Fetches that brought nothing, by reason."""
        self._transport = transport
        self._address: PeerAddress | None = None
        self._lock = threading.Lock()
        self._followers: dict[str, Follower] = {}
        self._links: dict[str, LinkRate] = {}
        self._spaces: dict[bytes, Space] = {}
        # Until when, by node.
        self._shunned: dict[str, float] = {}

    def serve(self, host: str, open_source: OpenSource) -> None:
        """Let peers fetch, and hear what this node announces; raises as the transport."""
        self._address = self._transport.serve(host, open_source, self.announcer.frames_after)

    @property
    def member(self) -> Member:
        """This store, for the others."""
        assert self._address is not None, "serve() comes first"
        return Member(self.node, self._address, self.announcer.epoch)

    def set_members(self, members: Collection[Member]) -> None:
        """All stores that there are from now on, this one or not: others' blocks are forgotten."""
        wanted = {member.node: member for member in members if member.node != self.node}
        with self._lock:
            known = dict(self._followers)
            gone = [one for node, one in known.items() if wanted.get(node) != one.member]
            for follower in gone:
                del self._followers[follower.member.node]
                self._shunned.pop(follower.member.node, None)
        for follower in gone:
            follower.stop()
            self._transport.forget(follower.member.address)
        self.directory.keep_only(wanted)
        with self._lock:
            for node, member in wanted.items():
                if node not in self._followers:
                    self._links.setdefault(node, LinkRate())
                    self._followers[node] = Follower(
                        member, self._transport, self.directory, self._learn_spaces
                    )
            for node in self._links.keys() - wanted.keys():
                del self._links[node]

    @property
    def members(self) -> list[Member]:
        """The others."""
        with self._lock:
            return [follower.member for follower in self._followers.values()]

    def link(self, node: str) -> LinkRate:
        """What fetches from a node take."""
        return self._links.get(node) or LinkRate()

    def space(self, namespace: bytes) -> Space | None:
        """A namespace as a peer announced it."""
        return self._spaces.get(namespace)

    def refetch_s(self, namespace: bytes, key: bytes, block_bytes: int) -> float | None:
        """Predicted seconds to fetch a block that has left this node; None: no other has it."""
        holders = self.directory.holders(namespace, key)
        if not holders:
            return None
        # Blocks are fetched in runs, so a fetch's beginning is no single block's.
        return min(block_bytes / self.link(node).bytes_per_s for node in holders)

    def fetch(
        self, node: str, request: FetchRequest, into: Sequence[memoryview], arrived: Arrived
    ) -> None:
        """Fetch blocks of a peer; ``arrived`` learns how many have come, from the first on. One
        that cannot be reached is forgotten until it announces again."""
        begin = time.monotonic()
        with self._lock:
            follower = self._followers.get(node)
        if follower is None or begin < self._shunned.get(node, 0.0):
            self.failures["gone"] += 1
            return
        try:
            blocks = self._transport.fetch(follower.member.address, request, into, arrived)
        except PeerGoneError:
            self.failures["gone"] += 1
            # Those that wait for a thread must not each find out for themselves.
            self._shunned[node] = time.monotonic() + _SHUNNED_S
            self.directory.drop(node)
        except PeerRefusedError:
            self.failures["refused"] += 1
        else:
            if not blocks:
                self.failures["missing"] += 1
            elif not request.wait_s:
                self.link(node).learn(blocks * request.slot_bytes, time.monotonic() - begin)

    def spoiled(self, node: str, namespace: bytes, keys: bytes) -> None:
        """Tell a peer that the last block of a chain, as it sent it, is not whole."""
        self.failures["corrupt"] += 1
        with self._lock:
            follower = self._followers.get(node)
        if follower is not None:
            self._transport.spoiled(follower.member.address, Corrupt(namespace, keys))

    @property
    def busy(self) -> bool:
        """Whether :meth:`tick` has something to do."""
        return bool(self.journal) or self.announcer.waiting

    def tick(self, now: float, index: Index, spaces: Iterable[tuple[bytes, Space]]) -> None:
        """Announce what changed in the index. ``spaces`` are all that are known."""
        self.announcer.note(self.journal)
        self.journal.clear()
        if self.announcer.contents_wanted:
            self.announcer.provide(index.contents(), spaces)
        self.announcer.tick(now)

    def close(self) -> None:
        """Leave: all connections and threads end."""
        self.set_members(())
        self._transport.close()

    def _learn_spaces(self, spaces: Mapping[bytes, Space]) -> None:
        for namespace, space in spaces.items():
            if len(self._spaces) < _MOST_SPACES:
                self._spaces.setdefault(namespace, space)
