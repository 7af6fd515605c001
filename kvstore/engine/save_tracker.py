"""Which of an engine's computed blocks are saved in the store, and which come next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from loomserve.kvstore.engine.namespaces import Namespaces
from loomserve.kvstore.engine.request_keys import chain_of, hands_over, tail_key_of
from loomserve.kvstore.engine.step_pace import StepPace
from loomserve.kvstore.engine.swap_ledger import HANDOFF_S
from loomserve.kvstore.engine.transfer import Save
from loomserve.kvstore.index.radix import KEY_BYTES

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.request import Request

# vLLM's placeholder in block tables.
_NULL_BLOCK = 0


class SaveTracker:
    """Progress of saving, in blocks of each unfinished request; no block is saved twice."""

    def __init__(self, names: Namespaces, pace: StepPace) -> None:
        self._names = names
        self._block_size = names.block_size
        self._pace = pace
        self._requests: dict[str, Request] = {}
        self._tables: dict[str, list[int]] = {}
        self._saved: dict[str, int] = {}

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def remove(self, request: Request) -> None:
        for kept in (self._requests, self._tables, self._saved):
            kept.pop(request.request_id, None)

    def unsaved_blocks(self, request: Request, tokens: int) -> int:
        """Blocks of the request's first ``tokens`` that have not been saved."""
        return -(-tokens // self._block_size) - self._saved.get(request.request_id, 0)

    def swapped_out(self, request: Request, tokens: int) -> None:
        """Note that the full blocks of the request's first ``tokens`` are saved another way."""
        full = tokens // self._block_size
        self._saved[request.request_id] = max(full, self._saved.get(request.request_id, 0))

    def saves(
        self, scheduled: SchedulerOutput, early: int, in_own_memory: Callable[[Request], bool]
    ) -> Iterator[dict[int, Save]]:
        """Saves beside this step, by rank.

        Args:
            scheduled: the step.
            early: blocks that may be saved of requests that do not hand over.
            in_own_memory: whether a request's blocks are where they can be copied.
        """
        self._tables.update(_block_tables(scheduled.kv_connector_block_state))
        for request_id, computed in _computed_tokens(scheduled).items():
            request = self._requests.get(request_id)
            if request is None or not in_own_memory(request):
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
            recompute_s = self._block_size * self._pace.s_per_token
            keep_s = HANDOFF_S if hands_over(request) else 0.0
            yield {
                rank: Save(name, keys, blocks, recompute_s, keep_s)
                for rank, name in enumerate(self._names.of_ranks(request.lora_request))
            }

    def _computed_keys(self, request: Request, tokens: int) -> bytes:
        """Keys of the blocks that are worth saving once ``tokens`` are computed."""
        # Under async scheduling the newest tokens, and so their block's hash, are not known.
        full = min(tokens // self._block_size, len(request.block_hashes))
        keys = chain_of(request, full)
        prompt = request.num_prompt_tokens
        tail = prompt - full * self._block_size
        if full and 0 < tail < self._block_size and tokens >= prompt and hands_over(request):
            keys += tail_key_of(request, keys, prompt, self._block_size, owned=False)
        return keys


def _block_tables(state: KVConnectorBlockState) -> Iterator[tuple[str, list[int]]]:
    """Block tables of the step's requests, each with its request's id."""
    if hasattr(state, "block_ids"):  # vLLM 0.29 has them at hand
        all_tables = state.block_ids.items()
    else:  # 0.32 looks them up
        all_tables = ((request_id, state.get_block_ids(request_id)) for request_id in state.req_ids)
    for request_id, tables in all_tables:
        yield request_id, list(tables[0])


def _computed_tokens(scheduled: SchedulerOutput) -> dict[str, int]:
    computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    cached = scheduled.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return computed
