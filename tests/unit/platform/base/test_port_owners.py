"""Whose sockets listen at a port: tables of the kernel's, real ones and made-up ones."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from loomserve.platform.base import loopback
from loomserve.platform.base.errors import StartError
from loomserve.platform.base.loopback import check_listeners

ME, STRANGER = 4_000_001, 4_000_002
HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout"
PORT = 8000
V4 = {
    "127.0.0.1": "0100007F",
    "127.0.0.2": "0200007F",
    "0.0.0.0": "00000000",
    "10.0.0.1": "0100000A",
}
V6 = {
    "::1": "00000000000000000000000001000000",
    "::": "0" * 32,
    "::ffff:127.0.0.1": "0000000000000000FFFF00000100007F",
    "::ffff:0.0.0.0": "0000000000000000FFFF000000000000",
}
Row = tuple[str, int]


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    paths = tmp_path / "tcp", tmp_path / "tcp6"
    monkeypatch.setattr(loopback, "_TABLES", paths)
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    return paths


def write(tables: tuple[Path, Path], *rows: Row, state: str = "0A", port: int = PORT) -> None:
    for path, names in zip(tables, (V4, V6), strict=True):
        lines = [
            f"   0: {names[address]}:{port:04X} {'0' * len(names[address])}:0000 {state} "
            f"00000000:00000000 00:00000000 00000000 {user:5} 0 169371 1 0 100 0 0 10 0"
            for address, user in rows
            if address in names
        ]
        path.write_text("\n".join([HEAD, *lines, ""]))


@pytest.mark.parametrize(
    ("host", "rows"),
    [
        ("127.0.0.1", [("127.0.0.1", ME)]),
        ("127.0.0.1", [("127.0.0.1", 0)]),
        ("127.0.0.1", [("0.0.0.0", ME), ("::1", STRANGER)]),
        ("127.0.0.1", [("127.0.0.1", ME), ("127.0.0.2", STRANGER), ("10.0.0.1", STRANGER)]),
        ("127.0.0.1", [("::", ME)]),
        ("::ffff:127.0.0.1", [("127.0.0.1", ME)]),
        ("::1", [("::1", ME), ("127.0.0.1", STRANGER)]),
        ("localhost", [("127.0.0.1", ME), ("::1", 0), ("10.0.0.1", STRANGER)]),
    ],
)
def test_ones_own_and_roots_listeners_may_get_it(
    tables: tuple[Path, Path], host: str, rows: list[Row]
) -> None:
    write(tables, *rows)
    check_listeners(host, PORT, connected=True)


@pytest.mark.parametrize(
    ("host", "rows"),
    [
        ("127.0.0.1", [("127.0.0.1", STRANGER)]),
        ("127.0.0.1", [("0.0.0.0", STRANGER)]),
        ("127.0.0.1", [("::", STRANGER)]),
        ("127.0.0.1", [("::ffff:127.0.0.1", STRANGER)]),
        ("127.0.0.1", [("::ffff:0.0.0.0", STRANGER)]),
        ("::1", [("::", STRANGER)]),
        ("::1", [("::1", STRANGER)]),
        # Several share the port: the kernel chooses which of them gets a connection.
        ("127.0.0.1", [("127.0.0.1", ME), ("127.0.0.1", STRANGER)]),
        ("127.0.0.1", [("127.0.0.1", ME), ("0.0.0.0", STRANGER)]),
        ("localhost", [("127.0.0.1", ME), ("::1", STRANGER)]),
        ("LOCALHOST", [("127.0.0.2", STRANGER)]),
    ],
)
@pytest.mark.parametrize("connected", [False, True])
def test_nobody_else_does(
    tables: tuple[Path, Path], host: str, rows: list[Row], connected: bool
) -> None:
    write(tables, *rows)
    with pytest.raises(StartError, match=f"user {STRANGER} listens at .*--url.*as {STRANGER}"):
        check_listeners(host, PORT, connected=connected)


def test_who_is_connected_or_listens_elsewhere_does_not_listen_here(
    tables: tuple[Path, Path],
) -> None:
    for state, port in (("01", PORT), ("0A", PORT + 1)):
        write(tables, ("127.0.0.1", STRANGER), state=state, port=port)
        check_listeners("127.0.0.1", PORT)
        with pytest.raises(StartError, match=r"names nobody who listens.*container"):
            check_listeners("127.0.0.1", PORT, connected=True)


@pytest.mark.parametrize(
    ("family", "host", "asked"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET, "0.0.0.0", "127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::", "127.0.0.1"),
        (socket.AF_INET, "127.0.0.1", "localhost"),
    ],
)
def test_real_sockets_are_found(family: socket.AddressFamily, host: str, asked: str) -> None:
    with socket.socket(family) as sock:
        try:
            sock.bind((host, 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        sock.listen()
        check_listeners(asked, sock.getsockname()[1], connected=True)
