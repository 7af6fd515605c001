"""Authentication of HTTP requests by path: API keys, tokens, or nothing; and from which web sites.

A browser in this network reaches the server for any page it shows. Such a page can make its own
site's name lead here (DNS rebinding), which ``Host`` shows, or send requests across sites, which
``Origin`` shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from loomserve.platform.access.keys import KeyRing
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.base.errors import Forbidden, Unauthorized
from loomserve.platform.base.loopback import is_loopback
from loomserve.platform.config import ApiKey, Server
from loomserve.platform.http.ingress.paths import nothing_at
from loomserve.platform.requests.endpoints import is_for_clients

_PROBES = frozenset({"/health", "/ready", "/-/healthz"})
_METRICS = "/metrics"
_CONSOLE = "/console"
_ADMIN = ("/admin", "/docs", "/redoc", "/openapi.json", _METRICS)
# They describe the admin API, and show nothing of what runs.
_ADMIN_DOCS = frozenset({"/admin/v1/docs", "/admin/v1/openapi.json"})
_AUTHORITY = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
_SCHEMES = ("http://", "https://")


def under(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")


class Authentication:
    """Checks API keys where clients ask, and a token everywhere else but on probes and the console.

    A path that is not listed needs the admin token, and is answered 404 without it, so that no new
    route is open by accident. What is open without a key is closed to other sites' web pages.
    """

    def __init__(self, server: Server, keys: LiveKeys) -> None:
        self._sites = Sites(server)
        self._loopback = server.is_loopback
        self._keys = keys
        admin, metrics = server.admin_token_hash, server.metrics_token_hash
        self._has_console = server.console
        self._admin = _token_ring("admin token", admin)
        self._metrics = _token_ring("admin or metrics token", admin, metrics)
        self._open = _ADMIN_DOCS if server.is_loopback else frozenset()
        if server.is_loopback and not server.asks_for_keys and metrics is None:
            self._open |= {_METRICS}

    def check(
        self, path: str, headers: Mapping[bytes, bytes], *, for_clients: bool = False
    ) -> ApiKey | None:
        """The request's API key; None where none is needed.

        ``for_clients``: it came by a port where there is nothing for operators. Raises Unauthorized
        for a key or token that is missing or wrong; Forbidden if the request is for another server,
        or from another site's page without a key; NothingThere if the path is not for it.
        """
        # Probes of a server in a network ask it by its address.
        if self._loopback or path not in _PROBES:
            self._sites.check_host(headers.get(b"host"))
        presented = _bearer(headers)
        if path in _PROBES:
            return self._known_key(presented)
        if is_for_clients(path):
            key = self._keys.ring.identify(presented or _api_key(headers))
            if key is None:
                self._sites.check_origin(headers.get(b"origin"))
            return key
        if for_clients:
            # Whoever has a token learns no more than who has none.
            raise nothing_at(path)
        if self._has_console and under(path, _CONSOLE):
            return None  # files that are the same for everyone
        if path in self._open:
            self._sites.check_origin(headers.get(b"origin"))
        else:
            self._check_token(path, presented)
        return None

    def is_operator(self, headers: Mapping[bytes, bytes]) -> bool:
        try:
            return self._admin is not None and bool(self._admin.identify(_bearer(headers)))
        except Unauthorized:
            return False

    def _known_key(self, presented: str | None) -> ApiKey | None:
        try:
            return self._keys.ring.identify(presented)
        except Unauthorized:
            return None

    def _check_token(self, path: str, presented: str | None) -> None:
        ring = self._metrics if path == _METRICS else self._admin
        try:
            if ring is None:
                raise Unauthorized(f"{path} asks for a token. Set server.admin_token_hash.")
            ring.identify(presented)
        except Unauthorized:
            if any(under(path, root) for root in _ADMIN):
                raise
            raise nothing_at(path, admin=True) from None


def _token_ring(what: str, *hashes: str | None) -> KeyRing | None:
    tokens = tuple(
        ApiKey(name=f"token-{index}", hash=each) for index, each in enumerate(hashes) if each
    )
    # An empty ring would let anyone in.
    return KeyRing(tokens, what=what) if tokens else None


def _api_key(headers: Mapping[bytes, bytes]) -> str | None:
    given = headers.get(b"x-api-key")
    return None if given is None else given.strip().decode("latin-1")


def _bearer(headers: Mapping[bytes, bytes]) -> str | None:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip().decode("latin-1") if scheme.lower() == b"bearer" else None


class Sites:
    """The names of a server, and the origins that it serves without a key."""

    def __init__(self, server: Server) -> None:
        self._loopback = server.is_loopback
        self._names = frozenset(name.lower() for name in server.allowed_hosts)
        self._origins = frozenset(server.cors_origins)

    def check_host(self, host: bytes | None) -> None:
        """Raises Forbidden if a request names another server; browsers always send a name."""
        if host is None or not (self._loopback or self._names):
            return
        name = _name(host.decode("latin-1"))
        if name is None or not (is_loopback(name) or name in self._names):
            raise Forbidden(
                "This server is not known by the name in the Host header. Ask it as localhost, or "
                "name it in server.allowed_hosts."
            )

    def check_origin(self, origin: bytes | None) -> None:
        """Raises Forbidden for the page of a site that is neither on this machine nor
        configured."""
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
