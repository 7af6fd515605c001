"""What ``loomserve serve`` says of its server, and how commands reach one that speaks TLS."""

from __future__ import annotations

import json
import resource
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.cli.admin_client import AdminClient, StatusError
from loomserve.platform.cli.checks.server import (
    descriptors,
    sizes,
    trust_of,
    url_of,
    warnings,
    with_absolute_files,
)
from loomserve.platform.cli.serve import _first_answer
from loomserve.platform.config import Config, Server, Tls
from loomserve.platform.http.tls import load
from tests.unit.certificates import Pair, make_pair

ANSWER = {"choices": [{"message": {"content": "Paris"}}]}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def pair() -> Pair:
    return make_pair()


@pytest.fixture
def serving(pair: Pair, tmp_path: Path) -> Iterator[Server]:
    """A server that speaks TLS and has one answer for all."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(ANSWER).encode())

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    class TlsServer(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Clients that do not trust it are what is tested."""

    files = pair.write(tmp_path)
    with TlsServer(("127.0.0.1", 0), Handler) as server:
        server.socket = load(files).wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Server(port=server.server_port, tls=files)
        server.shutdown()
        thread.join()


def config(tls: Tls) -> Config:
    device = {"name": "core0", "kind": "cpu", "cores": [0]}
    return Config.model_validate({"devices": [device], "models": [], "server": Server(tls=tls)})


def test_files_are_found_from_anywhere(pair: Pair, tmp_path: Path, home: Path) -> None:
    absolute = pair.write(tmp_path)
    given = config(Tls(certificate="cert.pem", key="key.pem"))
    server = with_absolute_files(given, tmp_path).server
    assert server.tls == absolute
    assert server.audit_log == str(home / "audit-8000.log")
    assert server.usage.folder == str(home / "usage-8000")


def test_a_pair_that_clients_refuse_stops_the_start(tmp_path: Path) -> None:
    old = make_pair(ends=timedelta(minutes=-1)).write(tmp_path)
    with pytest.raises(StartError, match=r"server\.tls\.certificate.*expired"):
        with_absolute_files(config(old), tmp_path)


def test_an_audit_log_that_cannot_be_written_stops_the_start(
    pair: Pair, tmp_path: Path, home: Path
) -> None:
    home.touch()
    with pytest.raises(StartError, match=r"server\.audit_log"):
        with_absolute_files(config(pair.write(tmp_path)), tmp_path)


@pytest.mark.parametrize(
    ("days", "says"), [(1, "expires in 1 days"), (13, "expires in 13 days"), (15, None)]
)
def test_a_certificate_is_warned_of_in_its_last_two_weeks(
    days: int, says: str | None, tmp_path: Path
) -> None:
    tls = make_pair(ends=timedelta(days=days, minutes=1)).write(tmp_path)
    said = list(warnings(Server(tls=tls)))
    assert len(said) == (0 if says is None else 1)
    assert all(str(says) in line for line in said)


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", 0), ("0.0.0.0", 1)])
def test_clear_text_is_warned_of_where_others_can_read_it(host: str, warned: int) -> None:
    said = list(warnings(Server(host=host, allow_unauthenticated=True)))
    assert len(said) == warned
    assert all("server.tls" in line for line in said)


def test_memory_that_engines_would_wait_for_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate({"models": [{"name": "m", "source": "demo"}]})
    monkeypatch.setenv("LOOMSERVE_MEMORY_THRESHOLD", "1")
    assert list(sizes(config)) == []
    monkeypatch.setenv("LOOMSERVE_MEMORY_THRESHOLD", "0.0001")
    (said,) = sizes(config)
    assert "memory is short" in said


@pytest.mark.parametrize(
    ("given", "most", "says"),
    [
        (256, 1024, "64 connections"),
        (256, 64, None),
        (1024, 1024, "640 connections"),
        (2048, 1024, None),
        (180, 7, None),
    ],
)
def test_connections_without_descriptors_are_told_of(
    given: int, most: int, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (given, given))
    said = list(descriptors(Server(max_connections=most)))
    assert len(said) == (0 if says is None else 1)
    assert all(str(says) in line and "ulimit" in line for line in said)


def test_too_few_descriptors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (128, 128))
    with pytest.raises(StartError, match="at least 256"):
        list(descriptors(Server()))


@pytest.mark.parametrize(
    ("ssd", "warned"), [(None, 0), ("64MiB", 1), ("128MiB", 1), ("255MiB", 1), ("256MiB", 0)]
)
def test_an_ssd_that_holds_little_more_than_memory_is_warned_of(
    ssd: str | None, warned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOMSERVE_MEMORY_THRESHOLD", "1")
    store = {"memory": "128MiB", "ssd": ssd}
    said = list(
        sizes(
            Config.model_validate({"models": [{"name": "m", "source": "demo"}], "kvstore": store})
        )
    )
    assert len(said) == warned
    assert all("kvstore.ssd" in line for line in said)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "https://127.0.0.1:8000"),
        ("0.0.0.0", "https://127.0.0.1:8000"),
        ("::1", "https://[::1]:8000"),
    ],
)
def test_the_url_says_https(host: str, url: str, pair: Pair, tmp_path: Path) -> None:
    tls = pair.write(tmp_path)
    assert url_of(Server(host=host, tls=tls, allow_unauthenticated=True)) == url


def test_operators_ask_at_their_own_port_if_they_have_one() -> None:
    for server, ports, url in (
        (Server(port=8005), (8005,), "http://127.0.0.1:8005"),
        (Server(port=8005, admin_port=8006), (8005, 8006), "http://127.0.0.1:8006"),
    ):
        assert server.ports == ports
        assert url_of(server, server.operators_port) == url
        assert url_of(server) == "http://127.0.0.1:8005"


def test_the_platform_asks_itself_and_trusts_its_own_certificate_only(
    serving: Server, tmp_path: Path
) -> None:
    assert "Paris" in _first_answer(url_of(serving), "{}", trust_of(serving))
    make_pair().write(tmp_path)
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(url_of(serving), timeout=5, context=trust_of(serving))


def test_commands_trust_what_the_environment_names(
    serving: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert serving.tls is not None
    monkeypatch.setenv("SSL_CERT_FILE", serving.tls.certificate)
    with AdminClient(url_of(serving), "token") as client:
        assert client.ask("state").json() == ANSWER


def test_commands_say_how_to_trust_and_to_speak_tls(
    serving: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    url = url_of(serving)
    with AdminClient(url, "token") as tls, pytest.raises(StatusError, match="set SSL_CERT_FILE"):
        tls.ask("state")
    plain = AdminClient(url.replace("https", "http"), "token")
    with plain, pytest.raises(StatusError, match="https://"):
        plain.ask("state")
