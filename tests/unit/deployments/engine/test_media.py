"""vLLM's own media connector, set as our engines set it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any

import pytest
from PIL import Image
from vllm import envs
from vllm.connections import HTTPConnection
from vllm.multimodal.media import MediaConnector

from loomserve.deployments.engine.app import _engine_options, _environment
from loomserve.platform.config import Device, Model, Server
from loomserve.platform.fleet.messages import EngineSpec
from loomserve.platform.scheduling.options import SchedulerOptions

URLS = [
    "http://127.0.0.1/x.png",
    "http://localhost/x.png",
    "http://127.1/x.png",
    "http://0/x.png",
    "http://2130706433/x.png",
    "http://0x7f000001/x.png",
    "http://[::1]/x.png",
    "http://[::ffff:127.0.0.1]/x.png",
    "http://169.254.169.254/latest/meta-data",
    "http://[fe80::1]/x.png",
    "http://10.0.0.1/x.png",
    "http://192.168.0.1/x.png",
    "https://example.org/x.png",
    "http://media.example@127.0.0.1/x.png",
    "http://127.0.0.1\\@media.example/x.png",
    "http://media.example.evil.org/x.png",
    "http://no host/x.png",
    "http:///x.png",
    "http:x.png",
    "HTTP://127.0.0.1/x.png",
    "ftp://127.0.0.1/x.png",
    "file:///etc/hostname",
    "file://127.0.0.1/etc/hostname",
]


class Connection(HTTPConnection):
    """A connection that writes down whom it is asked to ask."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def get_bytes(self, url: str, **_: Any) -> bytes:
        self.asked.append(url)
        return png()

    async def async_get_bytes(self, url: str, **_: Any) -> bytes:
        return self.get_bytes(url)


def png() -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (2, 2)).save(buffer, "PNG")
    return buffer.getvalue()


def connector(
    monkeypatch: pytest.MonkeyPatch, *hosts: str, connection: HTTPConnection | None = None
) -> MediaConnector:
    spec = EngineSpec(
        model=Model(name="m", source="demo", devices=("gpu0",)),
        devices=(Device(name="gpu0", kind="cuda", gpu=0),),
        path="m",
        internal_token="t",
        server=Server(media_hosts=hosts),
        kv_transfer_config=None,
        scheduling=SchedulerOptions(),
        lending=None,
    )
    options = _engine_options(spec)
    for name, value in _environment(spec, options).items():
        monkeypatch.setenv(name, value)
    # Whoever made an engine in this process before has had vLLM keep what it read.
    envs.disable_envs_cache()
    assert "allowed_local_media_path" not in options
    return MediaConnector(
        connection=connection or HTTPConnection(),
        allowed_media_domains=options["allowed_media_domains"],
    )


def ways(made: MediaConnector) -> list[Callable[[str], object]]:
    return [made.fetch_image, lambda url: asyncio.run(made.fetch_image_async(url))]


@pytest.mark.parametrize("hosts", [(), ("media.example",)])
@pytest.mark.parametrize("url", URLS)
def test_an_engine_asks_no_host_that_is_not_named(
    monkeypatch: pytest.MonkeyPatch, url: str, hosts: tuple[str, ...]
) -> None:
    connection = Connection()
    for fetch in ways(connector(monkeypatch, *hosts, connection=connection)):
        with pytest.raises((ValueError, RuntimeError)):
            fetch(url)
    assert connection.asked == []


def test_an_engine_asks_a_host_that_is_named_and_takes_media_as_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = Connection()
    url = "https://media.example/x.png"
    for fetch in ways(connector(monkeypatch, "media.example", connection=connection)):
        fetch(url)
        fetch("data:image/png;base64," + base64.b64encode(png()).decode())
    assert connection.asked == [url, url]


@pytest.fixture
def servers() -> Iterator[tuple[str, list[str]]]:
    """A URL that leads on to another server, and what the other is asked."""
    asked: list[str] = []

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(png())

        def log_message(self, *_: object) -> None:
            pass

    class Leading(Other):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{other.server_port}/secret")
            self.end_headers()

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Other) as other,
        ThreadingHTTPServer(("127.0.0.1", 0), Leading) as leading,
    ):
        for server in (other, leading):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{leading.server_port}/x.png", asked
        other.shutdown()
        leading.shutdown()


def test_a_named_host_leads_an_engine_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, servers: tuple[str, list[str]]
) -> None:
    url, asked = servers
    for fetch in ways(connector(monkeypatch, "127.0.0.1")):
        with contextlib.suppress(Exception):  # what comes is no image
            fetch(url)
    assert asked == []
