"""The admin API and the command for plans, over a real controller of a fleet that is made up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from typer.testing import CliRunner

from loomserve.deployments.controller.plan_methods import PlanMethods
from loomserve.platform.cli.admin_client import AdminError
from loomserve.platform.cli.plans import plans
from loomserve.platform.config import Config
from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.http.ingress import exception_handlers, respond
from loomserve.platform.placement import device_profile
from loomserve.platform.rebalancing.admin import build_plans_router
from loomserve.platform.rebalancing.plans.reports import Event, EventKind
from loomserve.platform.rebalancing.runner import RebalancingRunner
from loomserve.platform.state.roles import Role
from tests.unit.platform.fleet.heartbeats import COLD, DEVICES, HOT, borrowing, loan, report
from tests.unit.platform.rebalancing import test_observe as made_up
from tests.unit.served import served

T = TypeVar("T")


class NoReplicas:
    """There are neither roles nor replicas to change."""

    async def set_role(self, replica_id: str, role: Role) -> None:
        raise AssertionError(replica_id)

    async def scale(self, name: str, replicas: int | None) -> None:
        raise AssertionError(name)

    def set_replicas(self, name: str, replicas: int) -> None:
        raise AssertionError(name)


class Actor(PlanMethods):
    """The controller's actor, of which no gateway is told."""

    def __init__(self, runner: RebalancingRunner) -> None:
        self._rebalancing = runner

    async def _published(self, work: Awaitable[T]) -> T:
        return await work


def no_room(name: str, device: str) -> str:
    raise AssertionError(name)


@pytest.fixture
def runner(tmp_path: Path) -> RebalancingRunner:
    """Beside a borrower with a limit of 4 MiB, of which it uses 3, at a lender's."""
    config = Config(
        devices=DEVICES,
        models=(HOT, COLD),
        rebalancing=Rebalancing(
            folder="plans", profile="devices.yaml", settle_s=0, links_stale_after_s=1e12
        ),
    )
    device_profile.save(made_up.PROFILED.model_copy(
        update={"links": tuple(
            link.model_copy(update={"source": a, "target": b})
            for link in made_up.PROFILED.links
            for a, b in (("core0", "core1"), ("core1", "core0"))
        )}
    ), tmp_path / "devices.yaml")  # fmt: skip
    fleet = Fleet(DEVICES, drain_timeout_s=60)
    for model in (HOT, COLD):
        fleet.registry.add(model, 1)

    runner = RebalancingRunner(config, tmp_path, fleet, NoReplicas(), no_room)
    now = time.monotonic()
    limits = {"org/cold": 4 * made_up.MIB}
    for ago in (10.0, 0.0):
        for each in (report("c1", "core1", model=COLD), borrowing(loan("c1"), limits=limits)):
            said = made_up.with_(
                each,
                made_up.load(now - ago, 100 - ago),
                made_up.footprint(memory_measured_at=now),
            )
            fleet.report(made_up.told(said, now), now)
    asyncio.run(runner.rebalancer.tick())
    return runner


@pytest.fixture
def app(runner: RebalancingRunner) -> FastAPI:
    actor = Actor(runner)

    async def ask(method: str, *args: Any) -> Any:
        return respond(await getattr(actor, method)(*args))

    app = FastAPI(exception_handlers=exception_handlers)
    app.include_router(build_plans_router(ask), prefix="/admin/v1")
    return app


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    # One event loop for all calls, as a controller has.
    root = "http://platform/admin/v1"
    with TestClient(app, base_url=root, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def url(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of the API behind a real port, for the command."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with served(app) as url:
        yield url


def move(amount: int = made_up.MIB, **changes: object) -> dict[str, object]:
    ends = {"engine": "h0", "lender": "c1", "amount": amount, "back": True}
    return {"action": "move", "kind": "requests", **ends, **changes}


def command(url: str, *words: str) -> tuple[object, str]:
    result = CliRunner().invoke(plans, [*words, "--url", url])
    return result.exception or result.exit_code, result.stdout


def made(client: TestClient, *actions: dict[str, object]) -> str:
    answer = client.post("/plans", json={"actions": actions or [move()]})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["plan"]["id"])


def test_loads_and_what_is_missing_are_told(client: TestClient) -> None:
    state = client.get("/rebalancing").json()
    assert (state["mode"], state["paused"], state["problem"]) == ("off", False, None)
    assert [device["device"] for device in state["devices"]] == ["core0", "core1"]
    assert not state["flaws"]


def test_a_plan_is_made_shown_listed_applied_and_aborted(client: TestClient) -> None:
    id_ = made(client)
    plan = client.get(f"/plans/{id_}").json()
    assert (plan["status"], plan["origin"]) == ("proposed", "operator")
    assert plan["steps"][0]["predicted"]["duration_s"] > 0
    assert [each["id"] for each in client.get("/plans").json()["plans"]] == [id_]
    applied = client.post(f"/plans/{id_}/apply")
    assert (applied.status_code, applied.json()["status"]) == (202, "running")
    busy = client.post("/plans", json={"actions": [move()]})
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "conflict")
    assert client.post(f"/plans/{id_}/abort").json()["status"] == "cancelled"
    kinds = [event["kind"] for event in client.get("/rebalancing/events").json()["events"]]
    assert kinds == ["aborted", "started", "proposed"]


