"""What a replica measures about the memory and attention that it borrows or lends.

The gateway adds the labels ``model``, ``replica`` and ``device``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from loomserve.platform.lending.messages import LentReport, LoanReport


class LendingMetrics:
    """Metrics of one replica's loans; counters go on from one loan to the next."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counted: dict[tuple[str, str], int] = {}
        lender, borrower = ["lender"], ["borrower"]

        def gauge(name: str, says: str, labels: Sequence[str] = lender) -> Gauge:
            return Gauge(f"loomserve_lending_{name}", says, labels, registry=registry)

        def counter(name: str, says: str, labels: Sequence[str] = lender) -> Counter:
            return Counter(f"loomserve_lending_{name}", says, labels, registry=registry)

        self._borrowed_blocks = gauge("borrowed_blocks", "KV blocks that a lender grants.")
        self._borrowed_free_blocks = gauge(
            "borrowed_free_blocks", "Those of them that hold nothing."
        )
        self._requests = gauge("requests", "Running requests whose KV lies with a lender.")
        self._longest_wait = gauge(
            "longest_wait_seconds", "The longest wait for a lender since the loan was opened."
        )
        self._tasks = counter("tasks", "Attention of a layer that a lender computed.")
        self._post_seconds = counter("post_seconds", "Time that handing tasks to a lender took.")
        self._wait_seconds = counter("wait_seconds", "Time waited for a lender's results.")
        self._broken_loans = counter(
            "broken_loans", "Loans that ended by themselves, by reason.", ["reason"]
        )
        self._moved_requests = counter(
            "moved_requests",
            "Running requests whose KV was copied from a lender, to one, or from one to another.",
            [],
        )
        self._shard_away = gauge(
            "shard_away",
            "1 while a lender computes heads or layers of all requests, 0 while they move there.",
        )
        self._shard_pause = gauge(
            "shard_pause_seconds",
            "The longest that steps stood still for heads or layers to move, of the open loan.",
        )
        self._shard_bytes = counter("shard_copied_bytes", "KV of heads or layers that was copied.")
        self._lent_blocks = gauge(
            "lent_blocks", "The lender's own KV blocks that a borrower has.", borrower
        )
        self._pickup_seconds = counter(
            "pickup_seconds",
            "Time between a borrower's post of a task and the lender's start on it.",
            borrower,
        )
        self._service_seconds = counter(
            "service_seconds", "Time a lender computed for a borrower.", borrower
        )

    def borrowed(
        self, loans: Sequence[tuple[str, LoanReport]], broken: Mapping[str, int], moved: int
    ) -> None:
        for gauge in (
            self._borrowed_blocks,
            self._borrowed_free_blocks,
            self._requests,
            self._longest_wait,
        ):
            gauge.clear()
        for lender, loan in loans:
            self._borrowed_blocks.labels(lender).inc(loan.usable_blocks)
            self._borrowed_free_blocks.labels(lender).inc(loan.free_blocks)
            self._requests.labels(lender).inc(loan.requests)
            self._longest_wait.labels(lender).inc(loan.wait_max_ns * 1e-9)
            self._tasks.labels(lender).inc(self._growth(loan.name, "tasks", loan.tasks))
            post_s = 1e-9 * self._growth(loan.name, "post", loan.post_ns)
            self._post_seconds.labels(lender).inc(post_s)
            wait_s = 1e-9 * self._growth(loan.name, "wait", loan.wait_ns)
            self._wait_seconds.labels(lender).inc(wait_s)
        self._show_shards(loans)
        for reason, count in broken.items():
            self._broken_loans.labels(reason).inc(self._growth("", reason, count))
        self._moved_requests.inc(self._growth("", "moved", moved))

    def _show_shards(self, loans: Sequence[tuple[str, LoanReport]]) -> None:
        self._shard_away.clear()
        self._shard_pause.clear()
        for lender, loan in loans:
            if (shard := loan.shard) is not None:
                self._shard_away.labels(lender).set(shard.phase in ("away", "returning"))
                self._shard_pause.labels(lender).set(shard.pause_s)
                copied = self._growth(loan.name, "shard", shard.copied_bytes)
                self._shard_bytes.labels(lender).inc(copied)

    def lent(self, loans: Sequence[tuple[str, LentReport]]) -> None:
        self._lent_blocks.clear()
        for borrower, lent in loans:
            self._lent_blocks.labels(borrower).inc(lent.blocks)
            pickup = self._growth(lent.name, "pickup", lent.pickup_ns)
            self._pickup_seconds.labels(borrower).inc(1e-9 * pickup)
            service = self._growth(lent.name, "service", lent.service_ns)
            self._service_seconds.labels(borrower).inc(1e-9 * service)

    def _growth(self, loan: str, figure: str, total: int) -> int:
        """How much a loan's figure has grown since it was last counted. 0 where it shrank: the
        other end of a loan can write its counts."""
        before = self._counted.get((loan, figure), 0)
        self._counted[loan, figure] = total
        return max(0, total - before)
