"""How many connections each client of a server has."""

from __future__ import annotations

import ipaddress
from collections import Counter

from loomserve.platform.access.shared_counts import Counts, OnlyOne
from loomserve.platform.base.loopback import is_loopback

_IPV6_NETWORK = 64


class AddressLimit:
    """Counts connections by client: an IPv4 address, or an IPv6 network, of which one client has
    all addresses."""

    def __init__(self, most: int, *, spare_loopback: bool, counts: Counts | None = None) -> None:
        """
        Args:
            most: connections that one client may have.
            spare_loopback: clients on this machine may have any number.
            counts: those to other front ends; None: there is no other.
        """
        self.most = most
        self._spare_loopback = spare_loopback
        self._open: Counter[str] = Counter()
        self._counts = counts or OnlyOne()

    def enter(self, address: str) -> None:
        client = _client(address)
        self._open[client] += 1
        self._counts.add_connections(client, 1)

    def leave(self, address: str) -> None:
        client = _client(address)
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]
        self._counts.add_connections(client, -1)

    def open(self, address: str) -> int:
        """Connections of an address's client that count."""
        client = _client(address)
        if self._spare_loopback and is_loopback(client):
            return 0
        return self._open[client] + self._counts.connections_elsewhere(client)

    @property
    def elsewhere(self) -> int:
        """Connections of all clients to other front ends."""
        return self._counts.all_connections_elsewhere


def _client(address: str) -> str:
    if ":" not in address:
        return address
    ip = ipaddress.IPv6Address(address.partition("%")[0])
    if ip.ipv4_mapped or ip.is_loopback:
        return str(ip.ipv4_mapped or ip)
    return str(ipaddress.IPv6Network((ip, _IPV6_NETWORK), strict=False))
