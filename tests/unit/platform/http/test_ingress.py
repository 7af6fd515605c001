"""The ingress middleware driven as ASGI, message by message, around small real applications."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loomserve.platform.access.keys import hash_key
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.access.request_meter import RequestMeter
from loomserve.platform.base.errors import EngineGone, TooManyRequests
from loomserve.platform.config import ApiKey, Server
from loomserve.platform.http.ingress import exception_handlers, ingress_middleware
from loomserve.platform.http.ingress.body import read_body
from tests.waiting import PATIENCE_S

Headers = dict[str, str]
WAIT = object()  # in a request's messages: the client has sent all and stays connected
PREFLIGHT = {
    "Origin": "https://app.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}
STALL = object()  # the client stops within its body and stays connected


@dataclass
class Reply:
    messages: list[Message]
    rejected: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> Headers:
        return {k.decode(): v.decode() for k, v in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def complete(self) -> bool:
        return not self.messages[-1].get("more_body", False)

    @property
    def error(self) -> dict[str, Any]:
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error, dict)
        return error


@dataclass
class Door:
    """The middleware, a clock that stands still, and what it rejected."""

    app: ASGIApp
    server: Server = field(default_factory=Server)
    now_s: float = 1000.0
    rejected: list[str] = field(default_factory=list)
    streamed: frozenset[str] = frozenset()
    keys: LiveKeys | None = None

    def __post_init__(self) -> None:
        self.asgi = ingress_middleware(
            self.app,
            self.server,
            rejected=self.rejected.append,
            streamed=self.streamed,
            keys=self.keys,
            requests=RequestMeter(clock=lambda: self.now_s),
        )

    async def send(
        self,
        method: str = "GET",
        path: str = "/v1/models",
        headers: Headers | None = None,
        messages: list[Any] | None = None,
    ) -> Reply:
        """``messages``: parts of the body (bytes), then at most one of WAIT, STALL, or an async
        function that is awaited before the client disconnects, which it does at the end."""
        incoming = [b""] if messages is None else list(messages)
        sent: list[Message] = []

        async def receive() -> Message:
            if not incoming:
                return {"type": "http.disconnect"}
            if incoming[0] in (WAIT, STALL):
                await asyncio.Event().wait()
            message = incoming.pop(0)
            if isinstance(message, bytes):
                more = any(rest is STALL or isinstance(rest, bytes) for rest in incoming)
                return {"type": "http.request", "body": message, "more_body": more}
            if callable(message):
                await message()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        before = len(self.rejected)
        try:
            await asyncio.wait_for(self.asgi(scope, receive, send), PATIENCE_S)
        finally:
            self.last = Reply(sent, self.rejected[before:])
        return self.last

    def ask(self, *args: Any, **kwargs: Any) -> Reply:
        return asyncio.run(self.send(*args, **kwargs))


async def _echo(request: Request) -> JSONResponse:
    state = request.scope["state"]
    key = state["api_key"]
    return JSONResponse(
        {
            "body": (await request.body()).decode("latin-1"),
            "state_body": state["body"].decode("latin-1"),
            "request_id": state["request_id"],
            "header": request.headers.getlist("x-request-id"),
            "api_key": key and key.name,
            "slo_ms": state["slo_ms"],
        }
    )


def _starlette(*routes: Route | Mount) -> Starlette:
    return Starlette(routes=list(routes), exception_handlers=exception_handlers)


ECHO = _starlette(
    *(
        Route(path, _echo, methods=["GET", "POST"])
        for path in (
            "/v1/models",
            "/v1/chat/completions",
            "/admin/v1/state",
            "/health",
            "/ready",
            "/metrics",
            "/docs",
            "/openapi.json",
            "/new",
        )
    )
)


def _door(app: ASGIApp = ECHO, **server: Any) -> Door:
    return Door(app, Server.model_validate(server))


def _keyed(app: ASGIApp = ECHO, *, server: dict[str, Any] | None = None, **limits: Any) -> Door:
    keys = [
        {"name": "alice", "hash": hash_key("lsk-alice"), **limits},
        {"name": "bob", "hash": hash_key("lsk-bob")},
    ]
    return _door(app, api_keys=keys, admin_token_hash=hash_key("token"), **(server or {}))


def _bearer(key: str) -> Headers:
    return {"Authorization": f"Bearer {key}"}


def _raising(error: Exception) -> ASGIApp:
    async def endpoint(_: Request) -> PlainTextResponse:
        raise error

    return _starlette(Route("/v1/models", endpoint, methods=["GET", "POST"]))


def _streaming(
    produce: Callable[[], AsyncIterator[bytes]], media_type: str = "text/event-stream"
) -> ASGIApp:
    async def endpoint(_: Request) -> StreamingResponse:
        return StreamingResponse(produce(), media_type=media_type)

    return _starlette(Route("/v1/models", endpoint, methods=["GET", "POST"]))


# Request ids


@pytest.mark.parametrize("given", ["a", "Trace.1_2:3-4", "x" * 128])
def test_a_harmless_request_id_of_the_client_is_kept_everywhere(given: str) -> None:
    reply = _door().ask(headers={"X-Request-Id": given})
    seen = json.loads(reply.body)
    assert (reply.headers["x-request-id"], seen["request_id"], seen["header"]) == (
        given,
        given,
        [given],
    )


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a\r\nSet-Cookie: b", "<b>", "a/b"])
def test_any_other_request_id_is_replaced(given: str | None) -> None:
    reply = _door().ask(headers={} if given is None else {"X-Request-Id": given})
    seen = json.loads(reply.body)
    assert re.fullmatch(r"[0-9a-f]{32}", reply.headers["x-request-id"])
    assert seen["header"] == [seen["request_id"]] == [reply.headers["x-request-id"]]


def test_new_request_ids_differ() -> None:
    door = _door()
    assert len({door.ask().headers["x-request-id"] for _ in range(20)}) == 20


def test_the_application_cannot_answer_with_another_request_id() -> None:
    async def endpoint(_: Request) -> PlainTextResponse:
        return PlainTextResponse("ok", headers={"X-Request-Id": "engine"})

    reply = _door(_starlette(Route("/v1/models", endpoint))).ask(headers={"X-Request-Id": "mine"})
    assert [v for k, v in reply.messages[0]["headers"] if k == b"x-request-id"] == [b"mine"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1/models", {}, 401),
        ("GET", "/v1/nothing", _bearer("lsk-bob"), 404),
        ("DELETE", "/v1/models", _bearer("lsk-bob"), 405),
        ("POST", "/v1/models", {**_bearer("lsk-bob"), "Content-Length": "99999999"}, 413),
        ("GET", "/v1/models", {**_bearer("lsk-bob"), "x-slo-ms": "no"}, 400),
        ("OPTIONS", "/v1/models", PREFLIGHT, 200),
    ],
)
def test_every_response_has_the_request_id(
    method: str, path: str, headers: Headers, status: int
) -> None:
    door = _keyed(server={"cors_origins": ["https://app.example"]})
    reply = door.ask(method, path, {**headers, "X-Request-Id": "mine"})
    assert (reply.status, reply.headers["x-request-id"]) == (status, "mine")


# Errors


def test_an_unforeseen_error_is_a_500_without_its_cause_and_logged_under_the_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, "loomserve.ingress"):
        reply = _door(_raising(KeyError("secret"))).ask(headers={"X-Request-Id": "mine"})
    assert (reply.status, reply.error["code"], reply.rejected) == (
        500,
        "internal_error",
        ["internal_error"],
    )
    assert b"secret" not in reply.body
    assert b"Traceback" not in reply.body
    [record] = caplog.records
    assert "mine" in record.getMessage()
    assert record.exc_info is not None
    assert "secret" in str(record.exc_info[1])


def test_an_application_without_handlers_is_answered_for_too() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("secret")

    reply = _door(broken).ask()
    assert (reply.status, reply.error["code"], reply.complete) == (500, "internal_error", True)


def test_a_request_error_of_the_application_is_answered_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = TooManyRequests("busy", param="model", reason="model_busy", retry_after_s=2.5)
    reply = _door(_raising(error)).ask()
    assert (reply.status, reply.headers["retry-after"]) == (429, "3")
    assert reply.error == error.body()["error"]
    assert reply.rejected == ["model_busy"]
    assert caplog.records == []


def test_unknown_paths_are_404_in_openai_shape() -> None:
    reply = _door().ask(path="/v1/nothing")
    assert (reply.status, reply.error["code"], reply.rejected) == (404, "not_found", ["not_found"])
    assert "/v1/nothing" in reply.error["message"]


def test_wrong_methods_are_405_in_openai_shape_and_name_the_right_ones() -> None:
    reply = _door().ask("DELETE")
    assert (reply.status, reply.rejected) == (405, ["method_not_allowed"])
    assert {"GET", "POST"} <= set(reply.headers["allow"].split(", "))
    assert "DELETE" in reply.error["message"]


def _admin_api() -> FastAPI:
    api = FastAPI(exception_handlers=exception_handlers)

    @api.post("/models/{name}")
    async def scale(name: str, replicas: int) -> str:
        return f"{name}: {replicas}"

    return api


@pytest.mark.parametrize(
    ("method", "path", "status", "param"),
    [
        ("POST", "/admin/v1/models/a", 400, "replicas"),
        ("GET", "/admin/v1/models/a", 405, None),
        ("GET", "/admin/v1/nothing", 404, None),
    ],
)
def test_a_mounted_fastapi_answers_in_the_same_shape_and_counts_once(
    method: str, path: str, status: int, param: str | None
) -> None:
    door = _keyed(_starlette(Mount("/admin/v1", _admin_api())))
    reply = door.ask(method, path, _bearer("token"))
    assert (reply.status, reply.error["param"], len(reply.rejected)) == (status, param, 1)


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    async def produce() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        raise EngineGone("The engine died. Send the request again.")

    reply = _door(_streaming(produce)).ask(headers={"X-Request-Id": "mine"}, messages=[b"", WAIT])
    first, _, event, rest = reply.body.split(b"\n\n")
    assert (reply.status, reply.complete, first, rest) == (200, True, b"data: 1", b"")
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "engine_gone"
    assert reply.rejected == ["engine_gone"]
    assert reply.headers["x-request-id"] == "mine"


def test_the_error_of_a_stream_that_fails_within_an_event_is_an_event_by_itself() -> None:
    async def produce() -> AsyncIterator[bytes]:
        yield b'data: {"half'
        raise EngineGone("The engine died. Send the request again.")

    body = _door(_streaming(produce)).ask(messages=[b"", WAIT]).body
    half, event, rest = body.split(b"\n\n")
    assert (half, rest) == (b'data: {"half', b"")
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "engine_gone"


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "TRACE", "PROPFIND"])
@pytest.mark.parametrize("framing", [{"Content-Length": "5"}, {"Transfer-Encoding": "chunked"}])
def test_a_body_where_none_belongs_is_refused_and_the_connection_ended(
    method: str, framing: Headers
) -> None:
    reply = _door(ECHO).ask(method, headers=framing, messages=[b"hello"])
    assert (reply.status, reply.error["code"]) == (400, "unexpected_body")
    assert reply.headers["connection"] == "close"


def test_a_request_may_say_that_it_has_no_body() -> None:
    assert _door(ECHO).ask("GET", headers={"Content-Length": "0"}).status == 200


def test_a_plain_body_that_fails_is_cut_so_that_nobody_takes_it_for_whole() -> None:
    async def produce() -> AsyncIterator[bytes]:
        yield b"half"
        raise KeyError("secret")

    door = _door(_streaming(produce, "text/plain"))
    with pytest.raises(KeyError):
        door.ask(messages=[b"", WAIT])
    assert (door.last.body, door.last.complete) == (b"half", False)
    assert door.rejected == ["internal_error"]


def test_an_error_after_a_good_response_is_logged_but_not_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("ok")(scope, receive, send)
        raise KeyError("late")

    reply = _door(app).ask()
    assert (reply.status, reply.body, reply.rejected) == (200, b"ok", [])
    assert len(caplog.records) == 1


# Authentication


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({}, "No API key was given"),
        ({"Authorization": "Basic lsk-alice"}, "No API key was given"),
        ({"Authorization": "lsk-alice"}, "No API key was given"),
        ({"Authorization": "Bearer "}, "No API key was given"),
        (_bearer("lsk-mallory"), "not known"),
        (_bearer("token"), "not known"),
    ],
)
def test_without_a_known_key_v1_is_401_and_the_key_is_not_echoed(
    headers: Headers, says: str
) -> None:
    reply = _keyed().ask(headers=headers)
    assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    assert reply.error["type"] == "authentication_error"
    assert says in reply.error["message"]
    assert "lsk-mallory" not in str(reply.body)
    assert reply.rejected == ["invalid_api_key"]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_a_known_key_reaches_the_application(scheme: str) -> None:
    reply = _keyed().ask(headers={"Authorization": f"{scheme} lsk-alice"})
    assert json.loads(reply.body)["api_key"] == "alice"


def test_without_keys_configured_any_key_will_do() -> None:
    for headers in ({}, _bearer("EMPTY")):
        assert json.loads(_door().ask(headers=headers).body)["api_key"] is None


def test_the_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []
    compare = hmac.compare_digest

    def recording(left: str, right: str) -> bool:
        compared.append((left, right))
        return compare(left, right)

    monkeypatch.setattr(hmac, "compare_digest", recording)
    _keyed().ask(headers=_bearer("lsk-alice"))
    presented = hash_key("lsk-alice")
    assert compared == [(presented, presented), (presented, hash_key("lsk-bob"))]


REMOTE = {"host": "0.0.0.0"}
ADMIN_PATHS = ["/admin/v1/state", "/docs", "/openapi.json"]


@pytest.mark.parametrize(
    ("server", "path", "key", "status"),
    [
        *(({}, path, "token", 200) for path in [*ADMIN_PATHS, "/new"]),
        *(({}, path, None, 401) for path in ADMIN_PATHS),
        *(({}, path, "lsk-alice", 401) for path in ADMIN_PATHS),
        *((REMOTE, path, None, 200) for path in ["/health", "/ready"]),
        ({}, "/new", None, 404),
        ({}, "/v1x", None, 404),
        ({}, "/administrator", None, 404),
        ({}, "/metrics", None, 401),
        (REMOTE, "/metrics", None, 401),
        (REMOTE, "/metrics", "lsk-alice", 401),
        (REMOTE, "/metrics", "token", 200),
    ],
)
def test_each_path_is_behind_its_door(
    server: dict[str, Any], path: str, key: str | None, status: int
) -> None:
    reply = _keyed(server=server).ask(path=path, headers=_bearer(key) if key else {})
    assert reply.status == status


def test_a_websocket_does_not_slip_past_the_keys() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def run() -> None:
        await _keyed().asgi({"type": "websocket", "path": "/v1/realtime"}, receive, send)

    asyncio.run(run())
    assert sent == [{"type": "websocket.close", "code": 1008}]


# Limits


def test_a_key_over_its_rate_is_429_with_the_time_to_wait() -> None:
    door = _keyed(requests_per_minute=6)
    assert door.ask("POST", headers=_bearer("lsk-alice")).status == 200
    door.now_s += 2.5
    reply = door.ask("POST", headers=_bearer("lsk-alice"))
    assert (reply.status, reply.headers["retry-after"]) == (429, "8")
    assert reply.rejected == ["rate_limit_exceeded"]
    door.now_s += 7.5
    assert door.ask("POST", headers=_bearer("lsk-alice")).status == 200


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_key_is_limited_by_all_its_methods_and_touches_no_other_key(method: str) -> None:
    door = _keyed(requests_per_minute=1)
    assert door.ask(method, headers=_bearer("lsk-alice")).status in (200, 405)
    assert door.ask("POST", headers=_bearer("lsk-alice")).status == 429
    assert door.ask("GET", headers=_bearer("lsk-alice")).status == 429
    assert door.ask("GET", path="/health", headers=_bearer("lsk-alice")).status == 200
    assert door.ask("POST", headers=_bearer("lsk-bob")).status == 200


def test_a_key_that_is_taken_away_while_it_streams_opens_nothing_new_and_cuts_nothing() -> None:
    keys = LiveKeys(Server(api_keys=(ApiKey(name="alice", hash=hash_key("lsk-alice")),)))

    async def scenario() -> None:
        began, may_end = asyncio.Event(), asyncio.Event()

        async def parts() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            began.set()
            await may_end.wait()
            yield b"data: 2\n\n"

        async def stream(_: Request) -> StreamingResponse:
            return StreamingResponse(parts(), media_type="text/event-stream")

        door = Door(
            _starlette(Route("/v1/models", stream, methods=["POST"])),
            Server(api_keys=keys.all),
            keys=keys,
        )
        streaming = asyncio.create_task(_slow_post(door, messages=[b"", WAIT]))
        await began.wait()
        keys._use(())
        assert (await _slow_post(door)).status == 401
        may_end.set()
        reply = await streaming
        assert reply.complete
        assert reply.body.endswith(b"data: 2\n\n")

    asyncio.run(scenario())


def test_a_rate_that_is_changed_holds_at_once() -> None:
    keys = LiveKeys(Server(api_keys=(ApiKey(name="alice", hash=hash_key("lsk-alice")),)))
    door = Door(ECHO, Server(api_keys=keys.all), keys=keys)

    def ask_with(rate: int | None) -> int:
        keys._use((keys.all[0].model_copy(update={"requests_per_minute": rate}),))
        return door.ask("POST", headers=_bearer("lsk-alice")).status

    assert [ask_with(1), ask_with(1)] == [200, 429]
    assert [ask_with(60) for _ in range(11)] == [200] * 10 + [429]
    assert [ask_with(None), ask_with(1), ask_with(1)] == [200, 200, 429]


def _slow_post(door: Door, **kwargs: Any) -> Coroutine[Any, Any, Reply]:
    return door.send("POST", headers=_bearer("lsk-alice"), **kwargs)


def test_a_key_over_its_concurrency_is_429_until_one_ends() -> None:
    async def scenario() -> None:
        inside, go = asyncio.Event(), asyncio.Event()

        async def endpoint(_: Request) -> PlainTextResponse:
            inside.set()
            await go.wait()
            return PlainTextResponse("ok")

        door = _keyed(_starlette(Route("/v1/models", endpoint, methods=["POST"])), max_concurrent=1)
        running = asyncio.create_task(_slow_post(door))
        await inside.wait()
        refused = await _slow_post(door)
        assert (refused.status, refused.error["code"]) == (429, "concurrency_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        go.set()
        assert (await running).status == 200
        assert (await _slow_post(door)).status == 200

    asyncio.run(scenario())


def test_a_request_takes_as_many_places_of_its_key_as_it_has_sequences() -> None:
    async def endpoint(request: Request) -> PlainTextResponse:
        request.scope["state"]["take_more"](int((await request.body()).decode()))
        if request.headers.get("fails"):
            raise KeyError
        return PlainTextResponse("ok")

    door = _keyed(_starlette(Route("/v1/models", endpoint, methods=["POST"])), max_concurrent=4)

    def ask(more: bytes, **headers: str) -> Reply:
        return door.ask("POST", headers={**_bearer("lsk-alice"), **headers}, messages=[more])

    for _ in range(3):
        assert ask(b"3").status == 200
        assert ask(b"4").status == 400
        assert ask(b"3", fails="1").status == 500


async def _two_chunks_then_silence() -> AsyncIterator[bytes]:
    yield b"data: 1\n\n"
    yield b"data: 2\n\n"
    await asyncio.Event().wait()


async def _chunk_then_error() -> AsyncIterator[bytes]:
    yield b"data: 1\n\n"
    raise KeyError("secret")


async def _wait_for_disconnect(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.mark.parametrize(
    ("app", "messages", "server", "code"),
    [
        (ECHO, [b"x", STALL], {"header_timeout_s": 0.05}, "timeout"),
        (ECHO, [b"x", b"y" * 100], {"max_body": 50}, "body_too_large"),
        (ECHO, [b"x", lambda: asyncio.sleep(0), b"y"], {}, None),
        (_raising(KeyError("secret")), [b""], {}, "internal_error"),
        (_raising(EngineGone("gone")), [b""], {}, "engine_gone"),
        (_streaming(_chunk_then_error), [b"", WAIT], {}, "internal_error"),
        (_streaming(_two_chunks_then_silence), [b"", lambda: asyncio.sleep(0.02)], {}, None),
        (_streaming(_two_chunks_then_silence), [b"", WAIT], {"request_timeout_s": 0.05}, "timeout"),
        (_wait_for_disconnect, [b"", lambda: asyncio.sleep(0.02)], {}, None),
    ],
    ids=[
        "slow body",
        "large body",
        "disconnect in the body",
        "exception",
        "request error",
        "stream fails",
        "disconnect in the stream",
        "request timeout",
        "disconnect before the response",
    ],
)
def test_a_request_releases_its_place_however_it_ends(
    app: ASGIApp, messages: list[Any], server: dict[str, Any], code: str | None
) -> None:
    async def scenario() -> None:
        door = _keyed(app, server=server, max_concurrent=1)
        for _ in range(3):
            reply = await _slow_post(door, messages=messages)
            assert reply.rejected == ([code] if code else [])

    asyncio.run(scenario())


def test_a_cancelled_request_releases_its_place() -> None:
    async def scenario() -> None:
        door = _keyed(_wait_for_disconnect, max_concurrent=1)
        for _ in range(2):
            task = asyncio.create_task(_slow_post(door, messages=[b"", lambda: asyncio.sleep(9)]))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert door.rejected == []

    asyncio.run(scenario())


# The body


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("messages", [[b"hello"], [b"he", b"", b"llo"]])
def test_the_body_reaches_the_application_whole_and_in_one_message(
    method: str, messages: list[Any]
) -> None:
    seen: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([await receive(), await receive()])
        seen.append({"state": scope["state"]["body"]})

    _door(app).ask(method, messages=messages)
    assert seen == [
        {"type": "http.request", "body": b"hello", "more_body": False},
        {"type": "http.disconnect"},
        {"state": b"hello"},
    ]


def test_the_application_reads_the_same_body_as_the_state() -> None:
    seen = json.loads(_door().ask("POST", messages=[b"{", b"}"]).body)
    assert (seen["body"], seen["state_body"]) == ("{}", "{}")


def test_a_request_without_a_body_has_an_empty_one() -> None:
    assert json.loads(_door().ask().body)["state_body"] == ""


async def _never() -> None:
    raise AssertionError("the body was read")


def test_a_streamed_body_is_left_to_the_application_and_its_bounds() -> None:
    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["state"]["body"] is None
        pieces = []
        while True:
            message = await receive()
            pieces.append(len(message["body"]))
            if not message["more_body"]:
                break
        await JSONResponse(pieces)(scope, receive, send)

    door = Door(count, Server(max_body=4), streamed=frozenset({"/v1/files"}))
    sent = [b"x" * 5, b"y" * 6]
    assert json.loads(door.ask("POST", "/v1/files", messages=sent).body) == [5, 6]
    assert door.ask("POST", "/v1/models", messages=sent).status == 413


@pytest.mark.parametrize("length", ["101", "99999999999999"])
def test_a_declared_length_over_the_limit_is_413_before_the_body_is_read(length: str) -> None:
    reply = _door(max_body=100).ask("POST", headers={"Content-Length": length}, messages=[_never])
    assert (reply.status, reply.headers["connection"]) == (413, "close")
    assert reply.rejected == ["body_too_large"]


def test_a_body_of_exactly_the_limit_passes() -> None:
    headers = {"Content-Length": "100"}
    assert _door(max_body=100).ask("POST", headers=headers, messages=[b"x" * 100]).status == 200


def test_an_undeclared_body_over_the_limit_is_413_once_it_is_over() -> None:
    messages = [b"x" * 60, b"x" * 60, _never]
    reply = _door(max_body=100).ask("POST", messages=messages)
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("length", ["", "-1", "+1", "1.5", "1_0", "0x10", "ten", "9" * 5000])
def test_a_content_length_that_is_no_length_is_400(length: str) -> None:
    reply = _door().ask("POST", headers={"Content-Length": length}, messages=[_never])
    assert (reply.status, reply.rejected) == (400, ["invalid_request"])
    assert "Content-Length" in reply.error["message"]


def test_bodies_of_all_requests_are_bounded_together_while_they_are_answered() -> None:
    async def scenario() -> None:
        inside, go = asyncio.Event(), asyncio.Event()

        async def endpoint(_: Request) -> PlainTextResponse:
            inside.set()
            await go.wait()
            return PlainTextResponse("ok")

        app = _starlette(Route("/v1/models", endpoint, methods=["POST"]))
        door = Door(app, Server(max_body=100, max_body_total=150))
        for _ in range(3):
            inside.clear()
            go.clear()
            running = asyncio.create_task(door.send("POST", messages=[b"x" * 60, b"y" * 40]))
            await inside.wait()
            refused = await door.send("POST", messages=[b"x" * 51])
            assert (refused.status, refused.error["code"]) == (503, "bodies_exceeded")
            assert refused.headers["retry-after"] == "1"
            go.set()
            assert (await running).status == 200
            assert (await door.send("POST", messages=[b"x" * 100])).status == 200

    asyncio.run(scenario())


def test_time_without_a_core_is_not_counted_against_a_body() -> None:
    async def scenario() -> bytes | None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)

        async def receive() -> Message:
            return {"type": "http.request", "body": await reader.read(100), "more_body": False}

        reading = asyncio.create_task(read_body(receive, None, max_bytes=100, timeout_s=0.6))
        await asyncio.sleep(0)
        time.sleep(0.7)  # noqa: ASYNC251  # as if another process ran
        asyncio.get_running_loop().call_later(0.2, theirs.send, b"body")
        try:
            return await reading
        finally:
            writer.close()
            theirs.close()

    assert asyncio.run(scenario()) == b"body"


def test_a_body_that_does_not_arrive_is_408_and_closes_the_connection() -> None:
    reply = _door(header_timeout_s=0.05).ask("POST", messages=[b"{", STALL])
    assert (reply.status, reply.headers["connection"]) == (408, "close")
    assert reply.rejected == ["timeout"]


def test_drops_of_body_do_not_extend_the_time() -> None:
    async def scenario() -> float:
        async def drip() -> Message:
            await asyncio.sleep(0.02)
            return {"type": "http.request", "body": b" ", "more_body": True}

        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        loop = asyncio.get_running_loop()
        started = loop.time()
        scope = {"type": "http", "method": "POST", "path": "/v1/models", "headers": []}
        await asyncio.wait_for(_door(header_timeout_s=0.1).asgi(scope, drip, send), PATIENCE_S)
        assert sent[0]["status"] == 408
        return loop.time() - started

    assert asyncio.run(scenario()) < 2


def test_a_client_that_leaves_while_it_sends_is_neither_served_nor_answered() -> None:
    called: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        called.append(scope)

    reply = _door(app).ask("POST", messages=[b"{", lambda: asyncio.sleep(0), b"}"])
    assert (reply.messages, reply.rejected, called) == ([], [], [])


def test_a_client_that_leaves_during_the_stream_ends_it() -> None:
    closed: list[bool] = []

    async def produce() -> AsyncIterator[bytes]:
        try:
            yield b"data: 1\n\n"
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    reply = _door(_streaming(produce)).ask("POST", messages=[b"{}", lambda: asyncio.sleep(0.02)])
    assert (closed, reply.body, reply.rejected) == ([True], b"data: 1\n\n", [])


# Deadlines


def test_a_request_over_its_time_is_408() -> None:
    reply = _door(_wait_for_disconnect, request_timeout_s=0.05).ask(
        "POST", messages=[b"", _forever]
    )
    assert (reply.status, reply.error["type"]) == (408, "timeout_error")
    assert reply.rejected == ["timeout"]


def test_a_stream_over_its_time_ends_with_an_error_event() -> None:
    door = _door(_streaming(_two_chunks_then_silence), request_timeout_s=0.05)
    reply = door.ask("POST", messages=[b"", WAIT])
    first, second, _, event, rest = reply.body.split(b"\n\n")
    assert (first, second, rest, reply.complete) == (b"data: 1", b"data: 2", b"", True)
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "timeout"
    assert reply.rejected == ["timeout"]


def test_a_timeout_of_the_application_itself_is_not_the_clients() -> None:
    assert _door(_raising(TimeoutError("secret"))).ask().status == 500


async def _forever() -> None:
    await asyncio.Event().wait()


# The SLO header


@pytest.mark.parametrize(
    ("header", "slo_ms"),
    [("1", 1.0), ("0.5", 0.5), ("1500", 1500.0), ("86400000", 86_400_000.0)],
)
def test_an_slo_reaches_the_application_in_milliseconds(header: str, slo_ms: float) -> None:
    assert json.loads(_door().ask(headers={"x-slo-ms": header}).body)["slo_ms"] == slo_ms


def test_without_the_header_there_is_no_slo() -> None:
    assert json.loads(_door().ask().body)["slo_ms"] is None


@pytest.mark.parametrize(
    "header",
    ["", "0", "0.0", "-1", "86400000.1", "86400001", "nan", "inf", "1e3", "1_000", "fast", " "],
)
def test_any_other_slo_is_400_and_names_the_header(header: str) -> None:
    reply = _door().ask(headers={"x-slo-ms": header})
    assert (reply.status, reply.error["param"]) == (400, "x-slo-ms")


# CORS


def test_without_origins_no_cors_header_is_sent() -> None:
    reply = _door().ask(headers={"Origin": "https://app.example"})
    assert not [name for name in reply.headers if name.startswith("access-control-")]


def test_a_preflight_needs_no_key() -> None:
    door = _keyed(server={"cors_origins": ["https://app.example"]})
    reply = door.ask("OPTIONS", "/v1/chat/completions", PREFLIGHT)
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in reply.headers["access-control-allow-headers"]


def test_a_preflight_of_another_origin_is_refused() -> None:
    door = _door(cors_origins=["https://app.example"])
    reply = door.ask("OPTIONS", headers={**PREFLIGHT, "Origin": "https://evil.example"})
    assert reply.status == 400
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(("key", "status"), [("lsk-alice", 200), ("wrong", 401)])
def test_browsers_may_read_answers_and_errors_alike(key: str, status: int) -> None:
    door = _keyed(server={"cors_origins": ["https://app.example"]})
    reply = door.ask(headers={"Origin": "https://app.example", **_bearer(key)})
    assert reply.status == status
    assert reply.headers["access-control-allow-origin"] == "https://app.example"
    assert "X-Request-Id" in reply.headers["access-control-expose-headers"]


def test_the_lifespan_reaches_the_application() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def receive() -> Message:
        return {"type": "lifespan.startup"}

    async def send(message: Message) -> None:
        seen.append(message["type"])

    async def run() -> None:
        await _door(app).asgi({"type": "lifespan"}, receive, send)

    asyncio.run(run())
    assert seen == ["lifespan"]
