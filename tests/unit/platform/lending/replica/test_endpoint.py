"""What a lender's replica lends, with an engine that only answers."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from loomserve.platform.fleet.messages import LOANS_PATH, DesiredState
from loomserve.platform.lending.engine.scheduling.calls import EngineLoanCalls
from loomserve.platform.lending.messages import BorrowerEngine, LendRequest
from loomserve.platform.lending.metrics import LendingMetrics
from loomserve.platform.lending.replica.endpoint import LoanEndpoint
from loomserve.platform.state.roles import Role

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Cold:
    """Answers as a lender's engine does."""

    loans: dict[str, dict[str, Any]] = field(default_factory=dict)

    async def call(self, name: str, *given: Any) -> Any:
        inspect.signature(getattr(EngineLoanCalls, name)).bind(self, *given)
        return getattr(self, name)(*given)

    def lend(self, name: str, ring: str, borrower: dict[str, Any]) -> int:
        if self.loans:
            raise Exception("nothing is left to lend")  # as vLLM does
        self.loans[name] = {
            "name": name, "blocks": 3, "most_blocks": 6, "closed": "OPEN",
            "taken_back_blocks": 1,
            "service_ns": 50_000, "pickup_ns": 70_000, "polled": 6, "idled": 4,
            "slicing": {"decode": {
                "slices": {"layers.0.o_proj": 1, "lm_head": 8}, "wait_before_s": 1e-3,
                "wait_after_s": 1e-4,
            }},
        }  # fmt: skip
        return int(borrower["blocks"])

    def end_lending(self, name: str) -> None:
        self.loans.pop(name, None)

    def on_idle(self) -> None:
        pass

    def lent_state(self) -> list[dict[str, Any]]:
        return list(self.loans.values())


@pytest.fixture
def cold() -> Cold:
    return Cold()


@pytest.fixture
def endpoint(cold: Cold) -> LoanEndpoint:
    return LoanEndpoint(
        cold.call, LendingMetrics(CollectorRegistry()), model="cold", replica_id="c0"
    )


@pytest.fixture
async def client(endpoint: LoanEndpoint) -> AsyncIterator[httpx.AsyncClient]:
    app = httpx.ASGITransport(Starlette(routes=endpoint.routes))
    async with httpx.AsyncClient(transport=app, base_url="http://lender") as made:
        yield made


def desired(*loans: str, draining: bool = False) -> DesiredState:
    return DesiredState(
        draining=draining, stop_timeout_s=60, role=Role.UNIFIED, peers=(), loans=loans
    )


def loan(name: str = "loan-1") -> dict[str, Any]:
    engine = BorrowerEngine(
        geometry="{}", blocks=8, least=1, max_tokens=64, max_requests=4, max_blocks=16
    )
    request = LendRequest(name=name, ring="/dev/shm/x", borrower="hot", engine=engine)
    return request.model_dump()


async def test_a_loan_is_shown_from_its_opening_to_its_end(
    cold: Cold, endpoint: LoanEndpoint, client: httpx.AsyncClient
) -> None:
    assert (await client.post(LOANS_PATH, json=loan())).json() == {"blocks": 8}
    (lent,) = endpoint.lent
    assert (lent.name, lent.lender, lent.lender_replica, lent.borrower) == (
        "loan-1", "cold", "c0", "hot",
    )  # fmt: skip
    assert (lent.blocks, lent.most_blocks, lent.taken_back_blocks) == (3, 6, 1)
    assert (lent.tasks, lent.wait_us, lent.service_us) == (10, 7, 5)
    decode = lent.slicing["decode"]
    assert decode.slices == {"lm_head": 8}
    assert (decode.wait_whole_us, decode.wait_us) == pytest.approx((1000, 100))
    cold.loans["loan-1"]["blocks"] = 5
    await endpoint.reconcile()
    assert endpoint.lent[0].blocks == 5
    assert (await client.delete(f"{LOANS_PATH}/loan-1")).json() == {"ended": True}
    assert not cold.loans
    assert not endpoint.lent
    assert (await client.delete(f"{LOANS_PATH}/loan-1")).json() == {"ended": False}


async def test_an_engine_that_lends_nothing_is_left_alone(cold: Cold) -> None:
    asked: list[str] = []

    async def call(name: str, *given: Any) -> Any:
        asked.append(name)
        return await cold.call(name, *given)

    endpoint = LoanEndpoint(
        call, LendingMetrics(CollectorRegistry()), model="cold", replica_id="c0", quiet=True
    )
    await endpoint.reconcile()
    assert not asked
    app = httpx.ASGITransport(Starlette(routes=endpoint.routes))
    async with httpx.AsyncClient(transport=app, base_url="http://lender") as client:
        await client.post(LOANS_PATH, json=loan())
    await endpoint.reconcile()
    assert asked.count("on_idle") == 1


async def test_what_the_engine_refuses_is_told_in_its_words(client: httpx.AsyncClient) -> None:
    await client.post(LOANS_PATH, json=loan())
    refused = await client.post(LOANS_PATH, json=loan("loan-2"))
    assert refused.status_code == 409
    assert refused.json()["error"]["message"] == "nothing is left to lend"


async def test_a_replica_that_drains_lends_nothing_more(
    cold: Cold, endpoint: LoanEndpoint, client: httpx.AsyncClient
) -> None:
    endpoint.apply(desired(draining=True))
    refused = await client.post(LOANS_PATH, json=loan())
    assert refused.status_code == 409
    assert "c0 drains" in refused.json()["error"]["message"]
    assert not cold.loans


@pytest.mark.parametrize("reason", ["DIED", "TIMED_OUT", "REVOKED"])
async def test_a_loan_that_a_side_gave_up_is_taken_back(
    cold: Cold, endpoint: LoanEndpoint, client: httpx.AsyncClient, reason: str
) -> None:
    await client.post(LOANS_PATH, json=loan())
    cold.loans["loan-1"]["closed"] = reason
    await endpoint.reconcile()
    assert not cold.loans
    assert not endpoint.lent


async def test_a_loan_that_the_engine_ended_by_itself_is_forgotten(
    cold: Cold, endpoint: LoanEndpoint, client: httpx.AsyncClient
) -> None:
    await client.post(LOANS_PATH, json=loan())
    cold.loans.clear()
    await endpoint.reconcile()
    assert not endpoint.lent
    assert (await client.delete(f"{LOANS_PATH}/loan-1")).json() == {"ended": False}


async def test_a_loan_that_no_live_borrower_knows_is_taken_back_but_not_at_once(
    cold: Cold, endpoint: LoanEndpoint, client: httpx.AsyncClient
) -> None:
    await client.post(LOANS_PATH, json=loan())
    for told in [desired()] * 5 + [desired("loan-1")] + [desired()] * 5:
        endpoint.apply(told)
        await endpoint.reconcile()
        assert cold.loans
    endpoint.apply(desired("loan-2"))
    await endpoint.reconcile()
    assert not cold.loans


async def test_a_replica_that_ends_takes_back_all_that_it_lends(
    cold: Cold, endpoint: LoanEndpoint, client: httpx.AsyncClient
) -> None:
    await client.post(LOANS_PATH, json=loan())
    await endpoint.close()
    assert not cold.loans
    assert (await client.post(LOANS_PATH, json=loan())).status_code == 409
