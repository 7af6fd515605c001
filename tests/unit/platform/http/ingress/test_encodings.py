"""Encodings of bodies: UTF-8 is read, whatever marks it, and all others are named for what they
are."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from loomserve.platform.access.keys import hash_key
from loomserve.platform.config import Server
from loomserve.platform.http.ingress import exception_handlers
from tests.unit.platform.http.test_ingress import WAIT, Door, Headers, Reply

PATH = "/v1/chat/completions"
BODY = json.dumps({"model": "m", "prompt": "Grüße, 你好"}, ensure_ascii=False)
UTF_8 = BODY.encode()


async def echo(request: Request) -> Response:
    return Response(request.state.body)


def post(body: bytes, headers: Headers | None = None, **door: Any) -> Reply:
    app = Starlette(routes=[Route(PATH, echo, methods=["POST"])])
    return Door(app, **door).ask("POST", PATH, headers, [body, WAIT])


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (UTF_8, {}),
        (codecs.BOM_UTF8 + UTF_8, {}),
        (UTF_8, {"Content-Encoding": "identity"}),
        (UTF_8, {"Content-Type": "application/json; charset=utf-8"}),
        # As curl, PowerShell and clients of other languages send it.
        (UTF_8, {"Content-Type": "application/x-www-form-urlencoded"}),
        (UTF_8, {"Content-Type": "text/plain"}),
    ],
)
def test_utf_8_is_read_whatever_its_type_and_mark(body: bytes, headers: Headers) -> None:
    reply = post(body, headers)
    assert (reply.status, reply.body) == (200, UTF_8)


@pytest.mark.parametrize("body", [b"", b"{}", b"\n", b"1", b"--x\r\n\xff\xfe\x00", b"\xe4"])
def test_what_is_no_other_encoding_is_left_to_who_reads_it(body: bytes) -> None:
    reply = post(body)
    assert (reply.status, reply.body) == (200, body)


@pytest.mark.parametrize(
    ("encoding", "named"),
    [
        ("utf-16", "UTF-16"),
        ("utf-16-le", "UTF-16"),
        ("utf-16-be", "UTF-16"),
        ("utf-32", "UTF-32"),
        ("utf-32-le", "UTF-32"),
        ("utf-32-be", "UTF-32"),
    ],
)
@pytest.mark.parametrize("text", [BODY, "{}", "[1]", " {}"])
def test_other_encodings_of_unicode_are_named(encoding: str, named: str, text: str) -> None:
    for body in (text.encode(encoding), ("\ufeff" + text).encode(encoding)):
        reply = post(body)
        assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
        assert f"is in {named}." in reply.error["message"]
        assert "UTF-8" in reply.error["message"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (gzip.compress(UTF_8, mtime=0), "gzip"),
        (zlib.compress(UTF_8), "zlib"),
        (zlib.compress(UTF_8, 1), "zlib"),
        (zlib.compress(UTF_8, 9), "zlib"),
        (b"\x28\xb5\x2f\xfd" + b"x" * 9, "zstd"),
    ],
)
def test_compressed_bodies_without_a_header_are_named(body: bytes, named: str) -> None:
    reply = post(body)
    assert reply.status == 415
    assert named in reply.error["message"]


@pytest.mark.parametrize(
    "coding", ["gzip", "x-gzip", "deflate", "br", "zstd", "GZIP", "gzip, gzip", "identity, gzip"]
)
@pytest.mark.parametrize("streamed", [frozenset(), frozenset({PATH})])
def test_compressed_bodies_are_refused_before_they_are_read(
    coding: str, streamed: frozenset[str]
) -> None:
    # A bomb is never expanded: it is not even received.
    reply = post(b"", {"Content-Encoding": coding, "Content-Length": "5000000"}, streamed=streamed)
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
    assert reply.headers["accept-encoding"] == "identity"
    assert coding.lower() in reply.error["message"]
    assert "without that header" in reply.error["message"]


@pytest.mark.parametrize(
    "type_", [None, "application/json", "application/x-www-form-urlencoded", "text/plain", "x"]
)
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_the_admin_api_reads_json_of_any_type(type_: str | None, mark: bytes) -> None:
    api = FastAPI(exception_handlers=exception_handlers)

    @api.put("/role")
    async def role(request: dict[str, str]) -> dict[str, str]:
        return request

    server = Server.model_validate({"admin_token_hash": hash_key("token")})
    headers = {"Authorization": "Bearer token", **({"Content-Type": type_} if type_ else {})}
    door = Door(Starlette(routes=[Mount("/admin/v1", api)]), server)
    reply = door.ask("PUT", "/admin/v1/role", headers, [mark + b'{"role": "prefill"}', WAIT])
    assert (reply.status, json.loads(reply.body)) == (200, {"role": "prefill"})
