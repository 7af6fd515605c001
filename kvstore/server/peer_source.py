"""This node's blocks, as one connection to a store of another node gets them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server.client import StoreAwayError, StoreClient
from loomserve.kvstore.server.protocol import Found, Lookup, Release, decode_slots
from loomserve.kvstore.server.store import BlockStore
from loomserve.kvstore.transport.protocol import FETCH_S, FetchRequest, PeerRefusedError
from loomserve.kvstore.wire import Corrupt

_POLL_S = 0.005


class PeerSource:
    """Asks the store of this node as an engine does: what is leased to it stays where it is."""

    def __init__(self, address: str, store: BlockStore) -> None:
        self._client = StoreClient(address)
        self._store = store

    @contextmanager
    def hold(self, request: FetchRequest) -> Iterator[tuple[int, Sequence[memoryview]]]:
        until = time.monotonic() + request.wait_s
        found = self._look(request)
        while found.in_memory * KEY_BYTES < len(request.keys) and time.monotonic() < until:
            self._release(found.lease)
            time.sleep(_POLL_S)
            found = self._look(request)
        blocks = found.in_memory - request.first
        if blocks <= 0 or not found.lease:
            yield 0, ()
            return
        try:
            # Known by now, for it has a block; views of another size would be of others' bytes.
            if self._store.slot_bytes(request.namespace) != request.slot_bytes:
                raise PeerRefusedError("the blocks of this namespace have another size here")
            slots = decode_slots(found.slots)
            yield blocks, self._store.memory.arena.runs(slots, request.slot_bytes)
        finally:
            self._release(found.lease)

    def spoiled(self, namespace: bytes, keys: bytes) -> None:
        self._client.tell(Corrupt(namespace, keys))

    def close(self) -> None:
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
            self._client.tell(Release([lease]))
