"""Loopback: the addresses under which a machine reaches itself alone, and who listens there.

Any user may bind a port that is free, so an address alone does not say whom a secret would reach.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from loomserve.platform.base.errors import StartError

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENING = "0A"
_ROOT = 0


def is_loopback(host: str) -> bool:
    """Whether a host name or an IP address (without brackets) is of this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # Sockets of both families show IPv4's addresses as IPv6's.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def check_listeners(host: str, port: int, *, connected: bool = False) -> None:
    """See that only this process's user, or root, can read what is sent to a port of loopback.
    ``connected``: somebody took a connection, so it is not enough that nobody is seen to listen.
    ``StartError``: another user listens there, or nobody is found who does."""
    users = _listeners(host, port)
    strangers = users - {os.geteuid(), _ROOT}
    if strangers:
        name = _name(min(strangers))
        raise StartError(
            f"user {name} listens at {host}:{port}, so the admin token was not sent there: any "
            "user of the machine may take a port. If the platform is yours, start it, or pass the "
            f"port that it has with --url; if it is {name}'s, run this command as {name}"
        )
    if connected and not users:
        raise StartError(
            f"the kernel names nobody who listens at {host}:{port}, so the admin token was not "
            "sent there: a container may, whose ports the kernel forwards. Pass the container's "
            "own address with --url, and the token with --token, or run this command in it"
        )


def _listeners(host: str, port: int) -> set[int]:
    try:
        tables = [table.read_text() for table in _TABLES if table.exists()]
    except OSError as error:
        raise StartError(f"cannot see who listens at {host}:{port}: {error}") from None
    return {
        user for table in tables for address, user in _rows(table, port) if _takes(address, host)
    }


def _rows(table: str, port: int) -> Iterator[tuple[str, int]]:
    for line in table.splitlines()[1:]:
        _, local, _, state, _, _, _, user, *_ = line.split()
        address, _, at = local.partition(":")
        if state == _LISTENING and int(at, 16) == port:
            yield _address(address), int(user)


def _address(words: str) -> str:
    """An address of the kernel's table: words of 32 bits, as the machine's memory has them."""
    packed = b"".join(
        struct.pack("=I", int(words[place : place + 8], 16)) for place in range(0, len(words), 8)
    )
    return str(ipaddress.ip_address(packed))


def _takes(address: str, host: str) -> bool:
    """Whether who listens at an address may get what is sent to a host of loopback."""
    listens = _unmapped(address)
    if listens.is_unspecified:
        return True
    if host.lower() == "localhost":
        return is_loopback(address)
    return listens == _unmapped(host)


def _unmapped(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def _name(user: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(user).pw_name
    return str(user)
