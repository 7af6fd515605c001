"""Reconciles a borrower's loans with those that the controller wants.

A loan is opened at the lender's replica first, which makes the task ring, then in the borrower's
engine. It ends in the reverse order, once no request's KV lies there. A loan that ended by itself,
because the lender stalled, died or wanted its memory back, is opened again after a backoff.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from loomserve.platform.fleet.messages import (
    INTERNAL_TOKEN_HEADER,
    LOANS_PATH,
    DesiredState,
    LenderReplica,
)
from loomserve.platform.lending.messages import (
    BorrowerEngine,
    BorrowerReport,
    EngineRpc,
    LendRequest,
    LoanReport,
)
from loomserve.platform.lending.metrics import LendingMetrics
from loomserve.platform.lending.ring.held import is_held
from loomserve.platform.run.sockets import PlatformConnector
from loomserve.platform.state import BorrowingState, LoanState, ShardState
from loomserve.platform.state.lending_options import ShardSpec

_log = logging.getLogger("ray.serve")

SHARED_MEMORY = Path("/dev/shm")
_RING_NAME = re.compile(r"loomserve-ring-(\d+)-")
# A lender answers between two steps of its engine.
_LENDER_TIMEOUT_S = 10.0
_LEAST_BACKOFF_S, _MOST_BACKOFF_S = 1.0, 60.0
_LIVED_LONG_S = 60.0
"""A loan that broke after so long does not lengthen the lender's backoff."""
_MISSES = 3
"""A controller that restarted knows all replicas after two heartbeats."""


class LenderError(Exception):
    """Refusal of a lender's replica."""


@dataclass
class _Loan:
    name: str
    partition: int
    lender: LenderReplica
    ring: Path
    opened_at: float
    most_bytes: int | None = None
    """Most bytes of KV that the engine keeps there; None: as much as the lender grants."""
    shard: ShardSpec | None = None
    """Shard of all requests that moves there; None: some requests lie there, as a whole."""
    drained_by: float | None = None
    """While it drains: time at which it ends whatever lies there."""


@dataclass
class _Backoff:
    wait_s: float
    until: float


