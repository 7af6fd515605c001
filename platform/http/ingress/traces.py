"""Each client's request as a span, from its head to the end of its answer."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import Scope

from loomserve.platform.requests.endpoints import is_for_clients
from loomserve.platform.tracing import RequestTrace, RequestTracer

_API = "/v1"


class IngressTraces:
    """Begins the traces of requests to the API for clients; others have none."""

    def __init__(self, tracer: RequestTracer, endpoints: Collection[str]) -> None:
        """``endpoints``: paths that name spans, for themselves and for what is below them."""
        self._tracer = tracer
        self._endpoints = sorted(endpoints, key=len, reverse=True)

    def begin(self, scope: Scope) -> RequestTrace | None:
        """The trace of a request whose scope has its id; None: it has none."""
        path: str = scope["path"]
        if path == _API or not is_for_clients(path):
            return None
        method: str = scope["method"]
        endpoint = self._endpoint(path)
        return self._tracer.begin(
            f"{method} {endpoint}",
            {
                "http.request.method": method,
                "http.route": endpoint,
                "loomserve.request_id": scope["state"]["request_id"],
            },
            headers=scope["headers"],
        )

    def _endpoint(self, path: str) -> str:
        # Spans are grouped by their names, of which clients must not make new ones.
        for endpoint in self._endpoints:
            if path == endpoint or path.startswith(endpoint + "/"):
                return endpoint
        return _API
