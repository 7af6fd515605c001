"""vLLM's connector to the store: what an engine loads before a step and saves after it.

vLLM makes one in EngineCore, which decides (``StoreReader`` here), and one in each worker, which
copies (``StoreCopier``). The first knows requests and block hashes, the second memory; per step
the first sends the second a ``StepTransfers``.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.version import __version__ as vllm_version

from loomserve.kvstore.engine.fingerprint import folder_digest, namespace
from loomserve.kvstore.engine.memory import BlockMemory, KvMemory, pin, stream_for
from loomserve.kvstore.engine.scheduling_stats import SchedulingMetrics, SchedulingStats
from loomserve.kvstore.engine.tail import tail_key
from loomserve.kvstore.engine.transfer import Load, Loader, Save, Saver
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server.client import StoreAwayError, StoreClient
from loomserve.kvstore.server.protocol import (
    HANDED_OVER,
    HANDS_OVER,
    PIN,
    PINNED_BLOCKS,
    Done,
    Found,
    Lookup,
    Pin,
    Release,
)
from loomserve.kvstore.server.slots import decode_slots
from loomserve.kvstore.storage.arena import Arena

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_logger = logging.getLogger(__name__)

# Covers the time from the lookup to the end of the load, however long requests queue in between.
_LEASE_S = 60.0
_PIN_ATTEMPTS = 20
_PIN_WAIT_S = 0.01
# A request whose blocks come from SSD is asked about again after this time at the soonest.
_POLL_S = 0.005
# However slow the SSD, a request waits for it no longer than this.
_LONGEST_WAIT_S = 2.0
# A step may take so many times as long as the last one.
_STEPS_UNTIL_KEPT = 4
# After this time the blocks of a preempted request are in the store, or will never be.
_SWAP_OUT_S = 2.0
# A prefill engine's answer may come before its workers' commits, by far less than this.
_LONGEST_COMMIT_S = 0.5
# Within this time the decode engine has asked for what a prefill engine saved for it.
_HANDOFF_S = 10.0
# Time to compute a prompt token, until steps have been measured.
_FIRST_GUESS_S_PER_TOKEN = 1e-3
_SMOOTHING = 0.1
# vLLM's placeholder in block tables.
_NULL_BLOCK = 0


@dataclass
class StepTransfers(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers copy around one step; loads and saves of all ranks, by rank.

    ``swap_outs`` are saved before the step, which may overwrite them; ``fetches``, by request, are
    loaded beside this step and later ones.
    """

    loads: list[dict[int, Load]] = field(default_factory=list)
    saves: list[dict[int, Save]] = field(default_factory=list)
    swap_outs: list[dict[int, Save]] = field(default_factory=list)
    fetches: dict[str, dict[int, Load]] = field(default_factory=dict)


