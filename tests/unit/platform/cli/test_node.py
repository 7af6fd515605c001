"""``loomserve node``: what it is told, and what it makes of what it is not."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from loomserve.platform.base.errors import ConfigError, StartError
from loomserve.platform.cli.node import _options
from loomserve.platform.nodes.node import NodeOptions


def options(
    tmp_path: Path,
    *,
    head: bool = False,
    address: str | None = "10.9.0.1:6379",
    name: str | None = "n1",
    ip: str | None = "10.9.0.2",
    state: Path | None = None,
    ports: str | None = None,
) -> NodeOptions:
    return _options(head, address, name, ip, state, tmp_path / "token", ports)


@pytest.fixture
def token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t" * 64)
    (tmp_path / "token").chmod(0o600)


@pytest.mark.usefixtures("token")
def test_a_worker_joins_the_head(tmp_path: Path) -> None:
    made = options(tmp_path, ports="20000-20999")
    assert (made.head, made.is_head, made.ip) == (("10.9.0.1", 6379), False, "10.9.0.2")
    assert made.ports == (20000, 20999)
    assert made.state is None
    assert options(tmp_path, name=None).name == socket.gethostname()


def test_the_head_makes_the_token_and_listens_at_its_own_address(tmp_path: Path) -> None:
    made = options(tmp_path, head=True, ip=None, state=tmp_path / "state")
    assert made.head == ("10.9.0.1", 6379)
    assert made.ip == "10.9.0.1"
    assert made.token == (tmp_path / "token").read_text()
    assert made.state is not None
    assert made.state.stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"address": None}, ConfigError, "--address: say HOST:PORT"),
        ({"address": "head"}, ConfigError, "--address 'head'"),
        ({"name": "a b"}, ConfigError, "--name 'a b'"),
        ({"ports": "1-2"}, ConfigError, "--ports '1-2'"),
        ({"ports": "20999-20000"}, ConfigError, "--ports"),
        ({"ip": "127.0.0.1"}, StartError, "cannot reach it"),
        ({"ip": "fd00::1"}, ConfigError, "--ip 'fd00::1'"),
        ({"ip": "one"}, ConfigError, "--ip 'one'"),
        ({"address": "nowhere.invalid:6379", "ip": None}, StartError, "no way to nowhere.invalid"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, given: dict[str, str | None], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        options(tmp_path, **given)  # type: ignore[arg-type]
