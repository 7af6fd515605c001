"""Both ends of a replica's calls to its engine agree on names and parameters."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from loomserve.platform.lending.loan_calls import LoanCalls
from loomserve.platform.lending.messages import BorrowerEngine, BorrowerReport, LendRequest
from loomserve.platform.lending.replica.engine_calls import BorrowerCalls, LenderCalls

pytestmark = pytest.mark.anyio
ENGINE = BorrowerEngine(
    geometry="{}", blocks=8, least=1, max_tokens=64, max_requests=4, max_blocks=16
)
REPORT = BorrowerReport(own_blocks=8, own_free_blocks=3, moved=0, broken={}, loans=())


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Engine:
    """Refuses what the engine's end has no method or no parameters for."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def __call__(self, method: str, *given: Any) -> Any:
        inspect.signature(getattr(LoanCalls, method)).bind(self, *given)
        return self._answer


async def test_a_borrowers_calls_are_known_to_its_engine() -> None:
    shard = {"heads": 1}
    assert await BorrowerCalls(Engine(ENGINE.model_dump())).borrowing(shard) == ENGINE
    assert await BorrowerCalls(Engine(2)).borrow("loan-1", "/dev/shm/ring", shard) == 2
    await BorrowerCalls(Engine(None)).limit_loan(2, 100)
    assert await BorrowerCalls(Engine(True)).drain_loan(2)
    await BorrowerCalls(Engine(None)).end_loan(2)
    assert await BorrowerCalls(Engine(REPORT.model_dump())).loan_state() == REPORT


async def test_a_lenders_calls_are_known_to_its_engine() -> None:
    request = LendRequest(name="loan-1", ring="/dev/shm/ring", borrower="hot", engine=ENGINE)
    assert await LenderCalls(Engine(8)).lend(request) == 8
    await LenderCalls(Engine(None)).end_lending("loan-1")
    await LenderCalls(Engine(None)).on_idle()
    assert await LenderCalls(Engine([])).lent_state() == ()
