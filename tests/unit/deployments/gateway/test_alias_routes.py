"""Which model a gateway takes for an alias, for whom, and what clients see of aliases."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from loomserve.deployments.gateway.client_endpoint import ClientEndpoint
from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.deployments.gateway.line_endpoint import LineEndpoint
from loomserve.deployments.gateway.routes import ModelRoutes
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.base.errors import BadRequest, Forbidden, Unavailable, UnknownModel
from loomserve.platform.config import Alias, ApiKey, Server
from loomserve.platform.fleet.messages import LineRequest, ModelRoute
from loomserve.platform.lengths.service import LengthPredictions
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.state import ModelStatus
from tests.unit.deployments.gateway.engines import FakeEngines
from tests.unit.deployments.gateway.test_routes import asked, route
from tests.unit.platform.fleet.heartbeats import served_model

ALIASES = {
    "canary": Alias(models={"a": 95, "b": 5}),
    "by-key": Alias(models={"a": 1, "b": 1}, sticky="key"),
    "by-user": Alias(models={"a": 1, "b": 1}, sticky="user"),
    "off": Alias(models={"a": 1, "b": 0}),
}


def key(name: str, *models: str) -> ApiKey:
    return ApiKey(name=name, hash="sha256:" + "0" * 64, models=models)


def numbers() -> Iterator[float]:
    """Evenly spread."""
    while True:
        yield from (unit / 100 for unit in range(100))


class Table:
    """Routes with aliases, and what was counted of them."""

    def __init__(self, *routes: ModelRoute, set_up: Collection[str] = ("a", "b")) -> None:
        self.counted = Counter[tuple[str, str]]()
        self.routes = ModelRoutes(
            set_up.__contains__,
            chosen=lambda alias, model: self.counted.update([(alias, model)]),
            number=numbers().__next__,
        )
        self.routes.apply(routes or (route("a"), route("b")), ALIASES)

    def split(self, alias: str, key: ApiKey | None = None, **fields: Any) -> Counter[str]:
        request = {"model": alias, **fields}
        return Counter(self.routes.choose(request, key).name for _ in range(100))


def test_requests_are_split_by_weight_and_counted() -> None:
    table = Table()
    assert table.split("canary") == {"a": 95, "b": 5}
    assert table.counted == {("canary", "a"): 95, ("canary", "b"): 5}
    assert table.split("off") == {"a": 100}


def test_a_change_holds_for_the_next_request() -> None:
    table = Table()
    table.routes.apply([route("a"), route("b")], {"canary": Alias(models={"a": 50, "b": 50})})
    assert table.split("canary") == {"a": 50, "b": 50}
    table.routes.apply([route("a"), route("b")])
    with pytest.raises(UnknownModel, match="'canary' does not exist"):
        table.split("canary")


def test_a_key_stays_with_its_model_and_keys_are_split() -> None:
    table = Table()
    found = [table.split("by-key", key(f"key-{n}")) for n in range(40)]
    assert all(len(models) == 1 for models in found)
    assert len({model for models in found for model in models}) == 2
    # Who has no key cannot be told apart.
    assert table.split("by-key") == {"a": 50, "b": 50}


@pytest.mark.parametrize("field", ["user", "safety_identifier"])
def test_a_user_stays_with_its_model_and_users_of_a_key_are_split(field: str) -> None:
    table, alice = Table(), key("alice")
    found = [table.split("by-user", alice, **{field: f"user-{n}"}) for n in range(40)]
    assert all(len(models) == 1 for models in found)
    assert len({model for models in found for model in models}) == 2
    assert len(table.split("by-user", None, **{field: "user-1"})) == 1
    # Without a user its key is one; without both each request is by itself.
    assert len(table.split("by-user", alice, user="")) == 1
    assert table.split("by-user", None, user=["no text"]) == {"a": 50, "b": 50}


@pytest.mark.parametrize(
    ("routes", "set_up"),
    [
        ([route("a")], "ab"),
        ([route("a"), route("b", ModelStatus.LOADING, 0)], "ab"),
        ([route("a"), route("b", ModelStatus.UNLOADING)], "ab"),
        ([route("a"), route("b")], "a"),
        ([route("a", ModelStatus.DEGRADED), route("b", ModelStatus.FAILED, 0)], "ab"),
    ],
    ids=["unloaded", "loading", "unloading", "not set up", "failed"],
)
def test_a_model_that_cannot_answer_is_passed_over(routes: list[ModelRoute], set_up: str) -> None:
    table = Table(*routes, set_up=set_up)
    assert table.split("canary") == {"a": 100}
    assert table.split("by-key", key("anyone")) == {"a": 100}


@pytest.mark.parametrize(
    ("status", "replicas"),
    [(ModelStatus.ASLEEP, 1), (ModelStatus.UNLOADED, 0), (ModelStatus.LOADING, 0)],
)
def test_a_model_that_a_request_has_come_gets_its_share(status: ModelStatus, replicas: int) -> None:
    away = route("b", status, replicas).model_copy(update={"on_demand": True})
    assert Table(route("a"), away, set_up="a").split("canary") == {"a": 95, "b": 5}


def test_a_model_that_could_not_be_loaded_on_demand_is_passed_over() -> None:
    failed = route("b", ModelStatus.FAILED, 0).model_copy(update={"on_demand": True})
    assert Table(route("a"), failed).split("canary") == {"a": 100}


def test_a_model_without_weight_does_not_stand_in() -> None:
    with pytest.raises(Unavailable):
        Table(route("b")).split("off")


@pytest.mark.parametrize(
    ("routes", "says"),
    [
        ([route("a", ModelStatus.LOADING, 0), route("b", ModelStatus.LOADING, 0)], "is loading"),
        ([route("a", ModelStatus.UNLOADING), route("other")], "no model of 'canary' is loaded"),
        ([route("other")], "no model of 'canary' is loaded"),
    ],
)
def test_where_all_are_away_the_error_is_that_of_a_model_without_replica(
    routes: list[ModelRoute], says: str
) -> None:
    with pytest.raises(Unavailable, match=says) as refused:
        Table(*routes).split("canary")
    assert (refused.value.code, refused.value.retry_after_s) == ("model_not_ready", 5)


def test_a_key_that_names_the_alias_may_use_what_it_stands_for_and_nothing_else() -> None:
    table, only = Table(), key("only", "canary")
    assert table.split("canary", only) == {"a": 95, "b": 5}
    for other in ("a", "b", "by-key", "nothing"):
        with pytest.raises(Forbidden, match=f"may not use model '{other}'; it may use: canary"):
            table.routes.choose({"model": other}, only)


def test_an_alias_gives_a_key_no_model_that_it_has_not() -> None:
    table, narrow = Table(), key("narrow", "a")
    assert table.split("canary", narrow) == {"a": 100}
    # However it is changed.
    table.routes.apply([route("a"), route("b")], {"canary": Alias(models={"a": 1, "b": 999})})
    assert table.split("canary", narrow) == {"a": 100}
    table.routes.apply([route("a"), route("b")], {"canary": Alias(models={"a": 0, "b": 1})})
    for name in ("canary", "nothing"):
        with pytest.raises(Forbidden, match=f"may not use model '{name}'; it may use: a"):
            table.routes.choose({"model": name}, narrow)


def test_a_key_gets_no_other_model_because_its_own_is_away() -> None:
    with pytest.raises(Unavailable):
        Table(route("b")).split("canary", key("narrow", "a"))


def test_aliases_are_listed_with_the_models_that_a_key_gets_of_them() -> None:
    routes = Table().routes

    def listed(who: ApiKey | None) -> dict[str, Any]:
        cards = asked(routes.list_models, who)["data"]
        assert all(card["object"] == "model" and card["owned_by"] == "loomserve" for card in cards)
        return {card["id"]: card.get("models") for card in cards}

    assert listed(None) == {
        **{"a": None, "b": None, "canary": {"a": 95, "b": 5}, "by-key": {"a": 1, "b": 1}},
        **{"by-user": {"a": 1, "b": 1}, "off": {"a": 1, "b": 0}},
    }
    assert listed(key("only", "canary")) == {"canary": {"a": 95, "b": 5}}
    assert listed(key("narrow", "b")) == {
        **{"b": None, "canary": {"b": 5}, "by-key": {"b": 1}, "by-user": {"b": 1}},
    }


def test_an_alias_is_shown_like_a_model() -> None:
    routes = Table().routes
    shown = asked(routes.retrieve_model, None, "by-key")
    assert (shown["id"], shown["models"], shown["sticky"]) == ("by-key", {"a": 1, "b": 1}, "key")
    with pytest.raises(Forbidden):
        asked(routes.retrieve_model, key("other", "c"), "canary")


def test_an_unknown_name_is_told_of_aliases_too() -> None:
    with pytest.raises(UnknownModel, match="Models: a, b, by-key, by-user, canary, off"):
        Table().routes.choose({"model": "nothing"}, None)


class Nothing:
    """A meter that notes nothing."""

    def charge(self, *_: object) -> None:
        pass


async def sent(body: dict[str, Any], engines: FakeEngines, *routes: ModelRoute) -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    meter: Any = Nothing()
    endpoint = ClientEndpoint(
        Server(max_sequences=8),
        *(Table(*routes).routes, engines, LengthPredictions(metrics), metrics, meter),
        isolates_tenants=False,
    )
    state = {"body": json.dumps(body).encode(), "request_id": "q"}

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        pass

    await endpoint({"path": "/v1/chat/completions", "state": state}, receive, send)


def test_the_engine_is_asked_for_the_model_and_gets_all_else_as_it_came() -> None:
    engines = FakeEngines()
    body = {"model": "off", "messages": [], "temperature": 0.25, "unheard_of": "ü"}
    asyncio.run(sent(body, engines))
    (request,) = engines.asked
    assert request.model == "a"
    assert json.loads(request.content.encoded) == {**body, "model": "a"}


def test_limits_are_those_of_the_model() -> None:
    wide = route("b").model_copy(update={"model": served_model("b", 100)})
    body = {"model": "off", "messages": [], "n": 2}
    with pytest.raises(BadRequest, match="model 'a' gives 1"):
        asyncio.run(sent(body, FakeEngines(), route("a"), wide))


@pytest.mark.parametrize(
    ("alias", "models", "chosen", "model", "pinned"),
    [
        # The lane has looked for room there, whatever the weights say here.
        ("canary", (), "b", "b", "r1"),
        # It has not heard of a change, or knows nothing of what the key may use.
        ("off", (), "b", "a", None),
        ("canary", ("a",), "b", "a", None),
        ("canary", ("a",), "a", "a", "r1"),
        ("a", (), "a", "a", "r1"),
    ],
)
def test_a_line_goes_to_the_model_that_its_lane_has_chosen_if_it_may(
    alias: str, models: tuple[str, ...], chosen: str, model: str, pinned: str | None
) -> None:
    engines, meter = FakeEngines(), Nothing()
    server = Server(api_keys=(key("alice", *models),))
    lines = LineEndpoint(
        *(server, LiveKeys(server), meter, Table().routes, engines),  # type: ignore[arg-type]
        isolates_tenants=False,
    )
    line = LineRequest(
        owner="alice",
        path="/v1/completions",
        body={"model": alias, "prompt": "x"},
        request_id="q",
        model=chosen,
        engine="r1",
        timeout_s=60,
    )
    assert asyncio.run(lines.complete(line))[0] == 200
    request: ModelRequest
    (request,) = engines.asked
    assert (request.model, request.pinned_to) == (model, pinned)
    assert request.content.fields["model"] == model