@dataclass
class Transferred(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What a worker copied since it last told: bytes, and the seconds that took."""

    out_bytes: int
    out_s: float
    in_bytes: int
    in_s: float

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Transferred:
        """Of two workers, which copy side by side."""
        assert isinstance(other, Transferred)
        return Transferred(
            self.out_bytes + other.out_bytes,
            max(self.out_s, other.out_s),
            self.in_bytes + other.in_bytes,
            max(self.in_s, other.in_s),
        )


@dataclass
class Swapped:
    """A preempted request whose KV is in the store: that of its first ``tokens``.

    ``leases`` keep it there; none until its blocks have been found there, ``complete`` once all
    have.
    """

    request: Request
    tokens: int
    since: float
    leases: list[int] = field(default_factory=list)
    leased_at: float = 0.0
    complete: bool = False


@dataclass
class Waiting:
    """What the store said about a request that is not scheduled yet."""

    asked_at: float
    first_asked_at: float
    skip: int
    keys: bytes
    # By rank; blocks [skip, blocks) are in memory on every rank and leased.
    blocks: int
    leases: dict[int, tuple[int, list[int]]]
    pending: bool


class StoreConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Registered by ``kv_connector_module_path``; options in ``kv_connector_extra_config``:

    ``address`` of the store's socket, path of its ``arena``, the ``model``'s name in its figures,
    and the ``digests`` folder for weight digests.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        spec = _only_kind(kv_cache_config)
        self._reader: StoreReader | None = None
        self._copier: StoreCopier | None = None
        if role is KVConnectorRole.SCHEDULER:
            names = Namespaces(
                vllm_config, kv_cache_config.kv_cache_layout, spec, Path(options["digests"])
            )
            self._reader = StoreReader(StoreClient(options["address"]), names)
        else:
            self._copier = StoreCopier(options, vllm_config.parallel_config.rank)

    @property
    def requires_kv_delivery(self) -> bool:
        # A cache: what is not saved is computed again.
        return False

    # In EngineCore.

    def on_new_request(self, request: Request) -> None:
        self.reader.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self.reader.matched_tokens(request, num_computed_tokens, time.monotonic())
        return tokens, bool(tokens) and self.reader.prefetches_for(request)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.reader.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepTransfers:
        return self.reader.step(scheduler_output, time.monotonic())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.reader.step_done(time.monotonic())
        transferred = connector_output.kv_connector_worker_meta
        if isinstance(transferred, Transferred):
            self.reader.on_transfer(transferred)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self.reader.remove(request)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._reader.stats() if self._reader is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return SchedulingStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> KVConnectorPromMetrics:
        return SchedulingMetrics(*args, **kwargs)

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.copier.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepTransfers)
        self.copier.swap_out(kv_connector_metadata.swap_outs)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.copier.start_loads(self._transfers())

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.copier.before_layer(layer_name, self._transfers().saves)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        self.copier.after_layer(layer_name)

    def wait_for_save(self) -> None:
        self.copier.end_step(self._transfers().saves)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.copier.take_failed()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.copier.take_fetched()

    def build_connector_worker_meta(self) -> Transferred | None:
        return self.copier.take_transferred()

    def shutdown(self) -> None:
        if self._copier is not None:
            self._copier.close()
        if self._reader is not None:
            self._reader.close()

    @property
    def reader(self) -> StoreReader:
        assert self._reader is not None, "only EngineCore decides what to load"
        return self._reader

    @property
    def copier(self) -> StoreCopier:
        assert self._copier is not None, "only workers copy"
        return self._copier

    def _transfers(self) -> StepTransfers:
        transfers = self._get_connector_metadata()
        assert isinstance(transfers, StepTransfers)
        return transfers

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # A full graph would skip the calls around each layer.
        return True


class Namespaces:
    """The namespace of each rank's blocks, for requests with and without an adapter.

    vLLM's block hashes cover the tokens, images, cache salt and an adapter's *name*; all else
    that makes a block's bytes differ is here.
    """

    def __init__(
        self, vllm_config: VllmConfig, layout: str | None, spec: KVCacheSpec, digests: Path
    ) -> None:
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        cache = vllm_config.cache_config
        self.block_size: int = spec.block_size
        self.ranks = parallel.world_size
        self._digests = digests
        self._inputs = {
            "weights": _weights(model.model, model.revision, digests),
            "load_format": str(vllm_config.load_config.load_format),
            "model": model.compute_hash(),
            "kv_dtype": f"{cache.cache_dtype} {spec.dtype}",
            "block": [self.block_size, spec.page_size_bytes],
            "layout": f"{layout} {_instruction_set()}",
            "layers": model.get_total_num_hidden_layers(),
            "parallel": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
            "vllm": vllm_version,
        }

    def of(self, rank: int, adapter: LoRARequest | None = None) -> bytes:
        lora = folder_digest(Path(adapter.lora_path), self._digests) if adapter else None
        return namespace(**self._inputs, rank=rank, lora=lora)


class StoreReader:
    """EngineCore's side: asks the store about waiting requests, and lists each step's copies."""

    def __init__(self, store: StoreClient, names: Namespaces) -> None:
        self._store = store
        self._names = names
        self._block_size = names.block_size
        self._namespaces: dict[str | None, list[bytes]] = {}
        self._requests: dict[str, Request] = {}
        self._waiting: dict[str, Waiting] = {}
        self._loads: list[dict[int, Load]] = []
        self._tables: dict[str, list[int]] = {}
        self._saved: dict[str, int] = {}
        self._s_per_token = _FIRST_GUESS_S_PER_TOKEN
        self._step = (0.0, 0)
        self._step_s = 0.0
        self._swapped: dict[str, Swapped] = {}
        self._swap_outs: list[dict[int, Save]] = []
        self._fetches: dict[str, dict[int, Load]] = {}
        self.prefetches = False
        """Whether requests that were swapped out are loaded beside steps of others."""
        self.saves_early = True
        """Whether blocks are saved as they fill; else only those of preempted requests."""
        self.early_blocks: Callable[[int], int] = lambda tokens: sys.maxsize
        """How many blocks a step of so many tokens may save so: it lasts as long as its saves."""
        self.in_own_memory: Callable[[Request], bool] = lambda request: True
        """Whether the request's blocks are where they can be copied, not with a lender."""
        self.worth_loading: Callable[[int], bool] = lambda tokens: True
        """Whether that many tokens are loaded sooner than computed."""
        self.on_transfer: Callable[[Transferred], None] = lambda transferred: None
        self.stats: Callable[[], KVConnectorStats | None] = lambda: None

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def matched_tokens(self, request: Request, computed: int, now: float) -> int | None:
        """Tokens beyond ``computed`` that the store has in memory; None to be asked again later."""
        if request.skip_reading_prefix_cache or not self.in_own_memory(request):
            # It wants the logits of its prompt too; or has no memory of ours.
            return 0
        tokens = self._loadable(request)
        if tokens <= computed:
            return 0
        # Of what was swapped out, that has been decided.
        swapped = request.request_id in self._swapped
        if not (swapped or self.worth_loading(tokens - computed)):
            return 0
        waiting = self._ask(request, tokens, computed // self._block_size, now)
        if waiting is None:
            return 0
        if waiting.pending:
            return None
        return max(0, min(tokens, waiting.blocks * self._block_size) - computed)

    def _loadable(self, request: Request) -> int:
        """Tokens that blocks in the store may have: full ones, and a tail that was left there."""
        # A token must be left to compute, for the logits.
        most: int = request.num_tokens - 1
        if (swapped := self._swapped.get(request.request_id)) is not None:
            return min(most, swapped.tokens)
        full = most // self._block_size * self._block_size
        return max(full, min(most, _handed_over(request))) if full else 0

    def _left(self, request: Request) -> int:
        """Tokens to the last of which its KV was left in the store, by another engine or by us."""
        swapped = self._swapped.get(request.request_id)
        return swapped.tokens if swapped else _handed_over(request)

    def _tail_key(self, request: Request, chain: bytes, end: int) -> bytes:
        """Of the block behind ``chain`` that is filled up to the sequence's ``end``."""
        tokens = request.all_token_ids[len(chain) // KEY_BYTES * self._block_size : end]
        owner = request.request_id if request.request_id in self._swapped else ""
        return tail_key(chain, tokens, owner)

    def _keys(self, request: Request, tokens: int) -> bytes:
        """The chain of the blocks that hold the first ``tokens``."""
        full, rest = divmod(tokens, self._block_size)
        chain = _chain(request, full)
        if not rest:
            return chain
        left = self._left(request)
        if left - full * self._block_size >= self._block_size:
            # A full one, of which the last token is computed again.
            return _chain(request, full + 1)
        return chain + self._tail_key(request, chain, left)

    def _ask(self, request: Request, tokens: int, skip: int, now: float) -> Waiting | None:
        known = self._waiting.get(request.request_id)
        if known is not None and known.skip == skip:
            age = now - known.asked_at
            if age < (_POLL_S if known.pending else _LEASE_S / 2):
                return known
        keys = self._keys(request, tokens)
        first_asked_at = known.first_asked_at if known else now
        # A hand-off is no sign that the prompt comes again, nor is a second look.
        use = known is None and not self._left(request)
        self._forget(request.request_id)
        try:
            found = [
                self._store.ask(Lookup(name, keys, skip, _LEASE_S, promote=True, use=use), Found)
                for name in self._ranks(request)
            ]
        except StoreAwayError as error:
            _logger.debug("%s", error)
            return None
        waiting = Waiting(
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
            pending=self._worth_waiting(found, now - first_asked_at)
            or self._being_committed(request, found, now - first_asked_at),
        )
        self._waiting[request.request_id] = waiting
        return waiting

    def _worth_waiting(self, found: Iterable[Found], waited_s: float) -> bool:
        """Whether blocks on SSD will come sooner than they can be computed."""
        for one in found:
            missing = one.resident - one.in_memory
            if one.ready_s and missing > 0:
                recompute_s = missing * self._block_size * self._s_per_token
                return waited_s + one.ready_s < min(recompute_s, _LONGEST_WAIT_S)
        return False

    def _being_committed(self, request: Request, found: Iterable[Found], waited_s: float) -> bool:
        """Whether blocks that were just computed will come sooner than computed again."""
        there = min(one.in_memory for one in found) * self._block_size
        missing: int = min(self._left(request), request.num_tokens - 1) - there
        return waited_s < min(missing * self._s_per_token, _LONGEST_COMMIT_S)

    def allocated(self, request: Request, block_ids: list[int], external_tokens: int) -> None:
        """The request has its memory, and will have this many tokens from the store."""
        waiting = self._waiting.pop(request.request_id, None)
        prefetched = self.prefetches_for(request)
        self._end_swap(request.request_id)
        if waiting is None:
            return
        if not external_tokens:
            self._release(waiting)
            return
        full, rest = divmod(external_tokens, self._block_size)
        end = waiting.skip + full + bool(rest)
        names = self._ranks(request)
        load = {
            rank: Load(
                namespace=names[rank],
                keys=waiting.keys,
                first=waiting.skip,
                slots=slots[: end - waiting.skip],
                blocks=block_ids[waiting.skip : end],
                lease=lease,
                # The step writes into a block that is loaded in part.
                ahead=bool(rest),
            )
            for rank, (lease, slots) in waiting.leases.items()
        }
        if prefetched:
            self._fetches[request.request_id] = load
        else:
            self._loads.append(load)

    # Preempted requests

    def prefetches_for(self, request: Request) -> bool:
        return self.prefetches and request.request_id in self._swapped

    def unsaved_blocks(self, request: Request, tokens: int) -> int:
        """Blocks that swapping the request out would still have to copy."""
        return -(-tokens // self._block_size) - self._saved.get(request.request_id, 0)

    def swap_out(
        self, request: Request, tokens: int, blocks: Sequence[int], seconds: float, now: float
    ) -> None:
        """Keep the KV of the request's first ``tokens``, which is in ``blocks`` until this step.

        ``seconds`` predicts the time to compute them again.
        """
        self._forget(request.request_id)
        self._end_swap(request.request_id)
        self._swapped[request.request_id] = Swapped(request, tokens, now)
        full, rest = divmod(tokens, self._block_size)
        self._saved[request.request_id] = max(full, self._saved.get(request.request_id, 0))
        chain = _chain(request, full)
        if rest:
            chain += self._tail_key(request, chain, tokens)
        self._swap_outs.append(
            {
                rank: Save(name, chain, blocks, seconds / len(blocks), self._until_kept())
                for rank, name in enumerate(self._ranks(request))
            }
        )

    def _until_kept(self) -> float:
        """Seconds within which the next step holds a lease of its own."""
        return min(_HANDOFF_S, _STEPS_UNTIL_KEPT * self._step_s + _LONGEST_COMMIT_S)

    def _keep_swapped(self, now: float) -> None:
        """Hold leases on the blocks of preempted requests for as long as they wait."""
        last_step_at, _ = self._step
        for swapped in self._swapped.values():
            if swapped.since > last_step_at:
                # This step will save them.
                continue
            awaited = not swapped.complete and now - swapped.since < _SWAP_OUT_S
            if awaited or now - swapped.leased_at > _LEASE_S / 2:
                self._keep(swapped, now)

    def _keep(self, swapped: Swapped, now: float) -> None:
        blocks = -(-swapped.tokens // self._block_size)
        keys = self._keys(swapped.request, swapped.tokens)
        earlier, swapped.leases = swapped.leases, []
        swapped.leased_at = now
        try:
            found = [
                self._store.ask(Lookup(name, keys, 0, _LEASE_S, promote=False, use=False), Found)
                for name in self._ranks(swapped.request)
            ]
            swapped.leases = [one.lease for one in found if one.lease]
            swapped.complete = all(one.in_memory == blocks for one in found)
            if earlier:
                self._store.ask(Release(earlier), Done)
        except StoreAwayError as error:
            # What is lost is computed again.
            _logger.debug("%s", error)

    def _end_swap(self, request_id: str) -> None:
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None and swapped.leases:
            try:
                self._store.ask(Release(swapped.leases), Done)
            except StoreAwayError as error:
                _logger.debug("%s", error)

    def step(self, scheduled: SchedulerOutput, now: float) -> StepTransfers:
        """The copies around this step."""
        self._keep_swapped(now)
        self._step = (now, scheduled.total_num_scheduled_tokens)
        blocks_of = scheduled.kv_connector_block_state.block_ids
        for request_id, tables in blocks_of.items():
            self._tables[request_id] = list(tables[0])
        loads, self._loads = self._loads, []
        swap_outs, self._swap_outs = self._swap_outs, []
        fetches, self._fetches = self._fetches, {}
        return StepTransfers(loads, list(self._saves(scheduled)), swap_outs, fetches)

    def _saves(self, scheduled: SchedulerOutput) -> Iterable[dict[int, Save]]:
        early = self.early_blocks(scheduled.total_num_scheduled_tokens) if self.saves_early else 0
        for request_id, computed in _computed_tokens(scheduled).items():
            request = self._requests.get(request_id)
            if request is None or not self.in_own_memory(request):
                continue
            after = computed + scheduled.num_scheduled_tokens[request_id]
            keys = self._computed_keys(request, after)
            count, saved = len(keys) // KEY_BYTES, self._saved.get(request_id, 0)
            if not hands_over(request):
                count = min(count, saved + early)
                early -= max(0, count - saved)
                keys = keys[: count * KEY_BYTES]
            if count <= saved:
                continue
            self._saved[request_id] = count
            blocks = self._tables[request_id][:count]
            if _NULL_BLOCK in blocks:
                # A sliding window has passed them, and their KV is gone.
                continue
            recompute_s = self._block_size * self._s_per_token
            keep_s = _HANDOFF_S if hands_over(request) else 0.0
            yield {
                rank: Save(name, keys, blocks, recompute_s, keep_s)
                for rank, name in enumerate(self._ranks(request))
            }

    def _computed_keys(self, request: Request, tokens: int) -> bytes:
        """The chain of the blocks that are worth saving once ``tokens`` are computed."""
        # Under async scheduling the newest tokens, and so their block's hash, are not known.
        full = min(tokens // self._block_size, len(request.block_hashes))
        chain = _chain(request, full)
        prompt = request.num_prompt_tokens
        tail = prompt - full * self._block_size
        if full and 0 < tail < self._block_size and tokens >= prompt and hands_over(request):
            chain += self._tail_key(request, chain, prompt)
        return chain

    def step_done(self, now: float) -> None:
        """Learn the time a prompt token takes from steps that were mostly prefill."""
        begin, tokens = self._step
        self._step_s = now - begin
        if tokens >= 4 * self._block_size:
            self._s_per_token += _SMOOTHING * ((now - begin) / tokens - self._s_per_token)

    def remove(self, request: Request) -> dict[str, int] | None:
        """The request is finished or aborted; what its answer shall tell of the store."""
        self._forget(request.request_id)
        self._end_swap(request.request_id)
        for kept in (self._requests, self._tables, self._saved):
            kept.pop(request.request_id, None)
        wish = (request.kv_transfer_params or {}).get(PIN)
        return None if wish is None else {PINNED_BLOCKS: self._pin(request, pinned=bool(wish))}

    def _pin(self, request: Request, *, pinned: bool) -> int:
        """Pin or unpin a prompt's full blocks; how many the store then says it has of them."""
        blocks = request.num_prompt_tokens // self._block_size
        keys = _chain(request, blocks)
        done = 0
        # A worker commits what it saved a moment after its step.
        for _ in range(_PIN_ATTEMPTS):
            try:
                answers = [
                    self._store.ask(Pin(name, keys, pinned), Done) for name in self._ranks(request)
                ]
            except StoreAwayError as error:
                _logger.debug("%s", error)
                break
            done = min(answer.blocks for answer in answers)
            if done == blocks:
                break
            time.sleep(_PIN_WAIT_S)
        return done

    def _forget(self, request_id: str) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._release(waiting)

    def _release(self, waiting: Waiting) -> None:
        leases = [lease for lease, _ in waiting.leases.values()]
        if leases:
            try:
                self._store.ask(Release(leases), Done)
            except StoreAwayError as error:
                # Leases end by themselves.
                _logger.debug("%s", error)

    def _ranks(self, request: Request) -> list[bytes]:
        adapter = request.lora_request
        known = adapter.lora_path if adapter else None
        if known not in self._namespaces:
            self._namespaces[known] = [
                self._names.of(rank, adapter) for rank in range(self._names.ranks)
            ]
        return self._namespaces[known]

    def close(self) -> None:
        self._store.close()


class StoreCopier:
    """A worker's side: runs the pipeline around the forward pass.

    Where the memory allows no copies beside a forward pass, they come before it and after it.
    """

    memory: BlockMemory

    def __init__(self, options: Mapping[str, Any], rank: int) -> None:
        self._options = options
        self._rank = rank
        self._failed: set[int] = set()
        self._lanes: tuple[Loader, Loader, Saver] | None = None
        self._fetches: dict[str, Future[set[int]]] = {}
        self._told = Transferred(0, 0.0, 0, 0.0)
        self._computed: set[int] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        memory = KvMemory(kv_caches)
        stream = stream_for(memory.device)
        arena = Arena.attach(Path(self._options["arena"]))
        pin(memory.device, arena.base_address, arena.nbytes)
        address = self._options["address"]
        self.memory = memory
        self._lanes = (
            Loader(memory, arena, stream, StoreClient(address)),
            # What is fetched must not keep a step's loads waiting.
            Loader(memory, arena, stream_for(memory.device), StoreClient(address)),
            Saver(memory, arena, stream, StoreClient(address), self._options["model"]),
        )

    def settle(self) -> None:
        """Wait for what is copied beside steps: the blocks are about to change their places."""
        for fetch in self._fetches.values():
            fetch.result()

    def use(self, memory: BlockMemory) -> None:
        """Blocks are there from now on; between two steps, and once it has settled."""
        self.memory = memory
        for lane in self.lanes:
            lane.memory = memory

    def swap_out(self, saves: list[dict[int, Save]]) -> None:
        if saves:
            *_, saver = self.lanes
            saver.save_computed([save[self._rank] for save in saves])

    def start_loads(self, transfers: StepTransfers) -> None:
        loader, fetcher, _ = self.lanes
        if transfers.loads:
            loader.start([load[self._rank] for load in transfers.loads])
            if not self.memory.beside_steps:
                loader.wait()
        for request_id, load in transfers.fetches.items():
            self._fetches[request_id] = fetcher.fetch(load[self._rank])
            if not self.memory.beside_steps:
                self._fetches[request_id].result()

    def take_fetched(self) -> set[str] | None:
        """The requests whose fetch has ended since this was last asked."""
        ended = {name for name, fetch in self._fetches.items() if fetch.done()}
        for name in ended:
            self._failed |= self._fetches.pop(name).result()
        return ended or None

    def take_transferred(self) -> Transferred | None:
        """What was copied since this was last asked; None where nothing was."""
        loader, fetcher, saver = self.lanes
        out, loaded, fetched = saver.time.copied, loader.time.copied, fetcher.time.copied
        told, self._told = (
            self._told,
            Transferred(*out, loaded.size + fetched.size, loaded.busy_s + fetched.busy_s),
        )
        new = Transferred(
            self._told.out_bytes - told.out_bytes,
            self._told.out_s - told.out_s,
            self._told.in_bytes - told.in_bytes,
            self._told.in_s - told.in_s,
        )
        return new if new.out_bytes or new.in_bytes else None

    def before_layer(self, layer_name: str, saves: list[dict[int, Save]]) -> None:
        loader, _, saver = self.lanes
        if saves and not saver.running and self.memory.beside_steps:
            saver.start([save[self._rank] for save in saves])
        loader.wait_layer(self.memory.layer_of[layer_name])

    def after_layer(self, layer_name: str) -> None:
        *_, saver = self.lanes
        layer = self.memory.layer_of[layer_name]
        self._computed.add(layer)
        saver.layer_done(layer)

    def end_step(self, saves: list[dict[int, Save]]) -> None:
        loader, _, saver = self.lanes
        failed = loader.finish()
        self._failed |= failed
        computed, self._computed = self._computed, set()
        if self.memory.beside_steps:
            saver.finish(sound=not failed)
        elif saves and not failed and computed >= self.memory.layers_here:
            saver.save_computed([save[self._rank] for save in saves])

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    @property
    def lanes(self) -> tuple[Loader, Loader, Saver]:
        assert self._lanes is not None, "register_kv_caches() comes first"
        return self._lanes

    def close(self) -> None:
        if self._lanes is not None:
            for lane in self._lanes:
                lane.close()
            self._lanes = None


def _only_kind(kv_cache_config: KVCacheConfig) -> KVCacheSpec:
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise ValueError(
            "this model has several kinds of KV cache, which the KV store does not hold yet: "
            "set kvstore: false for it"
        )
    (group,) = kv_cache_config.kv_cache_groups
    return group.kv_cache_spec


def _chain(request: Request, blocks: int) -> bytes:
    return b"".join(block_hash[:KEY_BYTES] for block_hash in request.block_hashes[:blocks])


def _handed_over(request: Request) -> int:
    tokens: int = (request.kv_transfer_params or {}).get(HANDED_OVER, 0)
    return tokens


def hands_over(request: Request) -> bool:
    return HANDS_OVER in (request.kv_transfer_params or {})


def _computed_tokens(scheduled: SchedulerOutput) -> dict[str, int]:
    computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    cached = scheduled.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return computed


def _weights(model: str, revision: str | None, digests: Path) -> str:
    if Path(model).is_dir():
        return folder_digest(Path(model), digests)
    from huggingface_hub import snapshot_download

    folder = snapshot_download(model, revision=revision, local_files_only=True)
    return folder_digest(Path(folder), digests)


def _instruction_set() -> str:
    """On CPUs the inside of a block depends on it."""
    capabilities = torch.backends.cpu.get_cpu_capability()
    return f"{capabilities} amx={torch.cpu._is_amx_tile_supported()}"
