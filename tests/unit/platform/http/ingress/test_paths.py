"""Which credentials lead to which paths, however a path is written: requests over a real server."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from loomserve.platform.access.keys import hash_key
from loomserve.platform.config import Server
from loomserve.platform.http.ingress import ingress_middleware
from loomserve.platform.http.protocol import Bounds
from tests.unit.platform.http.raw import RawServer, serving

KEY, ADMIN = "sk-loom-" + "k" * 32, "sk-loom-" + "a" * 32
CREDENTIALS = (None, KEY, ADMIN)
OPEN = {"/health", "/ready", "/-/healthz", "/admin/v1/docs", "/admin/v1/openapi.json"}
DOORS = {
    "/health": (200, 200, 200),
    "/ready": (200, 200, 200),
    "/-/healthz": (200, 200, 200),
    "/admin/v1/docs": (200, 200, 200),
    "/admin/v1/openapi.json": (200, 200, 200),
    "/v1": (401, 200, 401),
    "/v1/models": (401, 200, 401),
    "/v1/files/x/content": (401, 200, 401),
    "/metrics": (401, 401, 200),
    "/admin": (401, 401, 200),
    "/admin/v1/state": (401, 401, 200),
    "/admin/v1/docs/x": (401, 401, 200),
    "/docs": (401, 401, 200),
    "/openapi.json": (401, 401, 200),
    "/console": (200, 200, 200),
    "/console/": (200, 200, 200),
    "/console/x": (200, 200, 200),
    "/consoles": (404, 404, 200),
    "/": (404, 404, 200),
    "/v2": (404, 404, 200),
    "/healthy": (404, 404, 200),
    "/administer": (404, 404, 200),
}
PARTS = (
    "v1", "V1", "%76%31", "v1%00", "admin", "%61dmin", "health", "ready", "metrics", "docs",
    "console", "models", ".", "..", "%2e%2e", "%2E", "", "%2f", "%5c", "\\", ";", ";a=b", "?", "#",
    "%00", "%0a", "%20", "*", "@", "%ff", "%c0%ae", "http://x", "a" * 5000,
)  # fmt: skip


def is_under_v1(path: str) -> bool:
    return path == "/v1" or path.startswith("/v1/")


def may_see(credential: str | None, path: str) -> bool:
    """Whether a request with this credential may reach what is at a path."""
    if path in OPEN or path == "/console" or path.startswith("/console/"):
        return True
    return credential == (KEY if is_under_v1(path) else ADMIN)


async def tell_path(scope: Scope, receive: Receive, send: Send) -> None:
    path = json.dumps({"path": scope["path"]}).encode()
    headers = [(b"content-length", str(len(path)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": path})


@asynccontextmanager
async def door() -> AsyncIterator[RawServer]:
    server = Server.model_validate(
        {
            "api_keys": [{"name": "k", "hash": hash_key(KEY)}],
            "admin_token_hash": hash_key(ADMIN),
        }
    )
    app = ingress_middleware(tell_path, server, rejected=lambda _: None)
    async with serving(app, Bounds(head_timeout_s=5)) as served:
        yield served


async def ask(server: RawServer, target: str, credential: str | None) -> tuple[int, str | None]:
    """The status, and the path that was reached."""
    token = f"Authorization: Bearer {credential}\r\n" if credential else ""
    head = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{token}\r\n"
    answer = await server.ask(head.encode("latin-1"))
    status = int(answer.split()[1])
    if status != 200:
        return status, None
    return status, json.loads(answer.partition(b"\r\n\r\n")[2])["path"]


async def reached_wrongly(targets: Iterable[str]) -> list[tuple[str, str | None]]:
    wrong = []
    async with door() as server:
        for target in targets:
            for credential in CREDENTIALS:
                status, path = await ask(server, target, credential)
                assert status in (200, 400, 401, 404, 431), target
                if path is not None and not may_see(credential, path):
                    wrong.append((target, credential))
    return wrong


def test_each_path_has_its_door() -> None:
    async def check() -> dict[str, tuple[int, ...]]:
        async with door() as server:
            return {
                path: tuple([(await ask(server, path, each))[0] for each in CREDENTIALS])
                for path in DOORS
            }

    assert uvloop.run(check()) == DOORS


@pytest.mark.parametrize("base", ["/v1/models", "/admin/v1/state"])
def test_no_way_to_write_a_path_leads_past_its_door(base: str) -> None:
    targets = [f"{base}/{part}" for part in PARTS]
    targets += [f"/{part}{base}" for part in PARTS]
    targets += [f"{part}{base}" for part in ("*", "", "/", "//", "/.", "http://x", "x:1", "?")]
    targets += ["*", "/" + "a" * 2**16, base.upper(), base + "%00", base + "\0", base + "\xff"]
    assert uvloop.run(reached_wrongly(target for target in targets if target)) == []


TARGETS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=6).map(
    lambda of: "/" + "/".join(of)
)
ANYTHING = st.text(
    st.characters(min_codepoint=1, max_codepoint=255, exclude_characters=" \r\n"), min_size=1
)


@given(st.lists(st.one_of(TARGETS, ANYTHING), min_size=20, max_size=20))
@settings(deadline=None, max_examples=20)
def test_nor_does_any_other_target(targets: list[str]) -> None:
    assert uvloop.run(reached_wrongly(targets)) == []


@pytest.mark.slow
def test_nor_do_a_hundred_thousand_others() -> None:
    draw = random.Random("loomserve")

    def target() -> str:
        if draw.random() < 0.7:
            return "/" + "/".join(draw.choices(PARTS, k=draw.randint(1, 6)))
        characters = [chr(draw.randint(1, 255)) for _ in range(draw.randint(1, 60))]
        return "".join(each for each in characters if each not in " \r\n") or "/"

    assert uvloop.run(reached_wrongly(target() for _ in range(100_000))) == []
