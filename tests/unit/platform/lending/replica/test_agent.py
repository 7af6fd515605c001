"""A replica's agent for loans: which ends it has."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from loomserve.platform.config import Device, Model, Server
from loomserve.platform.fleet.messages import LOANS_PATH, EngineSpec
from loomserve.platform.lending.replica.agent import LoanAgent
from loomserve.platform.scheduling.options import scheduler_options
from loomserve.platform.state.lending_options import LendingOptions

pytestmark = pytest.mark.anyio
MODEL = Model(name="org/m", source="org/m", devices=("core0",))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Engine:
    """Has no loans."""

    def __init__(self) -> None:
        self.called: list[str] = []

    async def call(self, method: str, *given: Any) -> Any:
        self.called.append(method)
        return []


def agent(engine: Engine, lending: LendingOptions | None) -> LoanAgent:
    spec = EngineSpec(
        model=MODEL,
        devices=(Device(name="core0", kind="cpu", cores=(0,)),),
        path="/models/m",
        internal_token="secret",
        server=Server(drain_timeout_s=30),
        kv_transfer_config=None,
        scheduling=scheduler_options(MODEL, None),
        lending=lending,
    )
    return LoanAgent(engine.call, spec, "r0", CollectorRegistry())


async def test_a_replica_that_neither_lends_nor_borrows_asks_its_engine_nothing() -> None:
    engine = Engine()
    nobody = agent(engine, None)
    await nobody.run()
    await nobody.take_back()
    await nobody.give_back()
    assert (engine.called, nobody.routes, nobody.borrowing, nobody.lent) == ([], [], None, ())


async def test_only_a_lender_listens_for_loans() -> None:
    engine = Engine()
    lender = agent(engine, LendingOptions(lend_bytes=2**20))
    borrower = agent(engine, LendingOptions(borrow_bytes=2**20))
    assert {route.path for route in lender.routes} == {LOANS_PATH, LOANS_PATH + "/{name}"}
    assert borrower.routes == []
    await lender._reconcile()
    assert engine.called == ["on_idle", "lent_state", "lent_state"]
    await borrower.give_back()
