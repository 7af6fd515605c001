"""The connector's half in EngineCore: what is looked up, loaded and saved, and when."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.request import RequestStatus

from loomserve.kvstore.engine.lookups import Lookups
from loomserve.kvstore.engine.messages import StepTransfers, Transferred
from loomserve.kvstore.engine.namespaces import Namespaces
from loomserve.kvstore.engine.pace import StepPace, TailBudget
from loomserve.kvstore.engine.request_keys import chain_of, hands_over
from loomserve.kvstore.engine.save_tracker import SaveTracker
from loomserve.kvstore.engine.swap_ledger import SwapLedger
from loomserve.kvstore.engine.transfers.transfer import Load
from loomserve.kvstore.server.client import StoreClient
from loomserve.kvstore.server.protocol import HANDED_OVER_BY, PROMPT_CHAIN, Outdated

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_STATS_PERIOD_S = 0.5


class TransferPolicy(Protocol):
    """Decisions about loads and saves, asked for in each step, and reports of what they took. By
    default, as under vLLM's own scheduler, every full block is saved and loaded."""

    @property
    def prefetches(self) -> bool:
        """Whether requests that were swapped out are loaded beside steps of others."""
        return False

    def early_blocks(self, tokens: int) -> int:
        """Blocks that may be saved, as they fill, beside a step of so many tokens. The step lasts
        as long as its saves. Blocks of preempted requests are saved in any case."""
        return sys.maxsize

    def in_own_memory(self, request: Request) -> bool:
        """Whether the request's blocks are where they can be copied, not with a lender."""
        return True

    def worth_loading(self, tokens: int) -> bool:
        """Whether that many tokens are loaded sooner than computed."""
        return True

    def on_transfer(self, done: Transferred) -> None:
        """Learn from copies that have ended."""

    def stats(self) -> KVConnectorStats | None:
        """Numbers for the engine's front end."""
        return None


class TransferAll(TransferPolicy):
    """The default, which learns nothing."""

    def on_transfer(self, done: Transferred) -> None:
        pass


