"""``GET /admin/v1/usage``: sums over a span, told apart by what is asked for."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Mount

from loomserve.platform.access.keys import hash_key
from loomserve.platform.config import Server
from loomserve.platform.http.ingress import exception_handlers, ingress_middleware
from loomserve.platform.usage.admin import build_usage_router
from loomserve.platform.usage.files import UsageFiles, UsageRecord, minute_of
from loomserve.platform.usage.meter import UsageMeter, UsageMetrics

RECORDS = (
    UsageRecord("2026-10-31T23:59Z", "alice", "chat", 1, 10, 5, 2, 0.5),
    UsageRecord("2026-11-01T00:00Z", "alice", "chat", 2, 20, 0, 4, 1.0),
    UsageRecord("2026-11-01T12:00Z", "alice", "code", 1, 30, 0, 6, 3.0),
    UsageRecord("2026-11-02T00:00Z", "bob", "chat", 4, 40, 0, 8, 2.0),
    UsageRecord("2026-11-02T00:00Z", "", "chat", 1, 1, 0, 1, 0.1),
)
NOVEMBER = {"from": "2026-11-01", "to": "2026-12-01"}


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    files = UsageFiles(tmp_path)
    files.append(RECORDS)
    meter = UsageMeter(UsageMetrics(CollectorRegistry()), files)
    api = FastAPI(exception_handlers=exception_handlers)
    api.include_router(build_usage_router(meter))
    app = Starlette(routes=[Mount("/admin/v1", api)], exception_handlers=exception_handlers)
    server = Server.model_validate({"admin_token_hash": hash_key("token")})
    asgi = ingress_middleware(app, server, rejected=lambda _: None)
    headers = {"Authorization": "Bearer token"}
    return TestClient(asgi, "http://localhost", headers=headers)


def ask(client: TestClient, **query: str) -> dict[str, Any]:
    answer: httpx.Response = client.get("/admin/v1/usage", params=query)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_sums_are_told_apart_by_key_and_model(client: TestClient) -> None:
    shown = ask(client, **NOVEMBER)
    assert shown["by"] == ["key", "model"]
    assert [(each["key"], each["model"], each["requests"]) for each in shown["usage"]] == [
        ("alice", "code", 1),
        ("bob", "chat", 4),
        ("alice", "chat", 2),
        ("", "chat", 1),
    ]
    assert shown["usage"][0] == {
        "key": "alice", "model": "code", "requests": 1, "prompt_tokens": 30, "cached_tokens": 0,
        "completion_tokens": 6, "device_seconds": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("by", "sums"),
    [
        ("key", {("alice",): 3, ("bob",): 4, ("",): 1}),
        ("day", {("2026-11-01",): 3, ("2026-11-02",): 5}),
        ("model,month", {("chat", "2026-11"): 7, ("code", "2026-11"): 1}),
        ("", {(): 8}),
    ],
)
def test_sums_are_told_apart_by_what_is_asked_for(
    client: TestClient, by: str, sums: dict[tuple[str, ...], int]
) -> None:
    groups = [word for word in by.split(",") if word]
    shown = ask(client, **NOVEMBER, by=by)["usage"]
    assert {tuple(each[group] for group in groups): each["requests"] for each in shown} == sums
    assert all(set(each) & {"key", "model", "day", "month"} == set(groups) for each in shown)


def test_a_span_begins_and_ends_to_the_minute_in_the_zone_that_it_names(
    client: TestClient,
) -> None:
    span = {"from": "2026-11-01T00:59:00+01:00", "to": "2026-11-01T12:00:59Z"}
    (one,) = ask(client, **span, by="key")["usage"]
    assert one["requests"] == 3


def test_this_month_is_shown_unless_asked_otherwise(client: TestClient, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    minute = minute_of(now.timestamp())
    UsageFiles(tmp_path).append([UsageRecord(minute, "new", "chat", requests=1)])
    shown = ask(client)
    assert shown["from"].startswith(f"{now:%Y-%m}-01T00:00:00")
    assert "new" in {each["key"] for each in shown["usage"]}


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"by": "user"}, "by"),
        ({"from": "2026-11-02", "to": "2026-11-02"}, "to"),
        ({"from": "yesterday"}, "from"),
    ],
)
def test_what_makes_no_sense_is_refused(
    client: TestClient, query: dict[str, str], param: str
) -> None:
    answer = client.get("/admin/v1/usage", params=query)
    assert answer.status_code == 400
    assert param in answer.json()["error"]["param"]
