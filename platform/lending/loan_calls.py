"""Calls of a replica to its own engine's scheduler that open, change, show and end loans."""

from __future__ import annotations

from typing import Any, Protocol

from loomserve.platform.state.lending_options import ShardSpec


class LoanCalls(Protocol):
    """Loan calls as the engine answers them, between two steps.

    They cross vLLM's RPC by these names, with what they take and return as JSON; classes of
    :mod:`loomserve.platform.lending.messages` give it types. ``ValueError`` refuses a call.
    """

    # Of a borrower.

    def borrowing(self, shard: ShardSpec | None = None) -> dict[str, Any]:
        """A :class:`BorrowerEngine` of this engine, or of a shard of it."""

    def borrow(self, name: str, path: str, shard: ShardSpec | None = None) -> int:
        """Use a loan that its lender has opened.

        Args:
            name: the loan's, for whoever looks at this engine.
            path: of its task ring.
            shard: moves there while steps run; None: whole requests start there.

        Returns:
            The partition of its blocks.

        Raises:
            ValueError: no partition is free, that shard cannot move, or this engine lends.
        """

    def limit_loan(self, partition: int, most_bytes: int | None) -> None:
        """Use at most ``most_bytes`` of a loan; None: all that the lender grants.

        What lies beyond moves where there is room, or is computed again.
        """

    def drain_loan(self, partition: int) -> bool:
        """Start no request there any more; returns whether nothing is left there.

        Requests for which another partition has room move there at once. A shard that is there
        comes home.
        """

    def end_loan(self, partition: int) -> None:
        """Compute elsewhere what is left there, and forget the loan, whatever its state."""

    def loan_state(self) -> dict[str, Any]:
        """A :class:`BorrowerReport`."""

    def place(self, placement: str, lent_share: float) -> None:
        """Start requests where this policy says from now on."""

    # Of a lender.

    def lend(self, name: str, path: str, borrower: dict[str, Any]) -> int:
        """Open a loan, as large as the borrower asks or as there is left to lend.

        Args:
            name: the loan's.
            path: of the task ring that is made for it.
            borrower: its :class:`BorrowerEngine`.

        Returns:
            How many of the borrower's blocks may come to lie there.

        Raises:
            ValueError: too little is left to lend, or this engine borrows.
        """

    def end_lending(self, name: str) -> None:
        """Take everything back at once; the borrower computes elsewhere what it had here."""

    def on_idle(self) -> None:
        """Lend more while the engine has no requests.

        It is called about once a second, as an engine without requests does not schedule.
        """

    def look_for_tasks(self, polling: str) -> dict[str, Any]:
        """Look for tasks as ``lending.polling`` says; returns how operators are sliced."""

    def lent_state(self) -> list[dict[str, Any]]:
        """A :class:`LentReport` of each loan."""
