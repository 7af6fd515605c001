"""What vLLM's server gets of a form, and what of its answer's head the client gets."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.deployments.gateway.relay import relay
from loomserve.deployments.gateway.replica_choice import AnswerContext
from loomserve.platform.front_end.engine.replica_client import ReplicaSetClient
from loomserve.platform.front_end.routing import routing_context
from loomserve.platform.http.asgi import never_gone
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.metrics import GatewayMetrics
from tests.unit.platform.requests.forms import SOUND, a_form


def test_vllms_server_reads_the_clients_form_with_what_was_added() -> None:
    body, kind = a_form({"model": "alias"}, SOUND * 1024)
    content = EngineRequest.of("/v1/audio/transcriptions", body, kind).for_model("m")
    context = AnswerContext(request=ModelRequest("m", content, "id"))
    got: list[Any] = []
    messages: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async with Request(scope, receive).form() as form:
            file: Any = form["file"]
            got.extend((form["model"], await file.read()))
        headers = {"metadata": "where", "x-other": "hidden"}
        await Response(b"text", headers=headers)(scope, receive, send)

    async def send(message: Message) -> None:
        messages.append(message)

    metrics = GatewayMetrics(CollectorRegistry())
    asyncio.run(relay(app, context, never_gone, send, metrics, idle_timeout_s=10))
    assert got == ["m", SOUND * 1024]
    head = dict(messages[0]["headers"])
    assert head[b"metadata"] == b"where"
    assert b"x-other" not in head


def test_a_salt_that_vllms_request_has_no_field_for_is_set_by_the_front_end() -> None:
    added: list[Any] = []
    client: Any = SimpleNamespace(
        _start=lambda: None, requests=SimpleNamespace(add=lambda request, _: added.append(request))
    )

    async def add(own: str | None) -> None:
        content = EngineRequest.of_fields("/v2/embed", {"texts": ["x"]}).isolated("alice")
        assert "cache_salt" not in content.fields
        context = AnswerContext(request=ModelRequest("m", content, "id"), salt=content.salt)
        routing_context.set(context)
        request: Any = SimpleNamespace(cache_salt=own)
        await ReplicaSetClient.add_request_async(client, request)

    for own in (None, "own"):
        asyncio.run(add(own))
    salts = [request.cache_salt for request in added]
    assert len(salts[0]) == 64
    assert salts[1] == "own"