def test_a_dry_run_of_an_even_load_moves_nothing(client: TestClient) -> None:
    answer = client.post("/plans", json={})
    assert answer.status_code == 201
    assert answer.json() == {"plan": None, "flaws": [], "rejected": [], "rejected_by_reason": {}}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("GET", "plans/plan-9", None, 404, "plan-9"),
        ("POST", "plans/plan-9/apply", None, 404, "list the plans"),
        ("POST", "plans", {"actions": [move(engine="h9")]}, 404, "h9"),
        ("POST", "plans", {"actions": [move(kind="heads")], "force": True}, 409, "not_movable"),
        ("POST", "plans", {"actions": [move(9 * made_up.MIB)]}, 409, "not_movable"),
        ("POST", "plans", {"actions": [move(0)]}, 400, "amount"),
        ("POST", "plans", {"actions": [{"action": "explode"}]}, 400, "explode"),
        (
            "POST",
            "plans",
            {"actions": [{"action": "move_requests", "engine": "h0", "to": "c1", "requests": 2}]},
            409,
            "running: not_movable (requests of h0 with c1)",
        ),
        ("POST", "plans", {"force": True}, 400, "actions of your own"),
        ("PUT", "rebalancing", {}, 400, "mode"),
        ("PUT", "rebalancing", {"mode": "on"}, 400, "mode"),
        ("GET", "rebalancing/events?limit=0", None, 400, "limit"),
        (
            "POST",
            "plans",
            {"actions": [{"action": "add_replica", "model": "org/cold", "device": "core1"}]},
            409,
            "core1",
        ),
        (
            "POST",
            "plans",
            {"actions": [{"action": "set_role", "engine": "h0", "role": Role.DECODE}]},
            409,
            "roles",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_openais_format(
    client: TestClient, method: str, path: str, body: object, status: int, says: str
) -> None:
    answer = client.request(method, f"/{path}", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert says in error["message"]


def test_a_controller_that_does_not_act_says_so(
    client: TestClient, runner: RebalancingRunner
) -> None:
    runner.rebalancer._store.release()
    for method, path in (("POST", "/plans"), ("GET", "/plans"), ("PUT", "/rebalancing")):
        answer = client.request(method, path, json={"mode": "off"} if method == "PUT" else {})
        assert answer.status_code == 503
        assert "plans cannot be made" in answer.json()["error"]["message"]


def test_the_command_does_what_the_api_does(url: str, client: TestClient) -> None:
    code, shown = command(url, "move", "requests", "h0", "c1", str(made_up.MIB), "--back")
    assert code == 0
    assert "1.0 MiB of requests of h0 home from c1" in shown
    (plan,) = client.get("/plans").json()["plans"]
    id_ = plan["id"]
    assert command(url, "apply", id_)[0] == 0
    assert "running" in command(url, "show", id_)[1]
    assert command(url, "abort", id_) == (0, f"{id_} is cancelled\n")
    assert command(url, "mode", "advise") == (0, "rebalancing is advise\n")
    assert command(url, "pause")[0] == 0
    _, shown = command(url)
    assert "Rebalancing is advise, paused" in shown
    assert id_ in shown
    assert "core0" in shown
    assert command(url, "resume")[0] == 0
    assert "nothing would be moved" in command(url, "make")[1]
    assert "switched" in command(url, "events")[1]
    for words in (
        ("move-running", "h0", "c1", "2"),
        ("role", "h0", "decode"),
        ("add", "org/cold", "core1"),
        ("remove", "c1"),
        ("show", "plan-9"),
    ):
        error, _ = command(url, *words)
        assert isinstance(error, AdminError), words


def test_every_kind_of_event_is_a_row(url: str, runner: RebalancingRunner) -> None:
    rebalancer = runner.rebalancer
    events = [Event(at=0.0, kind=kind, loads_before={"core0": 1.25}) for kind in EventKind]
    rebalancer._store.save(rebalancer._kept, rebalancer._history, events)
    code, shown = command(url, "events")
    assert code == 0
    assert all(kind in shown for kind in EventKind)
    assert "core0 1.25" in shown
