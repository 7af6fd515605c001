"""Ray's processes get ports that no connection takes before they listen there."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from loomserve.platform.nodes import ray_command
from loomserve.platform.nodes.ray_command import free_ports

FIRST_OF_CONNECTIONS = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_ports_are_free_and_none_that_a_connection_may_have() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    with contextlib.ExitStack() as stack:
        for port in ports:
            assert port < FIRST_OF_CONNECTIONS
            stack.enter_context(socket.socket()).bind(("", port))


def test_one_that_is_taken_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    (taken,) = free_ports(1)
    with socket.socket() as other:
        other.bind(("", taken))
        monkeypatch.setattr(ray_command.random, "shuffle", lambda ports: ports.sort())
        monkeypatch.setattr(ray_command, "_LEAST_PORT", taken)
        monkeypatch.setattr(ray_command, "_first_of_connections", lambda: taken + 1)
        (found,) = free_ports(1)
    assert found not in (taken, 0)


def test_where_connections_have_all_ports_any_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_command, "_first_of_connections", lambda: 1024)
    assert len(set(free_ports(5))) == 5
