"""How many connections each client of a server has."""

from __future__ import annotations

import ipaddress
from collections import Counter

from loomserve.platform.base.loopback import is_loopback

_IPV6_NETWORK = 64


class AddressLimit:
    """Counts connections by client: an IPv4 address, or an IPv6 network, of which one client has
    all addresses."""

    def __init__(self, most: int, *, spare_loopback: bool) -> None:
        """
        Args:
            most: connections that one client may have.
            spare_loopback: clients on this machine may have any number.
        """
        self.most = most
        self._spare_loopback = spare_loopback
        self._open: Counter[str] = Counter()

    def enter(self, address: str) -> None:
        self._open[_client(address)] += 1

    def leave(self, address: str) -> None:
        client = _client(address)
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]

    def open(self, address: str) -> int:
        """Connections of an address's client that count."""
        client = _client(address)
        return 0 if self._spare_loopback and is_loopback(client) else self._open[client]


def _client(address: str) -> str:
    if ":" not in address:
        return address
    ip = ipaddress.IPv6Address(address.partition("%")[0])
    if ip.ipv4_mapped or ip.is_loopback:
        return str(ip.ipv4_mapped or ip)
    return str(ipaddress.IPv6Network((ip, _IPV6_NETWORK), strict=False))