class LoanReconciler:
    """Loans of one borrower's replica; times are monotonic seconds of the caller's clock."""

    def __init__(
        self,
        rpc: EngineRpc,
        metrics: LendingMetrics,
        *,
        model: str,
        replica_id: str,
        most: int,
        internal_token: str,
        drain_timeout_s: float,
        quiet: bool = False,
        folder: Path = SHARED_MEMORY,
    ) -> None:
        """The engine can have ``most`` loans at a time. ``quiet``: leave it alone while there is no
        loan, and none is to be. ``folder`` of the task rings is in shared memory."""
        self.state: BorrowingState | None = None
        self._rpc = rpc
        self._model, self._replica_id = model, replica_id
        self._most = most
        self._drain_timeout_s, self._quiet = drain_timeout_s, quiet
        self._folder = folder
        self._desired: DesiredState | None = None
        self._missed: Counter[str] = Counter()
        self._loans: dict[str, _Loan] = {}
        self._backoffs: dict[str, _Backoff] = {}
        self._problems: dict[str, str] = {}
        self._metrics = metrics
        self._session = aiohttp.ClientSession(
            headers={INTERNAL_TOKEN_HEADER: internal_token},
            connector=PlatformConnector(),
            timeout=aiohttp.ClientTimeout(total=_LENDER_TIMEOUT_S),
        )
        remove_left_rings(folder)

    def apply(self, desired: DesiredState) -> None:
        self._desired = desired
        named = {lender.id for lender in desired.lenders}
        for loan in self._loans.values():
            self._missed[loan.lender.id] += 1
        for lender_id in named:
            self._missed[lender_id] = 0

    async def reconcile(self, now: float) -> None:
        """Open, limit, drain and end loans until they are the desired ones."""
        if self._desired is None:
            return
        if self._quiet and not self._loans and not self._desired.lenders and self.state is not None:
            return  # the engine need not be asked
        there = {loan.name: loan for loan in (await self._report()).loans}
        for loan in list(self._loans.values()):
            if loan.name not in there:
                await self._on_loan_ended(loan, now)
            elif loan.drained_by is None and (home := _home(there[loan.name])) is not None:
                await self._on_loan_ended(loan, now, f"came home, since {home.why},")
            elif loan.drained_by is not None or not self._allowed(loan, self._desired):
                await self._drain(loan, now)
            else:
                await self._limit(loan, self._desired)
        for lender in self._missing(self._desired, now):
            await self._open(lender, self._desired.shards.get(lender.model), now)
        self._publish_metrics(await self._report(), self._desired, now)

    async def _report(self) -> BorrowerReport:
        return BorrowerReport.model_validate(await self._rpc("loan_state"))

    async def close(self) -> None:
        for loan in list(self._loans.values()):
            await self._end(loan)
        await self._session.close()

    def _allowed(self, loan: _Loan, desired: DesiredState) -> bool:
        return (
            self._missed[loan.lender.id] < _MISSES
            and loan.lender.model not in desired.lenders_off
            and desired.lender_limits.get(loan.lender.model) != 0
            and loan.name not in desired.drain_loans
            and loan.shard == desired.shards.get(loan.lender.model)
        )

    def _missing(self, desired: DesiredState, now: float) -> list[LenderReplica]:
        has = {loan.lender.model for loan in self._loans.values()}
        missing = [
            lender
            for lender in desired.lenders
            if lender.model not in has
            and desired.lender_limits.get(lender.model) != 0
            and (lender.id not in self._backoffs or self._backoffs[lender.id].until <= now)
        ]
        return missing[: self._most - len(self._loans)]

    async def _open(self, lender: LenderReplica, shard: ShardSpec | None, now: float) -> None:
        token = secrets.token_hex(4)
        name, ring = f"loan-{token}", self._folder / f"loomserve-ring-{os.getpid()}-{token}"
        try:
            request = LendRequest(
                name=name,
                ring=str(ring),
                borrower=self._model,
                engine=BorrowerEngine.model_validate(await self._rpc("borrowing", shard)),
            )
            await self._ask(lender, "POST", LOANS_PATH, request.model_dump())
            partition = await self._rpc("borrow", name, str(ring), shard)
        except Exception as error:  # vLLM raises no other where an engine's own call failed
            self._problems[lender.model] = str(error) or repr(error)
            self._back_off(lender, now)
            await self._give_back(lender, name, ring)
        else:
            loan = self._loans[name] = _Loan(name, partition, lender, ring, now, shard=shard)
            if self._desired is not None:
                await self._limit(loan, self._desired)
            self._problems.pop(lender.model, None)

    async def _limit(self, loan: _Loan, desired: DesiredState) -> None:
        most = desired.lender_limits.get(loan.lender.model)
        if loan.most_bytes != most:
            await self._rpc("limit_loan", loan.partition, most)
            loan.most_bytes = most

    async def _drain(self, loan: _Loan, now: float) -> None:
        if loan.drained_by is None:
            loan.drained_by = now + self._drain_timeout_s
        if await self._rpc("drain_loan", loan.partition) or now >= loan.drained_by:
            await self._end(loan)
            if self._desired is not None and loan.name in self._desired.drain_loans:
                # The operator wants no loan here for a while.
                self._backoffs[loan.lender.id] = _Backoff(_MOST_BACKOFF_S, now + _MOST_BACKOFF_S)

    async def _on_loan_ended(self, loan: _Loan, now: float, how: str = "ended by itself") -> None:
        lived_s = now - loan.opened_at
        _log.warning("the loan of %s at %s %s", self._model, loan.lender.id, how)
        self._problems[loan.lender.model] = f"the last loan {how} after {lived_s:.0f} s"
        if lived_s >= _LIVED_LONG_S:
            self._backoffs.pop(loan.lender.id, None)
        self._back_off(loan.lender, now)
        await self._end(loan)

    def _back_off(self, lender: LenderReplica, now: float) -> None:
        before = self._backoffs.get(lender.id)
        wait_s = min(2 * before.wait_s, _MOST_BACKOFF_S) if before else _LEAST_BACKOFF_S
        self._backoffs[lender.id] = _Backoff(wait_s, now + wait_s)

    async def _end(self, loan: _Loan) -> None:
        del self._loans[loan.name]
        with contextlib.suppress(Exception):  # as above; the engine may be dead
            await self._rpc("end_loan", loan.partition)
        await self._give_back(loan.lender, loan.name, loan.ring)

    async def _give_back(self, lender: LenderReplica, name: str, ring: Path) -> None:
        # A lender that does not answer finds out by itself.
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, LenderError):
            await self._ask(lender, "DELETE", f"{LOANS_PATH}/{name}", None)
        await asyncio.to_thread(ring.unlink, missing_ok=True)

    async def _ask(self, lender: LenderReplica, method: str, path: str, body: Any) -> None:
        url = f"http://{lender.address}{path}"
        async with self._session.request(method, url, json=body) as response:
            if response.status >= 400:
                error = (await response.json()).get("error", {})
                raise LenderError(error.get("message", f"{url} answered {response.status}"))

    def _publish_metrics(self, report: BorrowerReport, desired: DesiredState, now: float) -> None:
        known = [
            (self._loans[loan.name], loan) for loan in report.loans if loan.name in self._loans
        ]
        self._metrics.borrowed(
            [(loan.lender.model, counted) for loan, counted in known], report.broken, report.moved
        )
        self.state = BorrowingState(
            own_blocks=report.own_blocks,
            own_free_blocks=report.own_free_blocks,
            loans=tuple(self._state(loan, counted, now) for loan, counted in known),
            broken=report.broken,
            moved=report.moved,
            problems={
                lender.model: self._problems[lender.model]
                for lender in desired.lenders
                if lender.model in self._problems
            },
            switched_off=desired.lenders_off,
            limits=desired.lender_limits,
            shards=desired.shards,
        )

    def _state(self, loan: _Loan, counted: LoanReport, now: float) -> LoanState:
        age_s = now - loan.opened_at
        share = 1e-9 / age_s if age_s > 0 else 0.0
        return LoanState(
            name=loan.name,
            borrower=self._model,
            borrower_replica=self._replica_id,
            lender=loan.lender.model,
            lender_replica=loan.lender.id,
            draining=not counted.open,
            phase=counted.phase,
            most_tokens=counted.most_tokens,
            age_s=age_s,
            usable_blocks=counted.usable_blocks,
            free_blocks=counted.free_blocks,
            requests=counted.requests,
            tasks=counted.tasks,
            wait_mean_us=counted.wait_ns / 1000 / max(1, counted.tasks),
            wait_max_us=counted.wait_max_ns / 1000,
            wait_share=counted.wait_ns * share,
            service_share=counted.service_ns * share,
            shard=_shard(loan, counted.shard),
        )


def _home(loan: LoanReport) -> ShardState | None:
    """The loan's shard if it came home though nobody asked for it: its lender had no room for it,
    or was slow."""
    return loan.shard if loan.shard is not None and loan.shard.phase == "home" else None


def _shard(loan: _Loan, moved: ShardState | None) -> ShardState | None:
    if moved is None or loan.shard is None:
        return None
    return ShardState.model_validate({**moved.model_dump(), **loan.shard})


def remove_left_rings(folder: Path) -> None:
    """Remove the task rings of replicas that were killed, as shared memory outlives processes.
    Where containers share the memory but not their process ids, a ring's maker seems dead: what a
    process still maps stays."""
    for path in folder.iterdir():
        left = _RING_NAME.match(path.name)
        if left and not psutil.pid_exists(int(left[1])):
            with contextlib.suppress(OSError):  # another user's, or removed by another replica
                if not is_held(path):
                    path.unlink()
