"""Each row of the table of endpoints: keys, aliases, limits, usage, errors, wrong tasks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.types import Message

from loomserve.deployments.gateway.client_endpoint import ClientEndpoint
from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.deployments.gateway.routes import ModelRoutes
from loomserve.platform.access.keys import hash_key
from loomserve.platform.access.token_meter import KeyMetrics, TokenMeter
from loomserve.platform.base.errors import NotFound
from loomserve.platform.config import Alias, ApiKey, Server
from loomserve.platform.fleet.messages import ModelRoute
from loomserve.platform.front_end.engine.serving import ModelServing
from loomserve.platform.http.asgi import CollectedAnswer, DirectPosts
from loomserve.platform.http.ingress import exception_handlers, ingress_middleware
from loomserve.platform.http.missing_endpoints import MissingEndpoints
from loomserve.platform.requests.endpoints import AT_ENGINE, ENDPOINTS, Counted
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.state import ModelStatus
from loomserve.platform.usage.files import UsageFiles
from loomserve.platform.usage.meter import UsageMeter, UsageMetrics
from tests.unit.deployments.gateway.engines import (
    Answer,
    FakeEngines,
    answered,
    replica_route,
)
from tests.unit.deployments.gateway.test_request_dispatcher import Controller, run
from tests.unit.platform.fleet.heartbeats import FRONT_END, served_model
from tests.unit.platform.requests.forms import a_form

PATHS = sorted(ENDPOINTS)
MOST = 8
ROUTE = ModelRoute(
    model=served_model(most=6),
    status=ModelStatus.READY, max_model_len=None, replicas=(replica_route("r1"),),
)  # fmt: skip
SERVER = Server(
    api_keys=(
        ApiKey(name="all", hash=hash_key("all")),
        ApiKey(name="other", hash=hash_key("other"), models=("another",)),
        ApiKey(name="tight", hash=hash_key("tight"), max_concurrent=2),
        ApiKey(name="few", hash=hash_key("few"), tokens_per_minute=5),
    )
)
ALL = ("2000-01-01T00:00Z", "2100-01-01T00:00Z")


class Gateway:
    """The middleware and all endpoints, before engines that compute seven tokens of a prompt."""

    def __init__(self, folder: Path) -> None:
        self.engines = FakeEngines(self._compute)
        registry = CollectorRegistry()
        routes = ModelRoutes(lambda _: True)
        two = ROUTE.model_copy(update={"model": served_model("n", 6)})
        routes.apply([ROUTE, two], {"as-m": Alias(models={"m": 1})})
        lengths: Any = SimpleNamespace(predict=self._predict)
        self.usage = UsageMeter(UsageMetrics(CollectorRegistry()), UsageFiles(folder))
        clients = ClientEndpoint(
            Server(max_sequences=MOST),
            *(routes, self.engines, lengths, GatewayMetrics(registry)),
            TokenMeter(KeyMetrics(registry), folder / "tokens.json"),
            isolates_tenants=True,
            usage=self.usage,
        )
        app = DirectPosts(
            dict.fromkeys(ENDPOINTS, clients),
            Starlette(exception_handlers=exception_handlers),
        )
        self._app = ingress_middleware(app, SERVER, rejected=lambda _: None)

    async def _compute(self, request: ModelRequest) -> Answer:
        if request.content.endpoint.computes:
            request.usage.add_prompt("p", 7, 0)
        return answered(b"{}")

    async def _predict(self, *_: object) -> None:
        return None

    def ask(
        self,
        path: str,
        fields: Mapping[str, Any],
        key: str | None = "all",
        *,
        body: bytes | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """The status and the error, or the answer."""
        kind = b"application/json"
        sent = json.dumps(fields).encode()
        if ENDPOINTS[path].is_form:
            sent, kind = a_form(fields)
        messages: list[Message] = [
            {"type": "http.request", "body": sent if body is None else body, "more_body": False}
        ]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            never: Message = await asyncio.get_running_loop().create_future()
            return never

        headers = [(b"content-type", kind)]
        if key is not None:
            headers.append((b"authorization", b"Bearer " + key.encode()))
        answer = CollectedAnswer()
        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
            "root_path": "", "query_string": b"", "scheme": "http", "http_version": "1.1",
            "server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 1), "headers": headers,
        }  # fmt: skip
        asyncio.run(self._app(scope, receive, answer.send))
        told = json.loads(answer.body)
        return answer.status, told.get("error", told)


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    return Gateway(tmp_path)


@pytest.mark.parametrize("path", PATHS)
def test_a_model_or_its_alias_is_asked_at_vllms_own_path(path: str, gateway: Gateway) -> None:
    for name in ("m", "as-m"):
        assert gateway.ask(path, {"model": name}) == (200, {})
        request = gateway.engines.asked[-1]
        sent = b"".join(request.content.pieces())
        assert request.model == "m"
        assert request.content.engine_path in AT_ENGINE
        assert len(sent) == request.content.size
        assert request.content.fields["model"] == "m"
        # Of a field given twice the last one counts.
        assert sent.rindex(b"m") > sent.rfind(b"as-m")


@pytest.mark.parametrize("path", PATHS)
def test_keys_hold_at_every_path(path: str, gateway: Gateway) -> None:
    assert gateway.ask(path, {"model": "m"}, None)[0] == 401
    assert gateway.ask(path, {"model": "m"}, "wrong")[0] == 401
    status, error = gateway.ask(path, {"model": "m"}, "other")
    assert status == 403
    named = {} if path.startswith("/v1/messages") else {"param": "model"}
    assert named.items() <= error.items()
    status, error = gateway.ask(path, {"model": "nothing"})
    assert status == 404
    if named:
        named["code"] = "model_not_found"
    assert named.items() <= error.items()
    assert gateway.ask(path, {})[0] == 400, "there are two models"
    assert gateway.engines.asked == []


@pytest.mark.parametrize("path", PATHS)
def test_what_is_computed_is_charged_and_what_is_rendered_is_not(
    path: str, gateway: Gateway
) -> None:
    computes = ENDPOINTS[path].computes
    assert gateway.ask(path, {"model": "m"}, "few")[0] == 200
    status, error = gateway.ask(path, {"model": "m"}, "few")
    assert status == (429 if computes else 200)
    assert computes == ("tokens" in error.get("message", ""))
    kept = {record.key: record.prompt_tokens for record in gateway.usage.read(*ALL)}
    assert kept.get("few", 0) == (7 if computes else 0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"--x\r\n"])
def test_a_body_that_is_none_is_refused(path: str, body: bytes, gateway: Gateway) -> None:
    status, error = gateway.ask(path, {}, body=body)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert len(error["message"]) < 300
    assert gateway.engines.asked == []


LISTS = [(path, name) for path in PATHS for name in ENDPOINTS[path].lists]
PADDING = "x" * 2**18


@pytest.mark.parametrize("padding", ["", PADDING], ids=["small", "large"])
@pytest.mark.parametrize(("path", "name"), LISTS)
def test_texts_of_a_list_are_bounded(path: str, name: str, padding: str, gateway: Gateway) -> None:
    counted = ENDPOINTS[path].counted
    most = 1024 if counted is Counted.ONE else 6
    text = "data:image/png;base64,AAAA" if name == "images" else "a"

    def ask(number: int, key: str = "all") -> tuple[int, dict[str, Any]]:
        # A field that says nothing on these endpoints, and that makes a body a large one.
        body = {"model": "m", name: [text] * number, "user": padding}
        return gateway.ask(path, body, key)

    assert ask(most + 1)[0] == 400
    assert ask(most)[0] == 200
    if counted is Counted.ONE:
        assert ask(3, "tight")[0] == 200
        return
    assert ask(3, "tight")[0] == 400
    assert ask(2, "tight")[0] == 200
    status, error = ask(MOST + 1)
    assert (status, error["param"]) == (400, "prompt" if name == "prompt_embeds" else name)
    assert str(MOST + 1) in error["message"]


@pytest.mark.parametrize("padding", ["", PADDING], ids=["small", "large"])
@pytest.mark.parametrize(
    ("fields", "documents"),
    [
        ({"documents": "one"}, 1),
        ({"documents": []}, 1),
        ({"documents": {"content": []}}, 1),
        ({"documents": ['a,"b', "c],[d"]}, 2),
        ({"documents": [{"content": [{"text": "a"}, {"text": "b"}]}] * 3}, 3),
        ({"documents": [[], {}, "a", 1, None]}, 5),
    ],
)
def test_documents_are_counted_whatever_they_are(
    fields: dict[str, Any], documents: int, padding: str, gateway: Gateway
) -> None:
    assert gateway.ask("/v1/rerank", {"model": "m", "query": padding, **fields})[0] == 200
    assert gateway.engines.asked[0].content.sequences == documents


@pytest.mark.parametrize(
    "fields",
    [
        {"images": ["data:image/png;base64,AAAA", "http://127.0.0.1/x"]},
        {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "http://a/x"}}]}]},
        {"documents": [{"content": [{"type": "image_url", "image_url": {"url": "http://a/x"}}]}]},
        {"query": {"content": [{"type": "image_url", "image_url": {"url": "http://a/x"}}]}},
    ],
)
def test_links_to_other_hosts_are_refused(fields: dict[str, Any], gateway: Gateway) -> None:
    status, error = gateway.ask("/v2/embed", {"model": "m", **fields})
    assert (status, error["param"]) == (400, next(iter(fields)))
    assert gateway.engines.asked == []


@pytest.mark.parametrize("path", PATHS)
def test_only_what_streams_is_held_as_a_stream(path: str, gateway: Gateway) -> None:
    assert gateway.ask(path, {"model": "m", "stream": True})[0] == 200
    assert gateway.engines.asked[0].content.streams is ENDPOINTS[path].streams


def test_no_path_of_vllms_is_another_endpoints() -> None:
    assert len(AT_ENGINE) == len(set(ENDPOINTS.values()))


@pytest.mark.parametrize("path", sorted({row.at_engine for row in ENDPOINTS.values()}))
def test_a_model_that_sleeps_is_not_woken_to_refuse_a_request(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: ModelServing) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ModelServing, "start", never)
    content: Any = SimpleNamespace(engine_path=path, streams=False)
    request = ModelRequest("m", content, "r1")

    async def scenario(dispatcher: Any, controller: Controller, messages: list[Message]) -> None:
        asleep = {"status": ModelStatus.UNLOADED, "on_demand": True, "front_end": FRONT_END}
        dispatcher.set_models([ROUTE.model_copy(update={**asleep, "replicas": ()})])
        dispatcher._models["m"]._app = MissingEndpoints("m", FastAPI())

        async def nothing(message: Message) -> None:
            messages.append(message)

        with pytest.raises(NotFound, match=f"does not {AT_ENGINE[path].does}"):
            await dispatcher.dispatch(request, nothing, nothing)
        assert controller.asked == []

    assert run(scenario) == []
