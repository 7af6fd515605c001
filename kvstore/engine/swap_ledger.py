"""Preempted requests whose KV waits in the store."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loomserve.kvstore.engine.namespaces import Namespaces
from loomserve.kvstore.engine.pace import StepPace
from loomserve.kvstore.engine.request_keys import chain_of, keys_of, tail_key_of
from loomserve.kvstore.engine.transfers.transfer import Save
from loomserve.kvstore.server.client import StoreAwayError, StoreClient
from loomserve.kvstore.server.protocol import Found, Lookup, Release

if TYPE_CHECKING:
    from vllm.v1.request import Request

_logger = logging.getLogger(__name__)

# Within this time somebody has asked for what was saved for a purpose: a decode engine for what a
# prefill engine hands over, an engine for what it has just swapped out.
HANDOFF_S = 10.0
# A worker's commit may come after the step that it belongs to, by far less than this.
LONGEST_COMMIT_S = 0.5
# Covers the time from the lookup to the end of the load, however long requests queue in between.
LEASE_S = 60.0
# A step may take so many times as long as the last one.
_STEPS_UNTIL_KEPT = 4
# After this time the blocks of a preempted request are in the store, or will never be.
_SWAP_OUT_S = 2.0


@dataclass
class SwappedRequest:
    """A preempted request whose first ``tokens`` tokens have their KV in the store. ``leases`` keep
    it there, once its blocks have been found; ``complete``: all have been."""

    request: Request
    tokens: int
    since: float
    leases: list[int] = field(default_factory=list)
    leased_at: float = 0.0
    complete: bool = False


class SwapLedger:
    """Requests that are swapped out, each from its preemption until it has memory again. Their
    blocks are leased meanwhile. Times are monotonic seconds of the caller's clock."""

    def __init__(self, store: StoreClient, names: Namespaces, pace: StepPace) -> None:
        self._store = store
        self._names = names
        self._pace = pace
        self._swapped: dict[str, SwappedRequest] = {}
        self._saves: list[dict[int, Save]] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._swapped

    def tokens_of(self, request_id: str) -> int | None:
        """Tokens that a swapped-out request has in the store; None if it is not swapped out."""
        swapped = self._swapped.get(request_id)
        return swapped.tokens if swapped is not None else None

    def swap_out(
        self, request: Request, tokens: int, blocks: Sequence[int], recompute_s: float, now: float
    ) -> None:
        """Keep the KV of a preempted request's first ``tokens``, in ``blocks`` until the next step.
        ``recompute_s`` predicts the time to compute them again."""
        self.end(request.request_id)
        self._swapped[request.request_id] = SwappedRequest(request, tokens, now)
        full, rest = divmod(tokens, self._names.block_size)
        keys = chain_of(request, full)
        if rest:
            keys += tail_key_of(request, keys, tokens, self._names.block_size, owned=True)
        self._saves.append(
            {
                rank: Save(name, keys, blocks, recompute_s / len(blocks), self._until_leased_s())
                for rank, name in enumerate(self._names.of_ranks(request.lora_request))
            }
        )

    def take_saves(self) -> list[dict[int, Save]]:
        saves, self._saves = self._saves, []
        return saves

    def renew_leases(self, now: float) -> None:
        """Hold leases on the blocks of all that wait; called once a step, before it begins."""
        for swapped in self._swapped.values():
            if swapped.since > self._pace.began_at:
                # This step will save them.
                continue
            awaited = not swapped.complete and now - swapped.since < _SWAP_OUT_S
            if awaited or now - swapped.leased_at > LEASE_S / 2:
                self._renew(swapped, now)

    def end(self, request_id: str) -> None:
        """Forget a request, which has its memory again or is gone; harmless if it is not known."""
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None and swapped.leases:
            self._store.tell(Release(swapped.leases))

    def _until_leased_s(self) -> float:
        """Seconds within which the next step holds a lease of its own."""
        return min(HANDOFF_S, _STEPS_UNTIL_KEPT * self._pace.step_s + LONGEST_COMMIT_S)

    def _renew(self, swapped: SwappedRequest, now: float) -> None:
        size, request = self._names.block_size, swapped.request
        blocks = -(-swapped.tokens // size)
        keys = keys_of(request, swapped.tokens, swapped.tokens, size, owned=True)
        earlier, swapped.leases = swapped.leases, []
        swapped.leased_at = now
        try:
            found = [
                self._store.ask(
                    Lookup(name, keys, 0, LEASE_S, promote=False, use=False, pid=os.getpid()), Found
                )
                for name in self._names.of_ranks(request.lora_request)
            ]
            swapped.leases = [one.lease for one in found if one.lease]
            swapped.complete = all(one.in_memory == blocks for one in found)
        except StoreAwayError as error:
            # What is lost is computed again.
            _logger.debug("%s", error)
            return
        if earlier:
            self._store.tell(Release(earlier))
