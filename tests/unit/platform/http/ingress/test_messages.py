"""Errors of the Messages API are Anthropic's, whoever finds them; all others stay OpenAI's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from loomserve.platform.access.keys import hash_key
from loomserve.platform.base.errors import (
    BodyTooLarge,
    ContextTooLong,
    EngineGone,
    Forbidden,
    RequestError,
    TooManyRequests,
    Unavailable,
)
from loomserve.platform.config import Server
from loomserve.platform.http.engine_errors import send_error
from loomserve.platform.http.held_answer import HeldAnswer
from loomserve.platform.http.ingress import exception_handlers, ingress_middleware
from loomserve.platform.http.ingress.messages import anthropic_event
from tests.waiting import PATIENCE_S

KEYS = {"api_keys": [{"name": "alice", "hash": hash_key("lsk-alice")}]}


class Answer:
    def __init__(self, messages: list[Message]) -> None:
        self.status = messages[0]["status"]
        self.headers = {k.decode(): v.decode() for k, v in messages[0]["headers"]}
        self.body = b"".join(each.get("body", b"") for each in messages[1:])
        self.complete = not messages[-1].get("more_body", False)

    @property
    def error(self) -> tuple[int, str, str]:
        """Status, type and message of a whole error."""
        body = json.loads(self.body)
        assert int(self.headers["content-length"]) == len(self.body)
        assert self.complete
        assert (set(body), body["type"]) == ({"type", "error", "request_id"}, "error")
        assert set(body["error"]) == {"type", "message"}
        assert body["request_id"] == self.headers["request-id"] == self.headers["x-request-id"]
        return self.status, body["error"]["type"], body["error"]["message"]


def ask(
    endpoint: Any,
    path: str = "/v1/messages",
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    **server: Any,
) -> Answer:
    paths = ("/v1/messages", "/v1/messages/count_tokens", "/v1/models", "/v1/messagesque")
    routes = [Route(each, endpoint, methods=["POST"]) for each in paths]
    app = Starlette(routes=routes, exception_handlers=exception_handlers)
    served = ingress_middleware(app, Server.model_validate(server), rejected=lambda _: None)
    sent: list[Message] = []
    body = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> Message:
        if not body:
            await asyncio.Event().wait()
        return body.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    given = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {
        **{"type": "http", "method": method, "path": path, "raw_path": path.encode()},
        **{"query_string": b"beta=true", "root_path": "", "headers": given, "scheme": "http"},
        **{"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "http_version": "1.1"},
    }
    asyncio.run(asyncio.wait_for(served(scope, receive, send), PATIENCE_S))
    return Answer(sent)


def raising(error: Exception) -> Any:
    async def endpoint(_: Request) -> JSONResponse:
        raise error

    return endpoint


async def fine(_: Request) -> JSONResponse:
    return JSONResponse({"content": [], "status": 500})


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Forbidden("not for you"), "permission_error"),
        (BodyTooLarge("too large"), "request_too_large"),
        (TooManyRequests("slow down", retry_after_s=3), "rate_limit_error"),
        (Unavailable("not ready", retry_after_s=3), "api_error"),
        (EngineGone("gone"), "api_error"),
    ],
)
def test_errors_of_the_gateway(path: str, error: RequestError, kind: str) -> None:
    answer = ask(raising(error), path)
    assert answer.error == (error.status, kind, error.message)
    assert answer.headers.get("retry-after") == ("3" if error.retry_after_s else None)


def test_what_fails_unforeseen_is_told_without_its_words() -> None:
    status, kind, message = ask(raising(ValueError("a secret"))).error
    assert (status, kind) == (500, "api_error")
    assert "secret" not in message


def test_a_key_that_is_not_known() -> None:
    assert ask(fine, **KEYS).error[:2] == (401, "authentication_error")
    assert ask(fine, headers={"x-api-key": "lsk-bob"}, **KEYS).error[0] == 401


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/models"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "lsk-alice"}, 200),
        ({"x-api-key": " lsk-alice "}, 200),
        ({"authorization": "Bearer lsk-alice", "x-api-key": "other"}, 200),
        ({"authorization": "Bearer other", "x-api-key": "lsk-alice"}, 401),
    ],
)
def test_a_key_may_come_as_anthropics_clients_send_it(
    path: str, headers: dict[str, str], status: int
) -> None:
    assert ask(fine, path, headers=headers, **KEYS).status == status


def test_the_admin_token_does_not() -> None:
    server = {"admin_token_hash": hash_key("token")}
    assert ask(fine, "/admin/v1/state", headers={"x-api-key": "token"}, **server).status == 401


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
    ],
)
def test_what_is_not_there(method: str, path: str, status: int, kind: str) -> None:
    assert ask(fine, path, method=method).error[:2] == (status, kind)


def test_errors_of_engines_in_whatever_shape_they_come() -> None:
    theirs = {"type": "error", "error": {"type": "BadRequestError", "message": "max_tokens?"}}

    async def refusing(_: Request) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send_error(json.dumps(theirs).encode(), 400, send)

        return app

    assert ask(refusing).error == (400, "invalid_request_error", "max_tokens?")


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for() -> None:
    _, _, message = ask(raising(ContextTooLong("the context has 2048 tokens"))).error
    assert message == "prompt is too long: the context has 2048 tokens"


@pytest.mark.parametrize(
    ("context", "asked", "prompt", "words"),
    [
        (8192, 4000, "4500", "exceed context limit: 4500 + 4000 > 8192"),
        (8192, 8000, "at least 193", "exceed context limit: 193 + 8000 > 8192"),
        (8192, 4000, "at least 4193", "prompt is too long: 8193 tokens > 8192 maximum"),
        (8192, 4000, "9000", "prompt is too long: 9000 tokens > 8192 maximum"),
    ],
)
def test_what_does_not_fit_is_told_in_the_numbers_that_clients_look_for(
    context: int, asked: int, prompt: str, words: str
) -> None:
    of_vllm = (
        f"This model's maximum context length is {context} tokens. However, you requested {asked} "
        f"output tokens and your prompt contains {prompt} input tokens, for a total of 1 tokens."
    )
    assert words in ask(raising(ContextTooLong(of_vllm))).error[2]


def test_a_stream_that_fails_ends_with_anthropics_event() -> None:
    async def produce() -> AsyncIterator[bytes]:
        yield b"event: ping\ndata: {"
        raise EngineGone("The engine died.")

    async def endpoint(_: Request) -> StreamingResponse:
        return StreamingResponse(produce(), media_type="text/event-stream")

    answer = ask(endpoint)
    _, event, rest = answer.body.decode().split("\n\n")
    name, data = event.split("\n")
    assert (answer.status, answer.complete, name, rest) == (200, True, "event: error", "")
    told = json.loads(data.removeprefix("data: "))
    assert (told["type"], told["error"]["type"]) == ("error", "api_error")
    assert told["request_id"] == answer.headers["request-id"]


def test_a_stream_that_waited_for_its_model_is_refused_by_anthropics_event() -> None:
    async def endpoint(_: Request) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            held = HeldAnswer(send, anthropic_event)
            async with held.comments(0.001):
                await asyncio.sleep(0.1)
                await send_error(b'{"error": {"message": "max_tokens?"}}', 404, held.send)

        return app

    answer = ask(endpoint)
    *comments, event, rest = answer.body.decode().split("\n\n")
    assert (answer.status, set(comments), rest) == (200, {": waiting"}, "")
    name, data = event.split("\n")
    told = json.loads(data.removeprefix("data: "))
    assert (name, told["error"]["type"]) == ("event: error", "not_found_error")


def test_what_succeeds_goes_through_as_it_is() -> None:
    answer = ask(fine)
    assert (answer.status, json.loads(answer.body)) == (200, {"content": [], "status": 500})
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/messagesque"])
def test_other_endpoints_keep_openais_shape(path: str) -> None:
    answer = ask(raising(TooManyRequests("slow down")), path)
    assert set(json.loads(answer.body)["error"]) == {"message", "type", "param", "code"}
    assert "request-id" not in answer.headers
