"""This node's blocks, as one connection to a store of another node gets them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server.client import StoreAwayError, StoreClient
from loomserve.kvstore.server.protocol import Corrupt, Done, Found, Lookup, Release, decode_slots
from loomserve.kvstore.storage.arena import Arena
from loomserve.kvstore.transport.protocol import (
    FETCH_S,
    FetchRequest,
    HeldBlocks,
    PeerRefusedError,
)

_POLL_S = 0.005


class PeerSource:
    """Asks the store of this node as an engine does: what is leased to it stays where it is."""

    def __init__(
        self, address: str, arena: Arena, slot_bytes: Callable[[bytes], int | None]
    ) -> None:
        """
        Args:
            address: of the store's socket.
            arena: where its blocks are.
            slot_bytes: of a namespace; None: it is not known.
        """
        self._client = StoreClient(address)
        self._arena = arena
        self._slot_bytes = slot_bytes

    def hold(self, request: FetchRequest) -> HeldBlocks:
        """See :class:`BlockSource`."""
        until = time.monotonic() + request.wait_s
        found = self._look(request)
        while found.in_memory * KEY_BYTES < len(request.keys) and time.monotonic() < until:
            self._release(found.lease)
            time.sleep(_POLL_S)
            found = self._look(request)
        blocks = found.in_memory - request.first
        if blocks <= 0 or not found.lease:
            return HeldBlocks(0, 0, ())
        # Known by now, for it has a block; views of another size would be of others' bytes.
        if self._slot_bytes(request.namespace) != request.slot_bytes:
            self._release(found.lease)
            raise PeerRefusedError("the blocks of this namespace have another size here")
        views = self._arena.runs(decode_slots(found.slots), request.slot_bytes)
        return HeldBlocks(found.lease, blocks, views)

    def release(self, held: HeldBlocks) -> None:
        """See :class:`BlockSource`."""
        self._release(held.lease)

    def spoiled(self, namespace: bytes, keys: bytes) -> None:
        """See :class:`BlockSource`."""
        with contextlib.suppress(StoreAwayError):
            self._client.ask(Corrupt(namespace, keys), Done)

    def close(self) -> None:
        """See :class:`BlockSource`."""
        self._client.close()

    def _look(self, request: FetchRequest) -> Found:
        # No sign that this node's engines want them; and nothing is fetched from third nodes.
        lookup = Lookup(
            request.namespace, request.keys, request.first, FETCH_S, promote=True, use=False
        )
        try:
            return self._client.ask(lookup, Found)
        except StoreAwayError as error:
            raise PeerRefusedError(str(error)) from error

    def _release(self, lease: int) -> None:
        if lease:
            with contextlib.suppress(StoreAwayError):
                self._client.ask(Release([lease]), Done)
