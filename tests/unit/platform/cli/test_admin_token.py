"""The admin token's file: private, kept, refused if others had it, and sent nowhere else."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from loomserve.platform.access.keys import hash_key
from loomserve.platform.base.errors import StartError
from loomserve.platform.cli import admin_client
from loomserve.platform.cli.admin_client import AdminClient
from loomserve.platform.cli.admin_token import read_token, token_for, token_path, with_admin_token
from loomserve.platform.config import Config
from tests.waiting import PATIENCE_S

CONFIG = Config.model_validate(
    {"devices": [{"name": "core0", "kind": "cpu", "cores": [0]}], "models": []}
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def started_hash() -> str | None:
    return with_admin_token(CONFIG, lambda _: None).server.admin_token_hash


def test_the_first_start_makes_a_private_file_and_gives_away_only_its_hash(home: Path) -> None:
    said: list[str] = []
    config = with_admin_token(CONFIG, said.append)
    token = read_token()
    assert token is not None
    assert len(token) > 40
    assert config.server.admin_token_hash == hash_key(token)
    assert token not in config.model_dump_json()
    assert len(said) == 1
    assert str(token_path()) in said[0]
    assert token not in said[0]
    assert stat.S_IMODE(token_path().stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_the_file_is_private_from_its_first_moment_whatever_the_umask() -> None:
    opened: list[tuple[int, int]] = []
    umask = os.umask(0)
    try:
        original = os.open

        def recording(path: object, flags: int, mode: int = 0o777) -> int:
            opened.append((flags, mode))
            return original(path, flags, mode)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "open", recording)
            started_hash()
    finally:
        os.umask(umask)
    created = [(flags, mode) for flags, mode in opened if flags & os.O_CREAT]
    assert [(bool(flags & os.O_EXCL), mode) for flags, mode in created] == [(True, 0o600)]


def test_later_starts_keep_the_token() -> None:
    assert started_hash() == started_hash()


def test_a_configured_token_needs_no_file() -> None:
    server = CONFIG.server.model_copy(update={"admin_token_hash": hash_key("mine")})
    config = CONFIG.model_copy(update={"server": server})
    said: list[str] = []
    assert with_admin_token(config, said.append) is config
    assert not said
    assert not token_path().exists()


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o602, 0o620, 0o644, 0o660])
def test_a_file_that_others_can_read_or_write_is_refused(mode: int) -> None:
    started_hash()
    token_path().chmod(mode)
    for use in (started_hash, lambda: token_for("http://127.0.0.1:8000")):
        with pytest.raises(StartError, match=rf"{token_path()}.*{mode:04o}.*delete it"):
            use()


def test_somebody_elses_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    started_hash()
    monkeypatch.setattr(os, "geteuid", lambda: token_path().stat().st_uid + 1)
    with pytest.raises(StartError, match=r"another user: set LOOMSERVE_HOME .*admin_token_hash"):
        started_hash()


def _link(path: Path) -> None:
    (path.parent / "elsewhere").write_text("secret")
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("put", "says"),
    [
        (_link, "cannot be read"),
        (os.mkfifo, "is not a file"),
        (Path.mkdir, "is not a file"),
        (lambda path: path.touch(0o600), "holds no token: delete it"),
        (lambda path: (path.touch(0o600), path.write_bytes(b"\xff\xfe")), "holds no token"),
        (lambda path: (path.touch(0o600), path.write_bytes(b"a\r\nb")), "holds no token"),
    ],
)
def test_what_is_no_file_with_a_token_is_refused(
    home: Path, put: Callable[[Path], object], says: str
) -> None:
    home.mkdir(mode=0o700)
    put(token_path())
    with pytest.raises(StartError, match=says):
        started_hash()


def test_a_folder_that_cannot_be_made_is_said_so(home: Path) -> None:
    home.write_text("a file")
    with pytest.raises(StartError, match=r"admin token .*LOOMSERVE_HOME"):
        started_hash()


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:8000", "http://localhost:8000/", "https://LOCALHOST", "http://[::1]:9000",
     "http://127.8.0.1"],
)  # fmt: skip
def test_the_commands_find_the_token_of_this_machine(url: str) -> None:
    assert token_for(url) is None
    started_hash()
    assert token_for(url) == read_token()


ELSEWHERE = [
    "http://example.org:8000",
    "http://10.0.0.1:8000",
    "http://0.0.0.0:8000",
    "http://[::]:8000",
    "http://localhost.evil.example",
    "http://127.0.0.1.evil.example",
    "http://127.0.0.1@evil.example",
    "http://localhost:8000@evil.example:80",
    "http://evil.example/?http://127.0.0.1",
    "http://evil.example#@127.0.0.1",
    "http://127.1:8000",
    "http://2130706433:8000",
]


@pytest.mark.parametrize("url", [*ELSEWHERE, "127.0.0.1:8000", "http://[not-an-address", ""])
def test_only_a_url_of_this_machine_gets_the_token(url: str) -> None:
    started_hash()
    assert token_for(url) is None


@pytest.mark.parametrize("url", ELSEWHERE)
def test_no_other_host_is_sent_the_token(url: str) -> None:
    started_hash()
    token = read_token()
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200)

    with AdminClient(url, transport=httpx.MockTransport(answer)) as client:
        client.ask("state")
    assert [str(token) in str(request.headers.raw) for request in sent] == [False]


def test_a_redirect_elsewhere_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    started_hash()
    asked: list[httpx.Request] = []

    def redirect(_: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(307, headers={"Location": "http://evil.example/"})

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", redirect)
    with AdminClient("http://127.0.0.1:8000") as client:
        client.ask("state")
    assert [request.url.host for request in asked] == ["127.0.0.1"]
    assert asked[0].headers["authorization"] == f"Bearer {read_token()}"


# As nobody, told the port by its standard output; what it hears goes there, too.
LISTENER = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    if sys.argv[1] == "alone":
        server.close()
    print("heard", connection.recv(4096), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("given", [None, "a token of the user's"])
@pytest.mark.parametrize("after", ["listening", "alone"])
def test_no_other_user_who_took_the_port_hears_the_token(
    given: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_hash()
    # As if the listener had come after the first look.
    monkeypatch.setattr(admin_client, "token_for", lambda _: read_token())
    listener = subprocess.Popen(
        [sys.executable, "-c", LISTENER, after], stdout=subprocess.PIPE, text=True
    )
    assert listener.stdout is not None
    url = f"http://localhost:{int(listener.stdout.readline())}"
    with AdminClient(url, given) as client, pytest.raises(StartError, match="was not sent"):
        client.ask("state")
    if listener.poll() is None:
        # It heard nothing, and may have been asked nothing at all.
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))).close()
    assert listener.stdout.read() == "heard b''\n"
    assert listener.wait(PATIENCE_S) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_port_of_another_users_gets_no_token_from_the_file() -> None:
    started_hash()
    listener = subprocess.Popen(
        [sys.executable, "-c", LISTENER, "listening"], stdout=subprocess.PIPE, text=True
    )
    assert listener.stdout is not None
    try:
        with pytest.raises(StartError, match="user nobody listens"):
            token_for(f"http://127.0.0.1:{int(listener.stdout.readline())}")
    finally:
        listener.kill()
        listener.wait()


def test_a_token_that_is_given_goes_to_a_remote_address_as_it_is() -> None:
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200)

    transport = httpx.MockTransport(answer)
    with AdminClient("http://example.org:8000", "given", transport) as client:
        client.ask("state")
    assert [request.headers["authorization"] for request in sent] == ["Bearer given"]
    assert "trace" not in sent[0].extensions
