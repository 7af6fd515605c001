"""The admin API's part for lending, over a real fleet in the controller's place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.testclient import TestClient
from typer.testing import CliRunner

from loomserve.platform.base.errors import RequestError
from loomserve.platform.cli.admin_client import AdminError
from loomserve.platform.cli.lending import lending, render
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.http.ingress import exception_handlers
from loomserve.platform.lending.admin import build_lending_router
from loomserve.platform.state import LendingState
from tests.unit.platform.fleet.heartbeats import COLD, borrowing, lending_fleet, loan, report
from tests.unit.served import served
from tests.unit.shown_tables import printed, rows


@pytest.fixture
def fleet() -> Fleet:
    some, now = lending_fleet(), time.monotonic()
    some.report(report("c1", "core1", model=COLD), now)
    some.report(borrowing(loan("c1")), now)
    return some


@pytest.fixture
def app(fleet: Fleet) -> FastAPI:
    async def ask(method: str, *args: Any) -> Any:
        now = time.monotonic()
        try:
            if method == "set_pair":
                fleet.loans.set_pair(*args)
            elif method == "drain_loan":
                fleet.loans.drain(*args, now)
        except RequestError as error:
            return JSONResponse(error.body(), error.status)
        return fleet.loans.state(now).model_dump(mode="json")

    app = FastAPI(exception_handlers=exception_handlers)
    app.include_router(build_lending_router(ask), prefix="/admin/v1")
    return app


@pytest.fixture
def client(app: FastAPI) -> TestClient:
    root = "http://platform/admin/v1"
    return TestClient(app, base_url=root, raise_server_exceptions=False)


@pytest.fixture
def url(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of the API behind a real port, for the command."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with served(app) as url:
        yield url


def command(url: str, *words: str) -> tuple[object, str]:
    result = CliRunner().invoke(lending, [*words, "--url", url])
    return result.exception or result.exit_code, result.stdout


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
    shown = rows(printed(render(state)))
    assert ["org/hot", "-", "1024", "-"] in shown
    assert ["org/cold", "1", "-", "1.15 x"] in shown
    assert ["org/hot", "org/cold", "switched off"] in shown
    assert ["loan-1", "org/hot", "org/cold", "1", "3/4", "1", "1", "10.0", "10.0"] in shown


def test_the_command_shows_switches_and_drains(url: str, fleet: Fleet) -> None:
    code, shown = command(url)
    assert code == 0
    assert "loan-1" in shown
    assert command(url, "disable", "org/hot", "org/cold") == (
        0, "org/hot does not borrow from org/cold\n",
    )  # fmt: skip
    assert command(url, "drain", "loan-1") == (0, "loan-1 drains\n")
    orders = fleet.report(borrowing(loan("c1")), time.monotonic())
    assert (orders.lenders_off, orders.drain_loans) == (("org/cold",), ("loan-1",))
    assert command(url, "enable", "org/hot", "org/cold")[0] == 0
    assert not fleet.report(borrowing(), time.monotonic()).lenders_off


def test_the_command_repeats_what_the_platform_refuses(url: str) -> None:
    error, _ = command(url, "drain", "loan-9")
    assert isinstance(error, AdminError)
    assert "the loans are: loan-1" in str(error)
