"""Which model a request gets from a gateway, and what it is told if it gets none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from loomserve.deployments.gateway.routes import ModelRoutes
from loomserve.platform.base.errors import (
    BadRequest,
    Forbidden,
    RequestError,
    Unavailable,
    UnknownModel,
)
from loomserve.platform.config import ApiKey
from loomserve.platform.fleet.messages import ModelRoute
from loomserve.platform.state import ModelStatus
from tests.unit.deployments.gateway.engines import replica_route
from tests.unit.platform.fleet.heartbeats import served_model

NARROW = ApiKey(name="narrow", hash="sha256:" + "0" * 64, models=("chat",))


def route(name: str, status: ModelStatus = ModelStatus.READY, replicas: int = 1) -> ModelRoute:
    return ModelRoute(
        model=served_model(name, 1),
        status=status,
        max_model_len=10,
        replicas=tuple(replica_route(f"{n}") for n in range(replicas)),
    )


def response(
    endpoint: Callable[[Request], Awaitable[Response]], key: ApiKey | None, model: str = ""
) -> Response:
    scope = {"type": "http", "state": {"api_key": key}, "path_params": {"model": model}}

    async def ask() -> Response:
        return await endpoint(Request(scope))

    return asyncio.run(ask())


def asked(
    endpoint: Callable[[Request], Awaitable[Response]], key: ApiKey | None, model: str = ""
) -> Any:
    """What an endpoint answers to this key."""
    return json.loads(bytes(response(endpoint, key, model).body))


@pytest.fixture
def routes() -> ModelRoutes:
    routes = ModelRoutes(lambda model: True, batch_only=["old"])
    routes.apply(
        [
            route("chat"),
            route("code"),
            route("starting", ModelStatus.LOADING, 0),
            route("leaving", ModelStatus.UNLOADING),
        ]
    )
    return routes


def test_a_ready_model_is_found(routes: ModelRoutes) -> None:
    assert routes.find("code", None).name == "code"
    assert routes.find("chat", NARROW).name == "chat"


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


@pytest.mark.parametrize("model", ["code", "starting", "leaving", "old", "gpt-9"])
def test_a_key_is_told_the_same_of_all_models_that_it_may_not_use(
    routes: ModelRoutes, model: str
) -> None:
    for ask in (routes.find, lambda model, key: asked(routes.retrieve_model, key, model)):
        with pytest.raises(Forbidden) as refused:
            ask(model, NARROW)
        assert str(refused.value) == f"this API key may not use model {model!r}; it may use: chat"


def test_no_error_names_a_model_that_the_key_may_not_use(routes: ModelRoutes) -> None:
    key = NARROW.model_copy(update={"models": ("chat", "code", "away")})
    with pytest.raises(BadRequest, match=r"one of: chat, code$"):
        routes.find(None, key)
    for ask in (routes.find, lambda model, key: asked(routes.retrieve_model, key, model)):
        with pytest.raises(UnknownModel, match=r"Models: chat, code\.$"):
            ask("away", key)


def test_a_key_for_one_model_need_not_name_it(routes: ModelRoutes) -> None:
    assert routes.find(None, NARROW).name == "chat"


def test_where_there_is_one_model_it_need_not_be_named(routes: ModelRoutes) -> None:
    routes.apply([route("only")])
    assert routes.find(None, None).name == "only"


def test_models_are_listed_as_far_as_a_key_may_use_them(routes: ModelRoutes) -> None:
    def listed(key: ApiKey | None) -> list[str]:
        return [model["id"] for model in asked(routes.list_models, key)["data"]]

    assert listed(None) == ["chat", "code", "starting"]
    assert listed(NARROW) == ["chat"]


def test_readiness_names_the_models_of_the_key_and_none_to_who_has_no_key() -> None:
    for with_keys, key, names in (
        (False, None, ["chat", "code"]),
        (True, None, []),
        (True, NARROW, ["chat"]),
    ):
        routes = ModelRoutes(lambda model: True, with_keys=with_keys)
        routes.apply([route("code"), route("chat")])
        shown = asked(routes.ready, key)
        assert (shown["status"], list(shown["models"])) == ("ready", names)
        routes.apply([route("code"), route("starting", ModelStatus.LOADING, 0)])
        assert asked(routes.ready, key)["status"] == "not ready"


def test_readiness_waits_until_this_gateway_has_the_front_end_of_every_model() -> None:
    set_up = set[str]()
    routes = ModelRoutes(set_up.__contains__)
    routes.apply([route("chat"), route("code")])
    for more, status in ((None, 503), ("code", 503), ("chat", 200)):
        set_up |= {more} if more else set()
        answer = response(routes.ready, None)
        assert answer.status_code == status
        assert answer.headers.get("Retry-After") == (None if status == 200 else "5")
    # A model that comes later has to be set up, too.
    routes.apply([route("chat"), route("code"), route("more")])
    assert response(routes.ready, None).status_code == 503


def test_requests_go_to_a_model_that_comes_when_it_is_asked_for() -> None:
    models = ModelRoutes(lambda _: False)
    asleep = route("chat", ModelStatus.UNLOADED, replicas=0)
    models.apply([asleep])
    with pytest.raises(Unavailable):
        models.find("chat", None)
    models.apply([asleep.model_copy(update={"on_demand": True})])
    assert models.find("chat", None).name == "chat"
    assert asked(models.list_models, None)["data"][0]["status"] == "unloaded"
    assert response(models.ready, None).status_code == 200


def test_load_balancers_keep_a_gateway_while_one_model_answers() -> None:
    routes = ModelRoutes(lambda _: True)

    def heard() -> tuple[int, bytes]:
        answer = response(routes.takes_clients, None)
        return answer.status_code, bytes(answer.body)

    good, refused = (200, b"success"), (503, b"not ready")
    assert heard() == refused
    routes.apply([route("a"), route("b", ModelStatus.LOADING, replicas=0)])
    assert heard() == refused, "the first time it waits for all"
    routes.apply([route("a"), route("b", ModelStatus.FAILED, replicas=0)])
    assert heard() == good, "what has failed is not waited for"
    routes.apply([route("a"), route("c", ModelStatus.LOADING, replicas=0)])
    assert heard() == good, "an operator loads another"
    assert response(routes.ready, None).status_code == 503
    routes.drained = True
    assert heard() == refused
    routes.drained = False
    routes.apply([route("a", ModelStatus.LOADING, replicas=0)])
    assert heard() == refused, "no model answers"


def test_clients_of_a_model_that_has_failed_are_not_told_to_try_again() -> None:
    routes = ModelRoutes(lambda model: True)
    failed = route("gone", ModelStatus.FAILED, replicas=0)
    routes.apply(
        [failed, failed.model_copy(update={"model": served_model("away"), "on_demand": True})]
    )
    with pytest.raises(Unavailable, match="ask the operator") as raised:
        routes.find("gone", None)
    assert raised.value.headers() == {}
    assert raised.value.body()["error"]["code"] == "model_failed"
    assert "try again" not in str(raised.value)
    assert routes.find("away", None).name == "away", "whoever waits for it is told there"
    routes.apply([route("gone", ModelStatus.FAILED)])
    assert routes.find("gone", None).replicas, "a replica that stalls may come back"
