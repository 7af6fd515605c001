"""What a replica measures about the memory and attention that it borrows or lends.

Like vLLM's own metrics they stand in the default registry of the engine's process; the gateway adds
the labels ``model``, ``replica`` and ``device``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import Counter, Gauge

from loomserve.platform.lending.messages import LentReport, LoanReport

BORROWED_BLOCKS = Gauge(
    "loomserve_lending_borrowed_blocks", "KV blocks that a lender grants.", ["lender"]
)
BORROWED_FREE_BLOCKS = Gauge(
    "loomserve_lending_borrowed_free_blocks", "Those of them that hold nothing.", ["lender"]
)
REQUESTS = Gauge(
    "loomserve_lending_requests", "Running requests whose KV lies with a lender.", ["lender"]
)
LONGEST_WAIT = Gauge(
    "loomserve_lending_longest_wait_seconds",
    "The longest wait for a lender since the loan was opened.",
    ["lender"],
)
TASKS = Counter(
    "loomserve_lending_tasks", "Attention of a layer that a lender computed.", ["lender"]
)
POST_SECONDS = Counter(
    "loomserve_lending_post_seconds", "Time that handing tasks to a lender took.", ["lender"]
)
WAIT_SECONDS = Counter(
    "loomserve_lending_wait_seconds", "Time waited for a lender's results.", ["lender"]
)
BROKEN_LOANS = Counter(
    "loomserve_lending_broken_loans", "Loans that ended by themselves, by reason.", ["reason"]
)
MOVED_REQUESTS = Counter(
    "loomserve_lending_moved_requests",
    "Running requests whose KV was copied from a lender, to one, or from one to another.",
)
SHARD_AWAY = Gauge(
    "loomserve_lending_shard_away",
    "1 while a lender computes heads or layers of all requests, 0 while they move there.",
    ["lender"],
)
SHARD_PAUSE = Gauge(
    "loomserve_lending_shard_pause_seconds",
    "The longest that steps stood still for heads or layers to move, of the open loan.",
    ["lender"],
)
SHARD_BYTES = Counter(
    "loomserve_lending_shard_copied_bytes", "KV of heads or layers that was copied.", ["lender"]
)
LENT_BLOCKS = Gauge(
    "loomserve_lending_lent_blocks", "The lender's own KV blocks that a borrower has.", ["borrower"]
)
PICKUP_SECONDS = Counter(
    "loomserve_lending_pickup_seconds",
    "Time between a borrower's post of a task and the lender's start on it.",
    ["borrower"],
)
SERVICE_SECONDS = Counter(
    "loomserve_lending_service_seconds", "Time a lender computed for a borrower.", ["borrower"]
)


class LendingMetrics:
    """Metrics of one replica's loans; counters go on from one loan to the next."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, str], int] = {}

    def borrowed(
        self, loans: Sequence[tuple[str, LoanReport]], broken: Mapping[str, int], moved: int
    ) -> None:
        for gauge in (BORROWED_BLOCKS, BORROWED_FREE_BLOCKS, REQUESTS, LONGEST_WAIT):
            gauge.clear()
        for lender, loan in loans:
            BORROWED_BLOCKS.labels(lender).inc(loan.usable_blocks)
            BORROWED_FREE_BLOCKS.labels(lender).inc(loan.free_blocks)
            REQUESTS.labels(lender).inc(loan.requests)
            LONGEST_WAIT.labels(lender).inc(loan.wait_max_ns * 1e-9)
            TASKS.labels(lender).inc(self._growth(loan.name, "tasks", loan.tasks))
            POST_SECONDS.labels(lender).inc(1e-9 * self._growth(loan.name, "post", loan.post_ns))
            WAIT_SECONDS.labels(lender).inc(1e-9 * self._growth(loan.name, "wait", loan.wait_ns))
        self._show_shards(loans)
        for reason, count in broken.items():
            BROKEN_LOANS.labels(reason).inc(self._growth("", reason, count))
        MOVED_REQUESTS.inc(self._growth("", "moved", moved))

    def _show_shards(self, loans: Sequence[tuple[str, LoanReport]]) -> None:
        SHARD_AWAY.clear()
        SHARD_PAUSE.clear()
        for lender, loan in loans:
            if (shard := loan.shard) is not None:
                SHARD_AWAY.labels(lender).set(shard.phase in ("away", "returning"))
                SHARD_PAUSE.labels(lender).set(shard.pause_s)
                copied = self._growth(loan.name, "shard", shard.copied_bytes)
                SHARD_BYTES.labels(lender).inc(copied)

    def lent(self, loans: Sequence[tuple[str, LentReport]]) -> None:
        LENT_BLOCKS.clear()
        for borrower, lent in loans:
            LENT_BLOCKS.labels(borrower).inc(lent.blocks)
            pickup = self._growth(lent.name, "pickup", lent.pickup_ns)
            PICKUP_SECONDS.labels(borrower).inc(1e-9 * pickup)
            service = self._growth(lent.name, "service", lent.service_ns)
            SERVICE_SECONDS.labels(borrower).inc(1e-9 * service)

    def _growth(self, loan: str, figure: str, total: int) -> int:
        """How much a loan's figure has grown since it was last counted. 0 where it shrank: the
        other end of a loan can write its counts."""
        before = self._counted.get((loan, figure), 0)
        self._counted[loan, figure] = total
        return max(0, total - before)
