"""Where borrowers open and end loans at a lender's replica.

What is lent comes back even if nobody says so: when the ring is closed, because a side gave the
loan up, or when no live borrower knows of the loan any more.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from loomserve.platform.base.errors import Conflict
from loomserve.platform.fleet.messages import LOANS_PATH, DesiredState, LoanRequest
from loomserve.platform.lending.metrics import LendingMetrics
from loomserve.platform.lending.replica.reconciler import Call
from loomserve.platform.state import LentState, SlicingState

_OPEN = "OPEN"
_MISSES = 6
"""Orders in a row without a loan: time enough for a new loan, or controller, to be told of."""


class LoanEndpoint:
    """All that one lender's replica lends."""

    def __init__(self, call: Call, *, model: str, replica_id: str) -> None:
        """
        Args:
            call: to the engine that lends.
            model: whose engine that is.
            replica_id: the replica's.
        """
        self.lent: tuple[LentState, ...] = ()
        self._call = call
        self._model, self._replica_id = model, replica_id
        self._borrowers: dict[str, str] = {}
        self._missed: Counter[str] = Counter()
        self._draining = False
        self._metrics = LendingMetrics()
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
        """Take back what nobody uses any more, and look at the rest."""
        async with self._one_at_a_time:
            await self._call("rest")
            for lent in await self._call("lent_state"):
                if lent["closed"] != _OPEN or self._missed[lent["name"]] >= _MISSES:
                    await self._take_back(lent["name"])
            await self._publish_metrics()

    async def close(self) -> None:
        """Take all back and lend no more; borrowers compute elsewhere what they have here."""
        self._draining = True
        async with self._one_at_a_time:
            for name in list(self._borrowers):
                await self._take_back(name)

    async def _lend(self, request: Request) -> Response:
        asked = LoanRequest.model_validate_json(await request.body())
        async with self._one_at_a_time:
            if self._draining:
                return _refusal(f"replica {self._replica_id} drains")
            try:
                blocks = await self._call("lend", asked.name, asked.ring, asked.guest)
            except Exception as error:  # vLLM raises no other where an engine's own call failed
                return _refusal(str(error))
            self._borrowers[asked.name] = asked.borrower
            await self._publish_metrics()
        return JSONResponse({"blocks": blocks})

    async def _end(self, request: Request) -> Response:
        async with self._one_at_a_time:
            known = request.path_params["name"] in self._borrowers
            if known:
                await self._take_back(request.path_params["name"])
                await self._publish_metrics()
        return JSONResponse({"ended": known})

    async def _take_back(self, name: str) -> None:
        self._borrowers.pop(name, None)
        await self._call("end_lending", name)

    async def _publish_metrics(self) -> None:
        lent_state = {lent["name"]: lent for lent in await self._call("lent_state")}
        # The engine ends by itself what it sees to be closed.
        for name in self._borrowers.keys() - lent_state.keys():
            del self._borrowers[name]
        said = [(self._borrowers.get(name, ""), lent) for name, lent in lent_state.items()]
        self._metrics.lent(said)
        self.lent = tuple(self._state(borrower, lent) for borrower, lent in said)

    def _state(self, borrower: str, lent: Mapping[str, Any]) -> LentState:
        tasks = lent["polled"] + lent["idled"]
        return LentState(
            name=lent["name"],
            lender=self._model,
            lender_replica=self._replica_id,
            borrower=borrower,
            blocks=lent["blocks"],
            most_blocks=lent["most_blocks"],
            taken_back_blocks=lent["taken_back"],
            tasks=tasks,
            wait_us=lent["pickup_ns"] / 1000 / max(1, tasks),
            service_us=lent["service_ns"] / 1000 / max(1, tasks),
            slicing={kind: _split(plan) for kind, plan in lent["plans"].items()},
        )


def _split(plan: Mapping[str, Any]) -> SlicingState:
    return SlicingState(
        # All layers' operators of a name are alike, so they are cut alike.
        slices={
            name.rpartition(".")[2]: parts for name, parts in plan["parts"].items() if parts > 1
        },
        wait_whole_us=1e6 * plan["wait_before_s"],
        wait_us=1e6 * plan["wait_after_s"],
    )


def _refusal(message: str) -> Response:
    error = Conflict(message)
    return JSONResponse(error.body(), error.status)
