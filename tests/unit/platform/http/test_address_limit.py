"""Connections by client."""

from __future__ import annotations

from pathlib import Path

import pytest

from loomserve.platform.access.shared_counts import SharedCounts
from loomserve.platform.http.protocol import AddressLimit


def test_connections_count_until_they_end() -> None:
    limit = AddressLimit(2, spare_loopback=False)
    for _ in range(3):
        limit.enter("192.0.2.1")
    assert (limit.open("192.0.2.1"), limit.open("192.0.2.2")) == (3, 0)
    for _ in range(3):
        limit.leave("192.0.2.1")
    assert limit.open("192.0.2.1") == 0
    assert not limit._open, "what is forgotten costs no memory"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:ffff:ffff:ffff", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::1", "::2", False),
        ("127.0.0.1", "127.0.0.2", False),
    ],
)
def test_a_client_is_an_ipv4_address_or_an_ipv6_network(one: str, other: str, same: bool) -> None:
    limit = AddressLimit(2, spare_loopback=False)
    limit.enter(one)
    assert limit.open(other) == int(same)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"])
def test_this_machine_may_be_spared(address: str) -> None:
    limit = AddressLimit(1, spare_loopback=True)
    limit.enter(address)
    limit.enter("192.0.2.1")
    assert (limit.open(address), limit.open("192.0.2.1")) == (0, 1)


def test_connections_to_other_gateways_count(tmp_path: Path) -> None:
    one, other = (SharedCounts(tmp_path, 2) for _ in range(2))
    limit = AddressLimit(2, spare_loopback=True, counts=one)
    beside = AddressLimit(2, spare_loopback=True, counts=other)
    beside.enter("192.0.2.1")
    beside.enter("127.0.0.1")
    limit.enter("192.0.2.1")
    assert limit.open("192.0.2.1") == 2
    assert limit.open("192.0.2.2") == 0
    assert limit.open("127.0.0.1") == 0
    assert limit.elsewhere == 2
    beside.leave("192.0.2.1")
    assert limit.open("192.0.2.1") == 1
