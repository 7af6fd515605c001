"""What a borrower learns of its lenders from each step."""

from __future__ import annotations

import time
from collections.abc import Mapping

from loomserve.platform.lending.engine.block_partitions import OWN
from loomserve.platform.lending.engine.scheduling.loan import Loan
from loomserve.platform.lending.engine.scheduling.partition_use import PartitionUse
from loomserve.platform.lending.policy.limits import Observation, after
from loomserve.platform.lending.policy.partition_costs import PartitionCosts

_SMOOTHING = 0.1


class LoanObserver:
    """Updates the costs of partitions and the limit of each loan after a step."""

    def __init__(
        self, loans: Mapping[int, Loan], use: PartitionUse, costs: PartitionCosts, kv_heads: int
    ) -> None:
        self._loans = loans
        self._use = use
        self._costs = costs
        self._kv_heads = kv_heads

    def observe(self, step_s: float) -> None:
        """Learn from a step that has just ended after ``step_s`` seconds."""
        now = time.perf_counter()
        self._costs.saw_step(step_s)
        for loan in self._loans.values():
            self._observe(loan, step_s, now)

    def _observe(self, loan: Loan, step_s: float, now: float) -> None:
        before, loan.seen = loan.seen, loan.ring.stats()
        grown = loan.seen.since(before)
        service_s, delay_s, wait_s = (
            ns / 1e9 for ns in (grown.service_ns, grown.pickup_ns, grown.wait_ns)
        )
        tasks = grown.tasks
        tokens = self._attended_by(loan)
        self._costs.saw_lender(loan.partition, tokens, service_s, delay_s)
        loan.limit = after(
            loan.limit,
            Observation(
                tasks=tasks,
                step_s=step_s,
                late_s=min(step_s, max(0.0, wait_s - service_s)),
                # The ring keeps the longest ever. In a step with a stall, what was not service
                # exceeds the usual by it.
                worst_wait_s=max(0.0, wait_s - service_s - tasks * loan.usual_delay_s),
                timed_out=False,
                used_tokens=tokens,
            ),
            now,
        )
        if tasks:
            delay_s = max(0.0, wait_s - service_s) / tasks
            loan.usual_delay_s += _SMOOTHING * (delay_s - loan.usual_delay_s)

    def _attended_by(self, loan: Loan) -> int:
        """Tokens of context there, as many as if all of their heads were."""
        if loan.shard is None:
            return self._use.context_on(loan.partition)
        if loan.layers:
            return 0
        away = loan.shard.away * loan.ring.geometry.kv_heads
        return self._use.context_on(OWN) * away // self._kv_heads
