"""Fetches of blocks from other nodes into memory: promotions whose source is a peer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from loomserve.kvstore.index.radix import KEY_BYTES, key_at
from loomserve.kvstore.index.sources import Offer, best_offer
from loomserve.kvstore.peers.network import PeerNetwork
from loomserve.kvstore.server.copies.copy_queue import CopyQueue
from loomserve.kvstore.server.grants import Reservation
from loomserve.kvstore.server.memory_tier import MemoryTier
from loomserve.kvstore.server.protocol import Lookup
from loomserve.kvstore.storage.checksum import seed
from loomserve.kvstore.transport.protocol import LONGEST_WAIT_S, FetchRequest
from loomserve.platform.state.kvstore import KvNetworkState, KvPeerState

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


class Fetches:
    def __init__(self, network: PeerNetwork, memory: MemoryTier) -> None:
        fetchers = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="kv-fetch")
        self.queue = CopyQueue(memory, fetchers)
        self._network = network
        self._memory = memory
        # When chains may be tried again, by namespace and key of the first block that is missing.
        self._left_alone: dict[tuple[bytes, bytes], float] = {}
        self._fetched_blocks = 0
        self._fetched_bytes = 0

    def knows(self, namespace: bytes) -> bool:
        """Whether blocks of a namespace can be had: one that only peers know is taken over."""
        spaces = self._memory.spaces
        if namespace in spaces:
            return True
        space = self._network.space(namespace)
        return space is not None and spaces.declare(namespace, space) is None

    def follow_up(self, request: Lookup, have: int, now: float) -> Coming:
        """Fetch the blocks of a chain after the first ``have``, which are in memory. Nothing comes
        where the engine does not say how long it would compute a block for."""
        if not (request.promote and request.block_s) or have * KEY_BYTES >= len(request.keys):
            return NOTHING_COMES
        namespace, keys = request.namespace, request.keys
        fetch = self.queue.under_way(namespace, key_at(keys, have))
        if fetch is None:
            if now < self._left_alone.get((namespace, key_at(keys, have)), 0.0):
                return NOTHING_COMES
            offer = self._offer(request, have)
            if offer is None:
                return NOTHING_COMES
            wait_s = _HANDED_OVER_WAIT_S if request.holder else 0.0
            if not request.holder and offer.in_memory < offer.blocks:
                wait_s = LONGEST_WAIT_S
            room = self._memory.reserve(namespace, keys, have, have, offer.blocks, now)
            if room is None:
                return NOTHING_COMES
            fetch = self.queue.begin(
                room,
                [partial(self._fetch, offer.node, room, wait_s)],
                partial(self._ended, room),
                recompute_s=request.block_s,
                ready_at=now + offer.ready_s,
            )
        # What takes longer than predicted is expected to take a little longer still.
        return Coming(len(fetch.reservation.slots), max(fetch.ready_at - now, 1e-3))

    def usage(self) -> KvNetworkState:
        network = self._network
        links = {member.node: network.link(member.node) for member in network.members}
        return KvNetworkState(
            node=network.node,
            peers=tuple(
                KvPeerState(
                    node=node,
                    fetches=link.fetches,
                    setup_s=link.setup_s,
                    bytes_per_s=link.bytes_per_s,
                )
                for node, link in sorted(links.items())
            ),
            directory_blocks=len(network.directory),
            missed_messages=network.directory.gaps,
            fetched_blocks=self._fetched_blocks,
            fetched_bytes=self._fetched_bytes,
            failed_fetches=dict(network.failures),
        )

    def _offer(self, request: Lookup, have: int) -> Offer | None:
        slot_bytes = self._memory.spaces.slot_bytes(request.namespace)
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
        layout = self._memory.spaces[namespace].layout
        keys = reservation.keys[: (reservation.first + len(reservation.slots)) * KEY_BYTES]
        request = FetchRequest(namespace, keys, reservation.first, layout.slot_bytes, wait_s)
        arena, slots, block_keys = self._memory.arena, reservation.slots, reservation.block_keys()
        whole, spoiled = 0, False

        def check(came: int) -> bool:
            nonlocal whole, spoiled
            while whole < came and not spoiled:
                view = arena.view(slots[whole], layout.slot_bytes)
                spoiled = not layout.check(view, seed(namespace, block_keys[whole]))
                whole += not spoiled
            return not spoiled

        self._network.fetch(node, request, arena.runs(slots, layout.slot_bytes), check)
        if spoiled:
            chain = request.keys[: (request.first + whole + 1) * KEY_BYTES]
            self._network.spoiled(node, namespace, chain)
        return whole

    def _ended(self, reservation: Reservation, whole: int, now: float) -> None:
        namespace = reservation.namespace
        self._fetched_blocks += whole
        self._fetched_bytes += whole * self._memory.spaces.slot_bytes(namespace)
        if whole == len(reservation.slots):
            return
        if len(self._left_alone) >= _MOST_LEFT_ALONE:
            self._left_alone = {one: at for one, at in self._left_alone.items() if at > now}
        if len(self._left_alone) < _MOST_LEFT_ALONE:
            missing = key_at(reservation.keys, reservation.first + whole)
            self._left_alone[namespace, missing] = now + _RETRY_S
