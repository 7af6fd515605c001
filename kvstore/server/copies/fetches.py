"""Fetches of blocks from other nodes into memory: promotions whose source is a peer."""

from __future__ import annotations

from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from loomserve.kvstore.index.radix import KEY_BYTES, key_at
from loomserve.kvstore.index.sources import Offer, best_offer
from loomserve.kvstore.peers.network import PeerNetwork
from loomserve.kvstore.server.allocator import Allocator, Reservation
from loomserve.kvstore.server.protocol import LinkUsage, Lookup, NetworkUsage
from loomserve.kvstore.server.spaces import Space, Spaces
from loomserve.kvstore.storage.arena import ArenaOwner
from loomserve.kvstore.storage.checksum import BlockLayout, seed
from loomserve.kvstore.transport.protocol import LONGEST_WAIT_S, FetchRequest

_FETCHERS = 4
_RETRY_S = 1.0
"""A chain whose fetch brought less than was offered is left alone for so long."""
_MOST_LEFT_ALONE = 4096
_HANDED_OVER_WAIT_S = 0.5
"""Until an engine of another node has committed what it hands over."""


class Coming(NamedTuple):
    """Blocks that are on their way, and the seconds until they should be in memory."""

    blocks: int
    ready_s: float


NOTHING_COMES = Coming(0, 0.0)


@dataclass(frozen=True)
class _Fetch:
    """Blocks of a peer on their way into reserved slots; the result is how many are whole."""

    reservation: Reservation
    block_s: float
    ready_at: float
    done: Future[int]


class _Arrivals:
    """Checks blocks as they arrive in reserved slots, and counts those that are whole."""

    def __init__(self, arena: ArenaOwner, layout: BlockLayout, reservation: Reservation) -> None:
        self._arena = arena
        self._layout = layout
        self._namespace = reservation.namespace
        self._slots = reservation.slots
        self._keys = reservation.block_keys()
        self.whole = 0
        self.spoiled = False
        """Whether the block that follows those is not whole."""

    def __call__(self, came: int) -> bool:
        """See :class:`Arrived`."""
        while self.whole < came and not self.spoiled:
            view = self._arena.view(self._slots[self.whole], self._layout.slot_bytes)
            if self._layout.check(view, seed(self._namespace, self._keys[self.whole])):
                self.whole += 1
            else:
                self.spoiled = True
        return not self.spoiled


