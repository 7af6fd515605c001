"""The page on reverse proxies has a configuration that nginx runs, and that does what it says."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from loomserve.platform.access.keys import new_key
from loomserve.platform.config import ApiKey, Server
from loomserve.platform.http.ingress import exception_handlers, ingress_middleware
from loomserve.platform.http.protocol import Bounds
from loomserve.platform.http.server import HttpServer, listen
from tests.unit.certificates import make_pair
from tests.waiting import PATIENCE_S

PAGE = Path(__file__).parents[2] / "docs" / "reverse_proxy.md"
NAME = "llm.example.org"
NGINX = shutil.which("nginx")
KEY, HASH = new_key()

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


class Upstream:
    """Application behind the platform's own ingress and protocol, on loopback."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.asked: list[Request] = []
        server = Server(api_keys=(ApiKey(name="a", hash=HASH),), allowed_hosts=(NAME,))
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._stream, methods=["POST"]),
                Route("/v1/echo", self._echo, methods=["POST"]),
                Route("/health", self._echo),
                Route("/admin/v1/state", self._echo),
                Route("/metrics", self._echo),
            ],
            exception_handlers=exception_handlers,
        )
        self._app = ingress_middleware(app, server, rejected=lambda _: None)
        self._socket = listen("127.0.0.1", 0)
        self.port = int(self._socket.getsockname()[1])

    async def _stream(self, request: Request) -> Response:
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        yield b"data: first\n\n"
        await asyncio.to_thread(self.go_on.wait, 10)
        yield b"data: last\n\n"

    async def _echo(self, request: Request) -> Response:
        self.asked.append(request)
        body = request.scope["state"]["body"]
        return JSONResponse({"bytes": len(body), "host": request.headers["host"]})

    def run(self, ended: threading.Event) -> None:
        asyncio.run(self._serve(ended))

    async def _serve(self, ended: threading.Event) -> None:
        http = HttpServer(self._app, self._socket, bounds=Bounds(head_timeout_s=10))
        await http.start()
        await asyncio.to_thread(ended.wait)
        await http.stop(1)


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    ended = threading.Event()
    upstream = Upstream()
    thread = threading.Thread(target=upstream.run, args=(ended,))
    thread.start()
    yield upstream
    ended.set()
    thread.join()


@pytest.fixture(scope="module")
def proxy(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of nginx with the page's configuration, whose names alone are others."""
    assert NGINX is not None
    folder = tmp_path_factory.mktemp("nginx")
    tls = make_pair(name=NAME).write(folder)
    with listen("127.0.0.1", 0) as free:
        port = int(free.getsockname()[1])
    found = re.search(r"```nginx\n(.+?)```", PAGE.read_text(), re.S)
    assert found is not None
    shown = found[1]
    for theirs, here in (
        ("127.0.0.1:8000", f"127.0.0.1:{upstream.port}"),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/llm/fullchain.pem", tls.certificate),
        ("/etc/ssl/llm/privkey.pem", tls.key),
    ):
        assert theirs in shown
        shown = shown.replace(theirs, here)
    places = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    # Its workers would be another user, who does not get into the folder.
    user = "user root;" if os.geteuid() == 0 else ""
    config = folder / "nginx.conf"
    config.write_text(
        f"{user} daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{places}{shown}}}\n"
    )
    process = subprocess.Popen([NGINX, "-c", config, "-e", f"{folder}/error.log"])
    trust = ssl.create_default_context(cafile=tls.certificate)
    trust.check_hostname = False
    headers = {"Host": NAME, "Authorization": f"Bearer {KEY}"}
    url = f"https://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, verify=trust, headers=headers, timeout=20) as client:
            _wait_for(client, process)
            yield client
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _wait_for(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            client.get("/health")
        except httpx.TransportError:
            time.sleep(0.05)
        else:
            return
    pytest.fail("nginx does not answer")


def test_a_stream_passes_as_it_comes(upstream: Upstream, proxy: httpx.Client) -> None:
    with proxy.stream("POST", "/v1/chat/completions", json={}) as answer:
        pieces = answer.iter_bytes()
        assert next(pieces) == b"data: first\n\n"
        upstream.go_on.set()
        assert b"".join(pieces) == b"data: last\n\n"


def test_a_large_body_passes_and_one_beyond_the_bound_is_refused_in_shape(
    proxy: httpx.Client,
) -> None:
    assert proxy.post("/v1/echo", content=b"x" * 2**22).json() == {"bytes": 2**22, "host": NAME}
    refused = proxy.post("/v1/echo", content=b"x" * (2**23 + 1))
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("path", ["/admin/v1/state", "/metrics", "/v1/../admin/v1/state"])
def test_nothing_else_is_passed_on(upstream: Upstream, proxy: httpx.Client, path: str) -> None:
    asked = len(upstream.asked)
    assert proxy.get(path).status_code == 404
    assert len(upstream.asked) == asked


def test_keys_names_and_ids_hold_behind_it(proxy: httpx.Client) -> None:
    nobody = proxy.post("/v1/echo", json={}, headers={"Authorization": "Bearer lsk-no"})
    assert nobody.status_code == 401
    answer = proxy.post("/v1/echo", json={}, headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    other = proxy.post("/v1/echo", json={}, headers={"Host": "evil.example"})
    assert (other.status_code, json.loads(other.content)["error"]["code"]) == (403, "forbidden")
