"""Which requests have a span, and what it and the client are told."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from loomserve.platform.access.keys import hash_key
from loomserve.platform.base.errors import Unavailable
from loomserve.platform.base.request_logs import LoggedRequest, logged_request
from loomserve.platform.config import Server
from loomserve.platform.http.ingress import ingress_middleware
from loomserve.platform.http.ingress.exchange import IngressTraces
from tests.unit.platform.tracing.spans import (
    SAMPLED,
    SPAN_ID,
    TRACE_ID,
    UNSAMPLED,
    Spans,
    attributes,
    id_of,
    parent_of,
)

KEY = "sk-loom-" + "k" * 32
CHAT = "/v1/chat/completions"


class Door:
    def __init__(self, *, traced: bool = True, log_format: str = "text") -> None:
        self.spans = Spans()
        self.scopes: list[Scope] = []
        self.logged: list[LoggedRequest | None] = []
        self.app = ingress_middleware(
            self._app,
            Server.model_validate(
                {
                    "api_keys": [{"name": "k", "hash": hash_key(KEY)}],
                    "admin_token_hash": hash_key("admin"),
                    "log_format": log_format,
                    "cors_origins": ["https://site.example"],
                }
            ),
            rejected=lambda _: None,
            traces=IngressTraces(self.spans.tracer, (CHAT, "/v1/files")) if traced else None,
        )

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        self.logged.append(logged_request.get())
        if scope["query_string"]:
            raise Unavailable("no", reason="no_replica")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def ask(self, method: str, path: str, key: str = KEY, **headers: str) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as to:
                sent = {"Authorization": f"Bearer {key}", **headers}
                return await to.request(method, path, headers=sent)

        return asyncio.run(send())


def test_a_request_is_a_span_of_its_clients_trace_whose_id_it_is_told() -> None:
    door = Door()
    answer = door.ask("POST", CHAT, traceparent=SAMPLED, **{"x-request-id": "mine"})
    span = door.spans.one(f"POST {CHAT}")
    assert parent_of(span) == int(SPAN_ID, 16)
    assert attributes(span) == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "loomserve.request_id": "mine",
        "http.response.status_code": 200,
    }
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["traceresponse"] == f"00-{TRACE_ID}-{id_of(span):016x}-01"
    (scope,) = door.scopes
    assert scope["state"]["trace"].id == TRACE_ID


@pytest.mark.parametrize(
    ("path", "key", "status", "told"),
    [
        (CHAT, "wrong", 401, {"error.type": "invalid_api_key"}),
        (CHAT + "?fail", KEY, 503, {"error.type": "no_replica"}),
    ],
)
def test_an_error_has_its_code(path: str, key: str, status: int, told: dict[str, Any]) -> None:
    door = Door()
    assert door.ask("POST", path, key).status_code == status
    found = attributes(door.spans.one(f"POST {CHAT}"))
    assert found["http.response.status_code"] == status
    assert told.items() <= found.items()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/files/file-1/content", "GET /v1/files"),
        ("/v1/filesystem", "GET /v1"),
        ("/v1/secret", "GET /v1"),
    ],
)
def test_clients_make_no_names_of_spans(path: str, name: str) -> None:
    door = Door()
    door.ask("GET", path)
    assert door.spans.names == [name]


def test_operators_requests_have_no_span() -> None:
    door = Door()
    for path in ("/metrics", "/admin/v1/state", "/health"):
        answer = door.ask("GET", path, "admin")
        assert answer.status_code == 200
        assert "traceresponse" not in answer.headers
    assert door.spans.names == []


def test_what_is_not_sampled_is_told_so() -> None:
    door = Door()
    answer = door.ask("POST", CHAT, traceparent=UNSAMPLED)
    assert answer.headers["traceresponse"].endswith("-00")
    assert door.spans.names == []


def test_browsers_may_read_the_header() -> None:
    answer = Door().ask("POST", CHAT, origin="https://site.example")
    assert "traceresponse" in answer.headers["access-control-expose-headers"]


def test_without_traces_nothing_is_told() -> None:
    door = Door(traced=False)
    answer = door.ask("POST", CHAT, traceparent=SAMPLED, origin="https://site.example")
    assert "traceresponse" not in answer.headers
    assert "traceresponse" not in answer.headers["access-control-expose-headers"]
    (scope,) = door.scopes
    assert "trace" not in scope["state"]


def test_the_log_knows_the_request_where_it_is_to_tell_it() -> None:
    door = Door(log_format="json")
    door.ask("POST", CHAT, traceparent=SAMPLED, **{"x-request-id": "mine"})
    assert door.logged == [LoggedRequest("mine", None, TRACE_ID)]
    assert door.scopes[0]["state"]["logged"] is door.logged[0]
    untraced = Door(log_format="json", traced=False)
    untraced.ask("POST", CHAT, **{"x-request-id": "mine"})
    assert untraced.logged == [LoggedRequest("mine")]
    text = Door()
    text.ask("POST", CHAT)
    assert text.logged == [None]


def test_an_answer_that_has_no_end_is_told() -> None:
    door = Door()

    async def run() -> None:
        async def gone(_: Message) -> None:
            raise BrokenPipeError

        scope = {
            **{"type": "http", "method": "POST", "path": CHAT, "query_string": b""},
            "headers": [(b"authorization", f"Bearer {KEY}".encode())],
        }

        async def body() -> Message:
            return {"type": "http.request"}

        with pytest.raises(BrokenPipeError):
            await door.app(scope, body, gone)

    asyncio.run(run())
    assert attributes(door.spans.one(f"POST {CHAT}"))["loomserve.complete"] is False
