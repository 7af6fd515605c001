"""HTTP endpoint at which borrowers open and end loans with a lender's replica.

Memory comes back even if no borrower ends a loan: when the task ring is closed, because one end
gave the loan up, or when no live borrower knows of the loan any more.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from loomserve.platform.base.errors import Conflict
from loomserve.platform.fleet.messages import LOANS_PATH, DesiredState
from loomserve.platform.lending.messages import EngineRpc, LendAnswer, LendRequest, LentReport
from loomserve.platform.lending.metrics import LendingMetrics
from loomserve.platform.lending.policy.slicing import SlicingPlan
from loomserve.platform.state import LentState, SlicingState

_MISSES = 6
"""Heartbeats in a row, answered without a loan: a new loan or controller takes a few."""


class LoanEndpoint:
    """Loans of one lender's replica."""

    def __init__(
        self,
        rpc: EngineRpc,
        metrics: LendingMetrics,
        *,
        model: str,
        replica_id: str,
        quiet: bool = False,
    ) -> None:
        """``quiet``: leave the engine alone while it lends nothing."""
        self.lent: tuple[LentState, ...] = ()
        self._rpc = rpc
        self._model, self._replica_id, self._quiet = model, replica_id, quiet
        self._borrowers: dict[str, str] = {}
        self._missed: Counter[str] = Counter()
        self._draining = False
        self._metrics = metrics
        # A borrower that waits no longer for its loan ends it while the engine still opens it.
        self._one_at_a_time = asyncio.Lock()

    @property
    def routes(self) -> list[Route]:
        return [
            Route(LOANS_PATH, self._lend, methods=["POST"]),
            Route(LOANS_PATH + "/{name}", self._end, methods=["DELETE"]),
        ]

    def apply(self, desired: DesiredState) -> None:
        self._draining = desired.draining
        self._missed = Counter(
            {name: self._missed[name] + 1 for name in self._borrowers if name not in desired.loans}
        )

    async def reconcile(self) -> None:
        async with self._one_at_a_time:
            if self._quiet and not self._borrowers and not self.lent:
                return  # the engine need not be asked
            await self._rpc("on_idle")
            for lent in await self._reports():
                if not lent.is_open or self._missed[lent.name] >= _MISSES:
                    await self._take_back(lent.name)
            await self._publish_metrics()

    async def close(self) -> None:
        self._draining = True
        async with self._one_at_a_time:
            for name in list(self._borrowers):
                await self._take_back(name)

    async def _lend(self, request: Request) -> Response:
        asked = LendRequest.model_validate_json(await request.body())
        async with self._one_at_a_time:
            if self._draining:
                return _refusal(f"replica {self._replica_id} drains")
            try:
                engine = asked.engine.model_dump()
                blocks = await self._rpc("lend", asked.name, asked.ring, engine)
            except Exception as error:  # vLLM raises no other where an engine's own call failed
                return _refusal(str(error))
            self._borrowers[asked.name] = asked.borrower
            await self._publish_metrics()
        return JSONResponse(LendAnswer(blocks=blocks).model_dump())

    async def _end(self, request: Request) -> Response:
        async with self._one_at_a_time:
            known = request.path_params["name"] in self._borrowers
            if known:
                await self._take_back(request.path_params["name"])
                await self._publish_metrics()
        return JSONResponse({"ended": known})

    async def _take_back(self, name: str) -> None:
        self._borrowers.pop(name, None)
        await self._rpc("end_lending", name)

    async def _reports(self) -> list[LentReport]:
        return [LentReport.model_validate(each) for each in await self._rpc("lent_state")]

    async def _publish_metrics(self) -> None:
        reports = {lent.name: lent for lent in await self._reports()}
        # The engine ends by itself what it sees to be closed.
        for name in self._borrowers.keys() - reports.keys():
            del self._borrowers[name]
        known = [(self._borrowers.get(name, ""), lent) for name, lent in reports.items()]
        self._metrics.lent(known)
        self.lent = tuple(self._state(borrower, lent) for borrower, lent in known)

    def _state(self, borrower: str, lent: LentReport) -> LentState:
        return LentState(
            name=lent.name,
            lender=self._model,
            lender_replica=self._replica_id,
            borrower=borrower,
            blocks=lent.blocks,
            most_blocks=lent.most_blocks,
            taken_back_blocks=lent.taken_back_blocks,
            tasks=lent.served,
            wait_us=lent.pickup_ns / 1000 / max(1, lent.served),
            service_us=lent.service_ns / 1000 / max(1, lent.served),
            slicing={kind: _slicing(plan) for kind, plan in lent.slicing.items()},
        )


def _slicing(plan: SlicingPlan) -> SlicingState:
    return SlicingState(
        # All layers' operators of a name are alike, so they are sliced alike.
        slices={name.rpartition(".")[2]: count for name, count in plan.slices.items() if count > 1},
        wait_whole_us=1e6 * plan.wait_before_s,
        wait_us=1e6 * plan.wait_after_s,
    )


def _refusal(message: str) -> Response:
    error = Conflict(message)
    return JSONResponse(error.body(), error.status)
