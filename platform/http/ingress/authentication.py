"""Authentication of HTTP requests by path: API keys, the admin token, or nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping

from loomserve.platform.access.keys import KeyRing
from loomserve.platform.base.errors import Forbidden, NotFound, Unauthorized
from loomserve.platform.config import ApiKey, Server

_OPEN = frozenset({"/health", "/ready"})
_ADMIN = ("/admin", "/docs", "/redoc", "/openapi.json", "/metrics")
_LOOPBACK_ORIGIN = re.compile(rb"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?")


def under(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")


class Authentication:
    """Checks API keys under ``/v1``, and the admin token everywhere else but on health checks.

    A path that is not listed here needs the admin token too, so that a new route is never open by
    accident; without the token it is answered 404.
    """

    def __init__(self, server: Server) -> None:
        token = server.admin_token_hash
        self._keys = KeyRing(server.api_keys)
        # The configuration allows no token only on loopback or with allow_unauthenticated.
        self._admin = KeyRing(
            (ApiKey(name="admin", hash=token),) if token else (), what="admin token"
        )
        self._loopback = server.is_loopback
        self._refuse_web_pages = server.is_loopback and token is None
        self._origins = frozenset(origin.encode() for origin in server.cors_origins)

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> ApiKey | None:
        """The request's API key; None where none is needed.

        Raises:
            Unauthorized: the key or token is missing or wrong.
            Forbidden: a web page of another site asks for a path that is open on loopback.
            NotFound: the path is not listed, and the token is missing or wrong.
        """
        if path in _OPEN:
            return None
        if under(path, "/v1"):
            return self._keys.identify(_bearer(headers))
        if not (path == "/metrics" and self._loopback):
            self._check_admin(path, headers)
        return None

    def _check_admin(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        if self._refuse_web_pages:
            self._check_origin(headers.get(b"origin"))
        try:
            self._admin.identify(_bearer(headers))
        except Unauthorized:
            if any(under(path, root) for root in _ADMIN):
                raise
            raise NotFound(
                f"There is nothing at {path}. The OpenAI API is under /v1, the admin API under "
                "/admin/v1."
            ) from None

    def _check_origin(self, origin: bytes | None) -> None:
        # A browser on this machine reaches loopback for any page it shows, and a page's POST needs
        # no permission from us, so without a token the page's origin is all that tells it apart.
        if origin is None or origin in self._origins:
            return
        if not _LOOPBACK_ORIGIN.fullmatch(origin):
            raise Forbidden(
                "Web pages of other sites may not use the admin API. Set server.admin_token_hash, "
                "or name the page's origin in server.cors_origins."
            )


def _bearer(headers: Mapping[bytes, bytes]) -> str | None:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip().decode("latin-1") if scheme.lower() == b"bearer" else None