class StoreConnectorScheduler:
    """Asks the store about waiting requests, and lists each step's copies for the workers.

    It knows requests and block hashes, and no memory. It waits for nothing but the store's answers,
    which :class:`StoreClient` bounds. Times are monotonic seconds of the caller's clock. ``node``
    is the store's name among those of other nodes; empty: it is the only one.
    """

    def __init__(self, store: StoreClient, names: Namespaces, node: str = "") -> None:
        self.policy: TransferPolicy = TransferAll()
        self.names = names
        """What blocks are stored under."""
        self._store = store
        self._node = node
        self._block_size = names.block_size
        self._pace = StepPace(names.block_size)
        self.swapped = SwapLedger(store, names, self._pace)
        self._lookups = Lookups(store, names, self.swapped, self._pace, node)
        self._tails = TailBudget()
        self._saves = SaveTracker(names, self._pace, self._tails)
        self._loads: list[dict[int, Load]] = []
        self._fetches: dict[str, dict[int, Load]] = {}
        self._stats_due_at = -math.inf

    def add(self, request: Request) -> None:
        self._saves.add(request)

    def matched_tokens(self, request: Request, computed: int, now: float) -> int | None:
        """Tokens beyond ``computed`` that the store has in memory; None to be asked again later."""
        if request.skip_reading_prefix_cache or not self.policy.in_own_memory(request):
            # It wants the logits of its prompt too; or has no memory of ours.
            return 0
        tokens = self._lookups.loadable_tokens(request)
        if tokens <= computed:
            return 0
        # Of what was swapped out, that has been decided.
        swapped = request.request_id in self.swapped
        if not (swapped or self.policy.worth_loading(tokens - computed)):
            return 0
        result = self._lookups.ask(request, tokens, computed // self._block_size, now)
        if result is None:
            return 0
        if result.pending:
            return None
        return max(0, min(tokens, result.blocks * self._block_size) - computed)

    def prefetches(self, request: Request) -> bool:
        """Whether the request's blocks are loaded beside steps of others."""
        return self.policy.prefetches and request.request_id in self.swapped

    def allocated(self, request: Request, block_ids: list[int], external_tokens: int) -> None:
        """Note that the request has its memory, and will have this many tokens from the store."""
        result = self._lookups.take(request.request_id)
        prefetched = self.prefetches(request)
        self.swapped.end(request.request_id)
        if result is None:
            return
        if not external_tokens:
            self._lookups.release(result)
            return
        full, rest = divmod(external_tokens, self._block_size)
        end = result.skip + full + bool(rest)
        names = self.names.of_ranks(request.lora_request)
        load = {
            rank: Load(
                namespace=names[rank],
                keys=result.keys,
                first=result.skip,
                slots=slots[: end - result.skip],
                blocks=block_ids[result.skip : end],
                lease=lease,
                # The step writes into a block that is loaded in part.
                ahead=bool(rest),
            )
            for rank, (lease, slots) in result.leases.items()
        }
        if prefetched:
            self._fetches[request.request_id] = load
        else:
            self._loads.append(load)

    def unsaved_blocks(self, request: Request, tokens: int) -> int:
        """Blocks that swapping the request out would still have to copy."""
        return self._saves.unsaved_blocks(request, tokens)

    def swap_out(
        self, request: Request, tokens: int, blocks: Sequence[int], recompute_s: float, now: float
    ) -> None:
        self._lookups.forget(request.request_id)
        self.swapped.swap_out(request, tokens, blocks, recompute_s, now)
        self._saves.swapped_out(request, tokens)

    def step(self, scheduled: SchedulerOutput, now: float) -> StepTransfers:
        self.swapped.renew_leases(now)
        self._pace.begin(now, scheduled.total_num_scheduled_tokens)
        early = partial(self.policy.early_blocks, scheduled.total_num_scheduled_tokens)
        saves = list(self._saves.saves(scheduled, early, self.policy.in_own_memory, now))
        loads, self._loads = self._loads, []
        fetches, self._fetches = self._fetches, {}
        return StepTransfers(loads, saves, self.swapped.take_saves(), fetches)

    def step_done(self, now: float) -> None:
        self._pace.end(now)

    def on_transfer(self, done: Transferred) -> None:
        self._tails.learn(done)
        self.policy.on_transfer(done)

    def stats(self, now: float) -> KVConnectorStats | None:
        """The policy's, twice a second, and with the end of the last request."""
        if now < self._stats_due_at:
            return None
        self._stats_due_at = now + _STATS_PERIOD_S
        return self.policy.stats()

    def remove(self, request: Request) -> dict[str, Any] | None:
        """Forget a request that is finished or aborted; returns what its answer carries besides."""
        self._lookups.forget(request.request_id)
        self.swapped.end(request.request_id)
        self._forget_tail(request, self._saves.remove(request))
        if not self._saves.has_requests:
            # No later step may tell of it.
            self._stats_due_at = -math.inf
        params: dict[str, Any] = {}
        if self._node and hands_over(request):
            params[HANDED_OVER_BY] = self._node
        if (request.kv_transfer_params or {}).get(PROMPT_CHAIN):
            keys = chain_of(request, request.num_prompt_tokens // self._block_size)
            namespaces = self.names.of_ranks(request.lora_request)
            chain = {"namespaces": [name.hex() for name in namespaces], "keys": keys.hex()}
            params[PROMPT_CHAIN] = chain
        return params or None

    def _forget_tail(self, request: Request, chain: bytes) -> None:
        """Have the store forget the unfilled block of a request that has ended. One that is aborted
        may go on in another engine."""
        if not chain or request.status is RequestStatus.FINISHED_ABORTED:
            return
        for name in self.names.of_ranks(request.lora_request):
            self._store.tell(Outdated(name, chain))

    def close(self) -> None:
        self._store.close()
