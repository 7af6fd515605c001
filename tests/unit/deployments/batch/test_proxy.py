"""The gateway's way to the lane: bytes pass in pieces, and every break has its error."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from ray.exceptions import RayError
from starlette.types import Message

from loomserve.deployments.batch.proxy import BatchProxy
from loomserve.platform.base.errors import BodyTooLarge, NotFound, RequestTimeout, Unavailable
from loomserve.platform.batch.http import identity
from loomserve.platform.config import ApiKey
from loomserve.platform.fleet.messages import INTERNAL_TOKEN_HEADER, OWNER_HEADER, LanePlace

KEY = ApiKey(name="alice", hash="sha256:" + "0" * 64)
FORM_BYTES = 2**16


AHEAD_S = 1e6
"""The lane is on a node that has been up for longer."""


class Lane:
    """A lane's handle, and a server that answers what it got."""

    def __init__(self, address: str | None, ahead_s: float = 0.0) -> None:
        self._address, self._ahead_s = address, ahead_s
        self.asked = 0

    def __getattr__(self, method: str) -> Any:
        return self

    async def remote(self, *given: object) -> Any:
        self.asked += 1
        if self._address is None:
            raise RayError("it is dead")
        return LanePlace(self._address, time.monotonic() + self._ahead_s)


async def echo(request: web.Request) -> web.Response:
    body = await request.read()
    return web.json_response(
        {
            "method": request.method,
            "target": request.raw_path,
            "owner": identity.owner_of(
                "token",
                request.headers[OWNER_HEADER],
                request.method,
                request.raw_path,
                time.monotonic() + AHEAD_S,
            ),
            "token": request.headers.get(INTERNAL_TOKEN_HEADER),
            "secret": request.headers.get("authorization"),
            "bytes": len(body),
            "length": request.headers.get("content-length"),
            "encoding": request.headers.get("transfer-encoding"),
        },
        status=409 if request.path.endswith("conflict") else 200,
        headers={"x-private": "no"},
    )


def source(*pieces: bytes, end: str = "whole") -> Callable[[], Awaitable[Message]]:
    """A client that sends pieces, and then has sent all, says no more, or is gone."""
    left = list(pieces)

    async def receive() -> Message:
        if left:
            more = len(left) > 1 or end != "whole"
            return {"type": "http.request", "body": left.pop(0), "more_body": more}
        if end == "silent":
            await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    return receive


def lane_on_another_node(address: str) -> Lane:
    return Lane(address, AHEAD_S)


def ask(
    *pieces: bytes,
    method: str = "POST",
    path: str = "/v1/files",
    end: str = "whole",
    body: bytes | None = None,
    lane: Callable[[str], Lane | None] = lane_on_another_node,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def go() -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{rest:.*}", echo)
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"limit=2",
            "headers": headers
            or [(b"authorization", b"Bearer key"), (OWNER_HEADER.encode(), b"x")],
            "state": {"api_key": KEY, "body": body},
        }
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            proxy = BatchProxy(
                lane(f"{server.host}:{server.port}"),  # type: ignore[arg-type]
                session,
                "token",
                max_file_bytes=2**20,
                idle_timeout_s=0.2,
            )
            await proxy(scope, source(*pieces, end="silent" if body is not None else end), send)

    asyncio.run(go())
    return sent


def answer(sent: list[Message]) -> tuple[int, Any]:
    text = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], json.loads(text)


def test_an_upload_reaches_the_lane_in_the_keys_name_and_without_its_secret() -> None:
    sent = ask(b"x" * 70_000, b"y" * 70_000)
    status, said = answer(sent)
    assert status == 200
    assert said == {
        "method": "POST",
        "target": "/v1/files?limit=2",
        "owner": "alice",
        "token": None,
        "secret": None,
        "bytes": 140_000,
        "length": None,
        "encoding": "chunked",
    }
    assert b"x-private" not in dict(sent[0]["headers"])


def test_a_body_that_was_read_already_is_passed_on_and_so_are_errors() -> None:
    status, said = answer(ask(body=b"{}", path="/v1/batches/conflict"))
    assert (status, said["bytes"]) == (409, 2)


def test_a_request_without_a_body_has_none() -> None:
    _, said = answer(ask(method="GET", body=b""))
    assert (said["method"], said["bytes"]) == ("GET", 0)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_body_is_framed_anew_whatever_its_client_said_of_it(method: str) -> None:
    framing = [(b"content-length", b"999"), (b"transfer-encoding", b"chunked")]
    _, said = answer(ask(method=method, body=b"12345", headers=framing))
    assert (said["bytes"], said["length"], said["encoding"]) == (5, "5", None)
    _, said = answer(ask(method=method, body=b"", headers=framing))
    assert (said["bytes"], said["encoding"]) == (0, None)
    assert said["length"] in (None, "0")


def test_what_is_too_large_is_refused_whether_it_says_so_or_not() -> None:
    pieces = [b"x" * 2**18] * 6
    with pytest.raises(BodyTooLarge, match=r"batch\.max_file_bytes"):
        ask(*pieces)
    with pytest.raises(BodyTooLarge):
        ask(b"x", headers=[(b"content-length", str(2**21).encode())])


def test_a_client_that_pauses_is_told_so_and_one_that_left_is_not_missed() -> None:
    with pytest.raises(RequestTimeout, match="Send it without pauses"):
        ask(b"x" * 100, end="silent")
    assert ask(b"x" * 100, end="gone") == []


def test_without_a_lane_and_with_one_that_is_away_clients_are_told_what_to_do() -> None:
    with pytest.raises(NotFound, match="batch section"):
        ask(b"x", lane=lambda _: None)
    with pytest.raises(Unavailable, match="batches go on by themselves"):
        ask(b"x", lane=lambda _: Lane(None))
    with pytest.raises(Unavailable):
        ask(b"x", lane=lambda _: Lane("127.0.0.1:1"))
