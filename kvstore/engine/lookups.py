"""Lookups of waiting requests' blocks in the store, and the leases that they hold."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loomserve.kvstore.engine.namespaces import Namespaces
from loomserve.kvstore.engine.pace import StepPace
from loomserve.kvstore.engine.request_keys import (
    handed_over_by,
    handed_over_tokens,
    keys_of,
    tail_end,
)
from loomserve.kvstore.engine.swap_ledger import LEASE_S, LONGEST_COMMIT_S, SwapLedger
from loomserve.kvstore.server.client import StoreAwayError, StoreClient
from loomserve.kvstore.server.protocol import Found, Lookup, Release, decode_slots

if TYPE_CHECKING:
    from vllm.v1.request import Request

_logger = logging.getLogger(__name__)

# A request whose blocks are on their way is asked about again after this time at the soonest.
_POLL_S = 0.005
# However slow the SSD or the link, a request waits for it no longer than this.
_LONGEST_WAIT_S = 2.0


@dataclass
class LookupResult:
    """The store's answer about a request that is not scheduled yet.

    Blocks ``[skip, blocks)`` are in memory on every rank, and each rank's lease keeps them there.
    ``pending``: more are on their way and worth waiting for. ``leases``: lease and slots, by rank.
    """

    asked_at: float
    first_asked_at: float
    skip: int
    keys: bytes
    blocks: int
    leases: dict[int, tuple[int, list[int]]]
    """Lease and slots, by rank."""
    pending: bool


class Lookups:
    """Open lookups, at most one a request; each is taken when the request gets memory. Times are
    monotonic seconds of the caller's clock. ``node`` is the store's name among others'."""

    def __init__(
        self,
        store: StoreClient,
        names: Namespaces,
        swapped: SwapLedger,
        pace: StepPace,
        node: str = "",
    ) -> None:
        self._store = store
        self._node = node
        self._names = names
        self._block_size = names.block_size
        self._swapped = swapped
        self._pace = pace
        self._results: dict[str, LookupResult] = {}

    def loadable_tokens(self, request: Request) -> int:
        """Tokens that blocks in the store may have: full ones, and a tail that was left there."""
        # A token must be left to compute, for the logits.
        most: int = request.num_tokens - 1
        if (swapped := self._swapped.tokens_of(request.request_id)) is not None:
            return min(most, swapped)
        full = most // self._block_size * self._block_size
        return max(full, min(most, self._left(request))) if full else 0

    def ask(self, request: Request, tokens: int, skip: int, now: float) -> LookupResult | None:
        """Look up the request's first ``tokens`` behind ``skip`` blocks; None: the store is away.
        The last answer stands while it is fresh."""
        known = self._results.get(request.request_id)
        if known is not None and known.skip == skip:
            age = now - known.asked_at
            if age < (_POLL_S if known.pending else LEASE_S / 2):
                return known
        left, owned = self._left(request), request.request_id in self._swapped
        keys = keys_of(request, tokens, left, self._block_size, owned=owned)
        first_asked_at = known.first_asked_at if known else now
        # Who goes on with a request is no sign that its prompt comes again, nor is a second look.
        use = known is None and not left
        self.forget(request.request_id)
        try:
            found = [
                self._store.ask(self._lookup(request, name, keys, skip, use=use), Found)
                for name in self._names.of_ranks(request.lora_request)
            ]
        except StoreAwayError as error:
            _logger.debug("%s", error)
            return None
        waited_s = now - first_asked_at
        result = LookupResult(
            asked_at=now,
            first_asked_at=first_asked_at,
            skip=skip,
            keys=keys,
            blocks=min(one.in_memory for one in found),
            leases={
                rank: (one.lease, decode_slots(one.slots))
                for rank, one in enumerate(found)
                if one.lease
            },
            pending=self._worth_waiting(found, waited_s)
            or self._being_committed(request, found, waited_s),
        )
        self._results[request.request_id] = result
        return result

    def take(self, request_id: str) -> LookupResult | None:
        """The request's open lookup, whose leases are the caller's from now on."""
        return self._results.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        result = self.take(request_id)
        if result is not None:
            self.release(result)

    def release(self, result: LookupResult) -> None:
        leases = [lease for lease, _ in result.leases.values()]
        if leases:
            self._store.tell(Release(leases))

    def _lookup(
        self, request: Request, namespace: bytes, keys: bytes, skip: int, *, use: bool
    ) -> Lookup:
        holder = handed_over_by(request)
        return Lookup(
            namespace,
            keys,
            skip,
            LEASE_S,
            promote=True,
            use=use,
            block_s=self._block_size * self._pace.s_per_token,
            holder=holder if holder != self._node else "",
            pid=os.getpid(),
        )

    def _left(self, request: Request) -> int:
        """Tokens to the last of which its KV was left in the store, by another engine or by us."""
        if left := self._just_left(request):
            return left
        answered = request.num_tokens > request.num_prompt_tokens
        return tail_end(request.num_tokens - 1, self._block_size) if answered else 0

    def _just_left(self, request: Request) -> int:
        """The same, of what is committed at this moment."""
        swapped = self._swapped.tokens_of(request.request_id)
        return swapped if swapped is not None else handed_over_tokens(request)

    def _worth_waiting(self, found: Iterable[Found], waited_s: float) -> bool:
        """Whether blocks on SSD or of another node will come sooner than they can be computed."""
        for one in found:
            missing = one.resident + one.remote - one.in_memory
            if one.ready_s and missing > 0:
                recompute_s = missing * self._block_size * self._pace.s_per_token
                return waited_s + one.ready_s < min(recompute_s, _LONGEST_WAIT_S)
        return False

    def _being_committed(self, request: Request, found: Iterable[Found], waited_s: float) -> bool:
        """Whether blocks that were just computed will come sooner than computed again."""
        there = min(one.in_memory for one in found) * self._block_size
        missing: int = min(self._just_left(request), request.num_tokens - 1) - there
        return waited_s < min(missing * self._pace.s_per_token, LONGEST_COMMIT_S)
