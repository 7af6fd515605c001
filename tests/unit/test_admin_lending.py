"""The admin API's part for lending, over a real fleet in the controller's place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from rich.console import Console
from starlette.testclient import TestClient

from loomserve.deployments.fleet import Fleet
from loomserve.deployments.front_door import exception_handlers
from loomserve.deployments.lending_admin import build_lending_router
from loomserve.platform.errors import RequestError
from loomserve.platform.lending_status import render
from loomserve.platform.state import LendingState
from tests.unit.test_fleet import COLD, borrowing, lending_fleet, loan, report


@pytest.fixture
def fleet() -> Fleet:
    some, now = lending_fleet(), time.monotonic()
    some.report(report("c1", "core1", model=COLD), now)
    some.report(borrowing(loan("c1")), now)
    return some


@pytest.fixture
def client(fleet: Fleet) -> Iterator[TestClient]:
    async def ask(method: str, *args: Any) -> Any:
        now = time.monotonic()
        try:
            if method == "set_pair":
                fleet.set_pair(*args)
            elif method == "drain_loan":
                fleet.drain_loan(*args, now)
        except RequestError as error:
            return JSONResponse(error.body(), error.status)
        return fleet.lending_state(now).model_dump(mode="json")

    app = FastAPI(exception_handlers=exception_handlers)
    app.include_router(build_lending_router(ask))
    with TestClient(app, raise_server_exceptions=False) as made:
        yield made


def test_loans_pairs_and_budgets_are_told(client: TestClient) -> None:
    state = LendingState.model_validate(client.get("/lending").json())
    assert [loan.name for loan in state.loans] == ["loan-1"]
    assert [(pair.borrower, pair.lender, pair.enabled) for pair in state.pairs] == [
        ("org/hot", "org/cold", True)
    ]
    assert [model.tpot_budget for model in state.models] == [None, 1.15]


def test_a_pair_of_names_with_slashes_is_switched(client: TestClient, fleet: Fleet) -> None:
    for enabled in (False, True):
        answer = client.put("/lending/pairs/org/hot/org/cold", json={"enabled": enabled})
        assert answer.status_code == 202
        assert [pair["enabled"] for pair in answer.json()["pairs"]] == [enabled]
        (now_off,) = [fleet.report(borrowing(), time.monotonic()).lenders_off]
        assert now_off == (() if enabled else ("org/cold",))


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("PUT", "pairs/org/cold/org/hot", {"enabled": True}, 404, "org/hot/org/cold"),
        ("PUT", "pairs/org/hot/org/cold", {"enabled": "perhaps"}, 400, "enabled"),
        ("PUT", "pairs/org/hot/org/cold", {"enable": True}, 400, "enable"),
        ("POST", "loans/loan-9/drain", None, 404, "loan-1"),
        ("GET", "loans/loan-1/drain", None, 405, "POST"),
    ],
)
def test_what_cannot_be_done_is_refused_in_the_platforms_words(
    client: TestClient, method: str, path: str, body: object, status: int, says: str
) -> None:
    answer = client.request(method, f"/lending/{path}", json=body)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


def test_a_loan_is_drained_by_its_name(client: TestClient, fleet: Fleet) -> None:
    assert client.post("/lending/loans/loan-1/drain").status_code == 202
    orders = fleet.report(borrowing(loan("c1")), time.monotonic())
    assert orders.drain_loans == ("loan-1",)


def test_the_tables_show_loans_pairs_and_budgets(client: TestClient) -> None:
    client.put("/lending/pairs/org/hot/org/cold", json={"enabled": False})
    state = LendingState.model_validate(client.get("/lending").json())
    console = Console(width=140)
    with console.capture() as capture:
        console.print(render(state))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capture.get().splitlines()]
    assert ["org/hot", "-", "1024", "-"] in rows
    assert ["org/cold", "1", "-", "1.15 x"] in rows
    assert ["org/hot", "org/cold", "switched off"] in rows
    assert ["loan-1", "org/hot", "org/cold", "1", "3", "4", "1", "1", "10.0", "10.0"] in rows
