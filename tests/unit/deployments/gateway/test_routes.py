"""Which model a request gets from a gateway, and what it is told if it gets none."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from loomserve.deployments.gateway import routes as model_routes
from loomserve.deployments.gateway.routes import ModelRoutes
from loomserve.platform.base.errors import (
    BadRequest,
    Forbidden,
    RequestError,
    Unavailable,
    UnknownModel,
)
from loomserve.platform.config import ApiKey
from loomserve.platform.fleet.messages import ModelRoute, ReplicaRoute
from loomserve.platform.state import ModelStatus

NARROW = ApiKey(name="narrow", hash="sha256:" + "0" * 64, models=("chat",))


def route(name: str, status: ModelStatus = ModelStatus.READY, replicas: int = 1) -> ModelRoute:
    return ModelRoute(
        name=name,
        app=f"model:{name}",
        status=status,
        policy="load_aware",
        max_concurrent_requests=1,
        max_model_len=10,
        kvstore=False,
        replicas=tuple(ReplicaRoute(id=f"{n}", device="d", address="a") for n in range(replicas)),
    )


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> ModelRoutes:
    monkeypatch.setattr(model_routes, "_handle", lambda route: f"the handle of {route.name}")
    routes = ModelRoutes(batch_only=["old"])
    routes.apply(
        [
            route("chat"),
            route("code"),
            route("starting", ModelStatus.LOADING, 0),
            route("leaving", ModelStatus.UNLOADING),
        ]
    )
    return routes


def test_a_ready_model_is_found_with_its_handle(routes: ModelRoutes) -> None:
    assert routes.find("code", None).name == "code"
    assert routes.find("chat", NARROW).name == "chat"
    assert routes.handle("chat") == "the handle of chat"


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (None, BadRequest, "one of: chat, code"),
        (7, BadRequest, "say which model"),
        ("gpt-9", UnknownModel, "gpt-9"),
        ("old", UnknownModel, "batches only.*/v1/batches"),
        ("leaving", UnknownModel, "being unloaded"),
        ("starting", Unavailable, "try again"),
    ],
)
def test_who_gets_none_is_told_why(
    routes: ModelRoutes, model: object, error: type[RequestError], words: str
) -> None:
    with pytest.raises(error, match=words):
        routes.find(model, None)


def test_a_key_for_other_models_is_refused(routes: ModelRoutes) -> None:
    with pytest.raises(Forbidden, match="it may use: chat"):
        routes.find("code", NARROW)


def test_where_there_is_one_model_it_need_not_be_named(routes: ModelRoutes) -> None:
    routes.apply([route("only")])
    assert routes.find(None, None).name == "only"


def test_a_model_that_comes_back_keeps_its_handle_and_one_without_replicas_has_none(
    routes: ModelRoutes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_routes, "_handle", lambda route: "another")
    routes.apply([route("chat"), route("starting")])
    assert routes.handle("chat") == "the handle of chat"
    assert routes.handle("starting") == "another"


def test_models_are_listed_as_far_as_a_key_may_use_them(routes: ModelRoutes) -> None:
    def listed(key: ApiKey | None) -> list[str]:
        request: Any = SimpleNamespace(scope={"state": {"api_key": key}})
        body = asyncio.run(routes.list_models(request)).body
        return [model["id"] for model in json.loads(bytes(body))["data"]]

    assert listed(None) == ["chat", "code", "starting"]
    assert listed(NARROW) == ["chat"]
