"""Authentication of HTTP requests by path: API keys, tokens, or nothing."""

from __future__ import annotations

from collections.abc import Mapping

from loomserve.platform.access.keys import KeyRing
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.base.errors import Unauthorized
from loomserve.platform.config import ApiKey, Server
from loomserve.platform.http.ingress.sites import Sites
from loomserve.platform.http.refused_paths import nothing_at
from loomserve.platform.requests.endpoints import is_for_clients

_PROBES = frozenset({"/health", "/ready", "/-/healthz"})
_METRICS = "/metrics"
_CONSOLE = "/console"
_ADMIN = ("/admin", "/docs", "/redoc", "/openapi.json", _METRICS)
# They describe the admin API, and show nothing of what runs.
_ADMIN_DOCS = frozenset({"/admin/v1/docs", "/admin/v1/openapi.json"})


def under(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")


class Authentication:
    """Checks API keys where clients ask, and a token everywhere else but on probes and the console.

    A path that is not listed here needs the admin token too, so that a new route is never open by
    accident; without the token it is answered 404. Without a key or token a path may be open, but
    not to the web pages of other sites.
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

        Args:
            path: what is asked for.
            headers: the request's.
            for_clients: it came by a port where there is nothing for operators.

        Raises:
            Unauthorized: the key or token is missing or wrong.
            Forbidden: the request is for another server, or a web page of another site sends it
                without a key.
            NothingThere: the path is not listed, and the token is missing or wrong; or it is not
                for clients.
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
        """Whether a request has the admin token."""
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
    """As clients of Anthropic's API send it."""
    given = headers.get(b"x-api-key")
    return None if given is None else given.strip().decode("latin-1")


def _bearer(headers: Mapping[bytes, bytes]) -> str | None:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip().decode("latin-1") if scheme.lower() == b"bearer" else None
