"""Web sites: under which names this server is asked, and which sites' pages may ask it.

A browser on this machine, or in its network, reaches the server for any page that it shows. Such a
page can make its own site's name lead to the server (DNS rebinding), which ``Host`` then tells, or
send requests across sites, which ``Origin`` tells.
"""

from __future__ import annotations

import re

from loomserve.platform.base.errors import Forbidden
from loomserve.platform.base.loopback import is_loopback
from loomserve.platform.config import Server

_AUTHORITY = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
_SCHEMES = ("http://", "https://")


class Sites:
    """The names of a server, and the origins that it serves without a key."""

    def __init__(self, server: Server) -> None:
        self._loopback = server.is_loopback
        self._names = frozenset(name.lower() for name in server.allowed_hosts)
        self._origins = frozenset(server.cors_origins)

    def check_host(self, host: bytes | None) -> None:
        """Check that a request is for this server by name; None: it says none, as no browser does.

        Raises:
            Forbidden: it is for another server.
        """
        if host is None or not (self._loopback or self._names):
            return
        name = _name(host.decode("latin-1"))
        if name is None or not (is_loopback(name) or name in self._names):
            raise Forbidden(
                "This server is not known by the name in the Host header. Ask it as localhost, or "
                "name it in server.allowed_hosts."
            )

    def check_origin(self, origin: bytes | None) -> None:
        """Check the page that sends a request; None: no page of another site does.

        Raises:
            Forbidden: it is of a site that is neither on this machine nor configured.
        """
        if origin is None or "*" in self._origins:
            return
        given = origin.decode("latin-1")
        if given not in self._origins and not _of_loopback(given):
            raise Forbidden(
                "Web pages of other sites may not use this server without a key. Set "
                "server.api_keys, or name the page's origin in server.cors_origins."
            )


def _of_loopback(origin: str) -> bool:
    scheme = next((each for each in _SCHEMES if origin.startswith(each)), None)
    name = _name(origin.removeprefix(scheme)) if scheme else None
    return name is not None and is_loopback(name)


def _name(authority: str) -> str | None:
    """The host of ``host[:port]`` in lower case, of IPv6 without brackets; None: it is neither."""
    match = _AUTHORITY.fullmatch(authority)
    return (match["v6"] or match["name"]).lower() if match else None
