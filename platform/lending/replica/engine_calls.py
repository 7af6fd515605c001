"""A replica's end of :class:`~loomserve.platform.lending.loan_calls.LoanCalls`, with types."""

from __future__ import annotations

from typing import Any, Protocol

from loomserve.platform.lending.messages import (
    BorrowerEngine,
    BorrowerReport,
    LendRequest,
    LentReport,
)
from loomserve.platform.state.lending_options import ShardSpec


class EngineRpc(Protocol):
    """Calls a loan method of the engine's scheduler between two steps; what it raises is plain."""

    async def __call__(self, method: str, /, *given: Any) -> Any: ...


class BorrowerCalls:
    """Calls to an engine that borrows: those of :class:`LoanCalls`."""

    def __init__(self, rpc: EngineRpc) -> None:
        self._rpc = rpc

    async def borrowing(self, shard: ShardSpec | None) -> BorrowerEngine:
        """What a lender has to know of this engine, or of a shard of it."""
        return BorrowerEngine.model_validate(await self._rpc("borrowing", shard))

    async def borrow(self, name: str, ring: str, shard: ShardSpec | None) -> int:
        """Use a loan that its lender has opened; returns its partition."""
        return int(await self._rpc("borrow", name, ring, shard))

    async def limit_loan(self, partition: int, most_bytes: int | None) -> None:
        """Keep at most ``most_bytes`` of KV there; None: as much as the lender grants."""
        await self._rpc("limit_loan", partition, most_bytes)

    async def drain_loan(self, partition: int) -> bool:
        """Start no request there any more; returns whether nothing is left there."""
        return bool(await self._rpc("drain_loan", partition))

    async def end_loan(self, partition: int) -> None:
        """Forget a loan in whatever state; what lies there is computed elsewhere."""
        await self._rpc("end_loan", partition)

    async def loan_state(self) -> BorrowerReport:
        """All loans that are open."""
        return BorrowerReport.model_validate(await self._rpc("loan_state"))


class LenderCalls:
    """Calls to an engine that lends: those of :class:`LoanCalls`."""

    def __init__(self, rpc: EngineRpc) -> None:
        self._rpc = rpc

    async def lend(self, request: LendRequest) -> int:
        """Open a loan; returns how many of the borrower's blocks may come to lie there."""
        engine = request.engine.model_dump()
        return int(await self._rpc("lend", request.name, request.ring, engine))

    async def end_lending(self, name: str) -> None:
        """Take a loan's memory back at once."""
        await self._rpc("end_lending", name)

    async def on_idle(self) -> None:
        """Lend more while the engine has no requests; call it about once a second."""
        await self._rpc("on_idle")

    async def lent_state(self) -> tuple[LentReport, ...]:
        """All loans that are open, or closed and not yet taken back."""
        return tuple(map(LentReport.model_validate, await self._rpc("lent_state")))
