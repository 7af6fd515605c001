"""Swap space in the KV store for preempted requests, and the policy of all copies to the store."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from loomserve.kvstore.engine.connector_scheduler import StoreConnectorScheduler
from loomserve.kvstore.engine.messages import SchedulingStats, Transferred
from loomserve.platform.engine.scheduling.costs import EngineCosts
from loomserve.platform.scheduling.options import SchedulerOptions
from loomserve.platform.scheduling.policy.preemption import PREEMPTIONS, PreemptionMode, Victim

# vLLM's placeholder in block tables, where a sliding window has passed.
_NULL_BLOCK = 0
# Weight of the newest step in the mean.
_NEWEST = 0.1
# Of a step's time, for saving blocks beside it; what is waited for lengthens the mean step.
_HIDING = 0.8
# A link that was too slow for that is tried again after so long.
_LOOK_AGAIN_S = 10.0
_TOTALS = (
    "swapped_out", "swapped_in", "recomputed", "lost_tokens", "decision_s", "step_s", "out_s",
    "out_predicted_s", "in_s", "in_predicted_s",
)  # fmt: skip


class SwapEntry(NamedTuple):
    tokens: int
    size: int
    """Bytes."""


class SwapSpace:
    """Preempted requests whose KV waits in the KV store, within a budget of bytes.

    It is the :class:`TransferPolicy` of the engine's connector too. Without a ``connector`` nothing
    is ever swapped out.
    """

    def __init__(
        self,
        connector: StoreConnectorScheduler | None,
        costs: EngineCosts,
        in_own_memory: Callable[[Request], bool],
    ) -> None:
        self.totals = dict.fromkeys(_TOTALS, 0.0)
        """Counts and seconds since the engine's start."""
        self.in_own_memory = in_own_memory
        self.mean_step_s = 0.0
        self.copied_out_at = -math.inf
        self._connector = connector
        self._costs = costs
        self._entries: dict[str, SwapEntry] = {}

    def use(self, options: SchedulerOptions) -> None:
        self._options = options
        self.mode_of = PREEMPTIONS[options.preemption]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def tokens_of(self, request_id: str) -> int | None:
        """Tokens of a request in swap space; None if it is not swapped out."""
        entry = self._entries.get(request_id)
        return entry.tokens if entry is not None else None

    def forget(self, request: Request) -> None:
        self._entries.pop(request.request_id, None)

    def swap_out(self, request: Request, table: Sequence[int]) -> bool:
        """Send the KV of a request to swap space, if it is worth it; ``table`` has its blocks."""
        # What a step in flight computes is not known here.
        tokens = request.num_computed_tokens - request.num_in_flight_tokens
        if self._connector is None or tokens <= 0 or request.skip_reading_prefix_cache:
            return False
        blocks = list(table[: self._costs.blocks(tokens)])
        if _NULL_BLOCK in blocks:
            return False
        size = len(blocks) * self._costs.block_bytes
        unsaved = self._connector.unsaved_blocks(request, tokens) * self._costs.block_bytes
        recompute_s, times = self._costs.prefill_s(tokens), self._costs.transfer_times
        victim = Victim(size, times.out.seconds(unsaved) + times.into.seconds(size), recompute_s)
        if self.mode_of(victim, self._free_bytes) is not PreemptionMode.SWAP:
            return False
        self._connector.swap_out(request, tokens, blocks, recompute_s, time.monotonic())
        self._entries[request.request_id] = SwapEntry(tokens, size)
        self.totals["swapped_out"] += 1
        return True

    def note_swap_ins(self, requests: Mapping[str, Request], scheduled: SchedulerOutput) -> None:
        """Forget swapped-out requests that have memory again after this schedule."""
        for name in list(self._entries):
            request = requests[name]
            if request.status in (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS):
                tokens, _ = self._entries.pop(name)
                found = request.num_computed_tokens - scheduled.num_scheduled_tokens.get(name, 0)
                self.totals["swapped_in"] += 1
                self.totals["lost_tokens"] += max(0, tokens - found)

    @property
    def used_bytes(self) -> int:
        return sum(entry.size for entry in self._entries.values())

    @property
    def _free_bytes(self) -> int:
        return self._options.swap_bytes - self.used_bytes

    @property
    def most_blocks(self) -> int:
        return self._options.swap_bytes // self._costs.block_bytes

    def blocks_instead(self, held: int, requests: int) -> int:
        """Blocks that swap space takes instead of memory, where that beats computing them again.
        Then memory may stay full: a request that leaves costs two copies. ``requests`` have
        ``held`` blocks in memory."""
        if not requests or self._connector is None:
            return 0
        if not self._costs.worth_swapping(held * self._costs.block_size // requests):
            return 0
        return self._free_bytes // self._costs.block_bytes

    def on_step(self, seconds: float) -> None:
        mean = self.mean_step_s
        self.mean_step_s = mean + _NEWEST * (seconds - mean) if mean else seconds

    # The connector's policy

    @property
    def prefetches(self) -> bool:
        return self._options.prefetch_swap_in

    def worth_loading(self, tokens: int) -> bool:
        return self._costs.worth_loading(tokens)

    def early_blocks(self, tokens: int) -> int:
        """Blocks that are copied while a step of so many tokens is computed."""
        if not self._options.overlap_swap:
            return 0
        if not self.mean_step_s:
            return sys.maxsize
        step_s = _HIDING * max(self.mean_step_s, self._costs.prefill_s(tokens))
        hidden = int(step_s / self._costs.transfer_times.out.seconds(self._costs.block_bytes))
        # Now and then one, or nobody would see that the link has become faster.
        return max(hidden, int(time.monotonic() - self.copied_out_at > _LOOK_AGAIN_S))

    def on_transfer(self, done: Transferred) -> None:
        times = self._costs.transfer_times
        if done.out_bytes:
            self.copied_out_at = time.monotonic()
            self.totals["out_s"] += done.out_s
            self.totals["out_predicted_s"] += times.out.seconds(done.out_bytes)
            times.out.observe(done.out_bytes, done.out_s)
        if done.in_bytes:
            self.totals["in_s"] += done.in_s
            self.totals["in_predicted_s"] += times.into.seconds(done.in_bytes)
            times.into.observe(done.in_bytes, done.in_s)

    def stats(self) -> SchedulingStats:
        times = self._costs.transfer_times
        return SchedulingStats.of(
            {
                **self.totals,
                "step_predicted_s": self._costs.step_times.predicted_s,
                "preemption": self._options.preemption,
                "queue": self._options.queue,
                "swap_used_bytes": self.used_bytes,
                "swap_capacity_bytes": self._options.swap_bytes,
                "step_time_error": self._costs.step_times.error or None,
                "swap_time_error": times.error or None,
            }
        )
