"""What a replica measures about the memory and attention that it borrows or lends.

Like vLLM's own metrics they stand in the default registry of the engine's process; the gateway adds
the labels ``model``, ``replica`` and ``device``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import Counter, Gauge

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
PART_AWAY = Gauge(
    "loomserve_lending_part_away",
    "1 while a lender computes heads or layers of all requests, 0 while they move there.",
    ["lender"],
)
PART_PAUSE = Gauge(
    "loomserve_lending_part_pause_seconds",
    "The longest that steps stood still for heads or layers to move, of the open loan.",
    ["lender"],
)
PART_BYTES = Counter(
    "loomserve_lending_part_copied_bytes", "KV of heads or layers that was copied.", ["lender"]
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

_OF_BORROWERS = {
    "tasks": (TASKS, 1),
    "post_ns": (POST_SECONDS, 1e-9),
    "wait_ns": (WAIT_SECONDS, 1e-9),
}
_OF_LENDERS = {"pickup_ns": (PICKUP_SECONDS, 1e-9), "service_ns": (SERVICE_SECONDS, 1e-9)}

Loans = Iterable[tuple[str, Mapping[str, Any]]]
"""The other side's model, and what the engine says of the loan: names of its ring's statistics."""


class LendingMetrics:
    """Loans come and go; counters go on from one to the next."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, str], int] = {}

    def borrowed(self, loans: Loans, broken: Mapping[str, int], moved: int) -> None:
        """What a borrower's engine says of all its loans, how many ended by themselves, and how
        many requests moved."""
        gauges = {
            "usable_blocks": (BORROWED_BLOCKS, 1),
            "free_blocks": (BORROWED_FREE_BLOCKS, 1),
            "requests": (REQUESTS, 1),
            "wait_max_ns": (LONGEST_WAIT, 1e-9),
        }
        loans = list(loans)
        self._show(loans, gauges, _OF_BORROWERS)
        self._show_parts(loans)
        for reason, count in broken.items():
            BROKEN_LOANS.labels(reason).inc(self._growth(("", reason), count))
        MOVED_REQUESTS.inc(self._growth(("", "moved"), moved))

    def _show_parts(self, loans: Loans) -> None:
        PART_AWAY.clear()
        PART_PAUSE.clear()
        for other, loan in loans:
            if (part := loan["part"]) is not None:
                PART_AWAY.labels(other).set(part["phase"] in ("away", "returning"))
                PART_PAUSE.labels(other).set(part["pause_s"])
                copied = self._growth((loan["name"], "part"), part["copied_bytes"])
                PART_BYTES.labels(other).inc(copied)

    def lent(self, loans: Loans) -> None:
        """What a lender's engine says of all that it lends."""
        self._show(loans, {"blocks": (LENT_BLOCKS, 1)}, _OF_LENDERS)

    def _show(
        self,
        loans: Loans,
        gauges: Mapping[str, tuple[Gauge, float]],
        counters: Mapping[str, tuple[Counter, float]],
    ) -> None:
        for gauge, _ in gauges.values():
            gauge.clear()
        for other, loan in loans:
            for name, (gauge, unit) in gauges.items():
                gauge.labels(other).inc(loan[name] * unit)
            for name, (counter, unit) in counters.items():
                counter.labels(other).inc(self._growth((loan["name"], name), loan[name]) * unit)

    def _growth(self, of: tuple[str, str], total: int) -> int:
        before = self._counted.get(of, 0)
        self._counted[of] = total
        return total - before