class Fetches:
    """Fetches under way. A chain's blocks are fetched once, whoever else asks for them."""

    def __init__(
        self,
        network: PeerNetwork,
        arena: ArenaOwner,
        spaces: Spaces,
        allocator: Allocator,
        fetchers: Executor | None = None,
    ) -> None:
        self._network = network
        self._arena = arena
        self._spaces = spaces
        self._allocator = allocator
        if fetchers is None:
            fetchers = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="kv-fetch")
        self._fetchers = fetchers
        # By namespace and the key of their first block.
        self._fetches: dict[tuple[bytes, bytes], _Fetch] = {}
        # When they may be tried again.
        self._left_alone: dict[tuple[bytes, bytes], float] = {}
        self.fetched_blocks = 0
        self.fetched_bytes = 0

    @property
    def busy(self) -> bool:
        return bool(self._fetches)

    def knows(self, namespace: bytes) -> bool:
        """Whether blocks of a namespace can be had: one that only peers know is taken over."""
        if namespace in self._spaces:
            return True
        space = self._network.space(namespace)
        if space is None:
            return False
        layout = BlockLayout(space.layers, space.layer_bytes)
        return self._spaces.declare(namespace, Space(space.model, layout)) is None

    def follow_up(self, request: Lookup, have: int, now: float) -> Coming:
        """Fetch what of a chain is not among the first ``have`` blocks, which are in memory.

        Nothing comes where the engine does not say how long it would compute a block for.
        """
        if not (request.promote and request.block_s) or have * KEY_BYTES >= len(request.keys):
            return NOTHING_COMES
        namespace, keys = request.namespace, request.keys
        start = (namespace, key_at(keys, have))
        fetch = self._fetches.get(start)
        if fetch is None:
            if now < self._left_alone.get(start, 0.0):
                return NOTHING_COMES
            offer = self._offer(request, have)
            if offer is None:
                return NOTHING_COMES
            wait_s = _HANDED_OVER_WAIT_S if request.holder else 0.0
            if not request.holder and offer.in_memory < offer.blocks:
                wait_s = LONGEST_WAIT_S
            reservation = self._allocator.reserve(namespace, keys, have, have, offer.blocks, now)
            if reservation is None:
                return NOTHING_COMES
            done = self._fetchers.submit(self._fetch, offer.node, reservation, wait_s)
            fetch = _Fetch(reservation, request.block_s, now + offer.ready_s, done)
            self._fetches[start] = fetch
        # What takes longer than predicted is expected to take a little longer still.
        return Coming(len(fetch.reservation.slots), max(fetch.ready_at - now, 1e-3))

    def take_in(self, now: float) -> None:
        """Put what was fetched into the index."""
        for start in [start for start, fetch in self._fetches.items() if fetch.done.done()]:
            fetch = self._fetches.pop(start)
            whole = fetch.done.result()
            self._allocator.fill(fetch.reservation, whole, now, fetch.block_s)
            self.fetched_blocks += whole
            self.fetched_bytes += whole * self._spaces.slot_bytes(start[0])
            if whole < len(fetch.reservation.slots):
                position = fetch.reservation.first + whole
                self._leave_alone((start[0], key_at(fetch.reservation.keys, position)), now)

    def usage(self) -> NetworkUsage:
        """Figures of the network and its fetches."""
        network = self._network
        links = {member.node: network.link(member.node) for member in network.members}
        return NetworkUsage(
            node=network.node,
            peers=[
                LinkUsage(node, link.fetches, link.setup_s, link.bytes_per_s)
                for node, link in sorted(links.items())
            ],
            directory_blocks=len(network.directory),
            missed_messages=network.directory.gaps,
            fetched_blocks=self.fetched_blocks,
            fetched_bytes=self.fetched_bytes,
            failed_fetches=dict(network.failures),
        )

    def close(self) -> None:
        """Wait for the fetches that have begun; the network has ended by then."""
        self._fetchers.shutdown(cancel_futures=True)

    def _offer(self, request: Lookup, have: int) -> Offer | None:
        slot_bytes = self._spaces.slot_bytes(request.namespace)
        holder, block_s = request.holder, request.block_s
        if not holder:
            holdings = self._network.directory.holdings(request.namespace, request.keys)
            return best_offer(holdings, have, slot_bytes, self._network.link, block_s)
        # It has what it hands over, whether or not its announcement has come yet.
        blocks = len(request.keys) // KEY_BYTES - have
        ready_s = self._network.link(holder).seconds(blocks * slot_bytes)
        return Offer(holder, blocks, blocks, ready_s) if ready_s < blocks * block_s else None

    def _fetch(self, node: str, reservation: Reservation, wait_s: float) -> int:
        """In a thread: how many blocks came whole."""
        namespace = reservation.namespace
        layout = self._spaces[namespace].layout
        end = reservation.first + len(reservation.slots)
        request = FetchRequest(
            namespace,
            reservation.keys[: end * KEY_BYTES],
            reservation.first,
            layout.slot_bytes,
            wait_s,
        )
        arrivals = _Arrivals(self._arena, layout, reservation)
        into = self._arena.runs(reservation.slots, layout.slot_bytes)
        self._network.fetch(node, request, into, arrivals)
        if arrivals.spoiled:
            chain = request.keys[: (request.first + arrivals.whole + 1) * KEY_BYTES]
            self._network.spoiled(node, namespace, chain)
        return arrivals.whole

    def _leave_alone(self, start: tuple[bytes, bytes], now: float) -> None:
        if len(self._left_alone) >= _MOST_LEFT_ALONE:
            self._left_alone = {one: at for one, at in self._left_alone.items() if at > now}
        if len(self._left_alone) < _MOST_LEFT_ALONE:
            self._left_alone[start] = now + _RETRY_S
