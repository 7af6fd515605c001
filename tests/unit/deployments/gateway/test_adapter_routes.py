"""Adapters as clients ask for them: as models, of which each is a model's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from loomserve.deployments.gateway.routes import ModelRoutes
from loomserve.platform.adapters.messages import Adapter, AdapterRoute
from loomserve.platform.adapters.metrics import AdapterMetrics
from loomserve.platform.base.errors import Forbidden, Unavailable, UnknownModel
from loomserve.platform.config import Alias
from loomserve.platform.fleet.messages import ModelRoute
from loomserve.platform.state import ModelStatus
from tests.unit.deployments.gateway.test_alias_routes import key
from tests.unit.deployments.gateway.test_routes import asked, route


def adapter(name: str, number: int = 1, *, leaves: bool = False) -> AdapterRoute:
    one = Adapter(name=name, model="chat", id=number, digest="d", source=f"loras/{name}", rank=8)
    return AdapterRoute(adapter=one, replicas=("0",), leaves=leaves)


def adapted(status: ModelStatus = ModelStatus.READY, **changes: Any) -> ModelRoute:
    adapters = (adapter("sql"), adapter("gone", 2, leaves=True))
    return route("chat", status).model_copy(update={"adapters": adapters, **changes})


def table(
    *routes: ModelRoute,
    aliases: dict[str, Alias] | None = None,
    set_up: Collection[str] = ("chat",),
) -> ModelRoutes:
    made = ModelRoutes(set_up.__contains__)
    made.apply(routes or (adapted(), route("code")), aliases)
    return made


def test_its_route_is_its_models_and_says_what_was_asked_for() -> None:
    found = table().choose({"model": "sql"}, None)
    assert (found.name, found.asked, found.adapter) == ("chat", "sql", "sql")
    plain = table().choose({"model": "chat"}, None)
    assert (plain.name, plain.asked, plain.adapter) == ("chat", "chat", None)


def test_one_that_leaves_is_not_there() -> None:
    with pytest.raises(UnknownModel, match=r"Models: chat, code, sql\."):
        table().find("gone", None)


def test_it_is_listed_with_its_parent_as_vllms_server_does() -> None:
    cards = {card["id"]: card for card in asked(table().list_models, None)["data"]}
    assert set(cards) == {"chat", "code", "sql"}
    assert cards["sql"]["parent"] == "chat"
    assert cards["sql"]["root"] == "loras/sql"
    assert cards["sql"]["max_model_len"] == cards["chat"]["max_model_len"]
    assert "parent" not in cards["chat"]
    assert asked(table().retrieve_model, None, "sql") == cards["sql"]


def test_a_key_is_for_names_of_adapters_as_for_those_of_models() -> None:
    routes, only, base = table(), key("only", "sql"), key("base", "chat")
    assert routes.find("sql", only).asked == "sql"
    assert [card["id"] for card in asked(routes.list_models, only)["data"]] == ["sql"]
    assert [card["id"] for card in asked(routes.list_models, base)["data"]] == ["chat"]
    for name, of in (("chat", only), ("sql", base)):
        with pytest.raises(Forbidden):
            routes.find(name, of)


def test_a_request_that_names_nothing_is_the_models() -> None:
    assert table(adapted()).find(None, None).asked == "chat"


def test_an_alias_may_stand_for_one() -> None:
    aliases = {"canary": Alias(models={"sql": 1, "chat": 0})}
    found = table(aliases=aliases).choose({"model": "canary"}, None)
    assert (found.name, found.asked) == ("chat", "sql")
    gone = {"canary": Alias(models={"gone": 1, "code": 1})}
    assert table(aliases=gone).choose({"model": "canary"}, None).asked == "code"


def test_a_model_that_comes_when_it_is_asked_for_comes_for_its_adapters() -> None:
    away = adapted(ModelStatus.UNLOADED, replicas=())
    with pytest.raises(Unavailable):
        table(away).find("sql", None)
    comes = table(away.model_copy(update={"on_demand": True}), set_up=())
    assert comes.find("sql", None).asked == "sql"
    with pytest.raises(UnknownModel, match="being unloaded"):
        table(adapted(ModelStatus.UNLOADING)).find("sql", None)


def test_metrics_say_who_has_it_and_what_it_was_asked_for() -> None:
    registry = CollectorRegistry()
    metrics = AdapterMetrics(registry)
    metrics.set_adapters(adapted().adapters)
    metrics.finished("chat", "sql", 200)
    labels = {"model": "chat", "adapter": "sql"}
    assert registry.get_sample_value("loomserve_adapter_replicas", labels) == 1
    asked_for = {**labels, "status": "200"}
    assert registry.get_sample_value("loomserve_adapter_requests_total", asked_for) == 1
    metrics.set_adapters(())
    assert registry.get_sample_value("loomserve_adapter_replicas", labels) is None
