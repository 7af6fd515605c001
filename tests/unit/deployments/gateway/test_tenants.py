"""What two API keys ask has no KV block in common, at any endpoint and in batches."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from loomserve.deployments.gateway.client_endpoint import ClientEndpoint
from loomserve.deployments.gateway.line_endpoint import LineEndpoint
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.access.token_meter import KeyMetrics, TokenMeter
from loomserve.platform.config import ApiKey, Server
from loomserve.platform.fleet.messages import LineRequest
from loomserve.platform.http.asgi import CollectedAnswer, never_gone
from loomserve.platform.requests.endpoints import ENDPOINTS
from loomserve.platform.requests.engine_request import FORWARDED
from loomserve.platform.requests.metrics import GatewayMetrics
from tests.unit.deployments.gateway.engines import FakeEngines, one_model
from tests.unit.platform.requests.forms import a_form

ALICE, BOB = (
    ApiKey(name=name, hash=f"sha256:{number:064}", tokens_per_minute=1000)
    for number, name in enumerate(("alice", "bob"))
)
BODY = {"model": "m", "user": "the same", "stream": True}


class Gateway:
    """Both endpoints, before engines that keep what they are asked."""

    def __init__(self, *, isolates_tenants: bool) -> None:
        self.engines = FakeEngines()
        registry = CollectorRegistry()
        meter = TokenMeter(KeyMetrics(registry), Path("/nowhere"))
        routes = one_model()
        lengths: Any = SimpleNamespace(predict=self._predict)
        server = Server(api_keys=(ALICE, BOB))
        self.clients = ClientEndpoint(
            Server(),
            *(routes, self.engines, lengths, GatewayMetrics(registry), meter),
            isolates_tenants=isolates_tenants,
        )
        self.lines = LineEndpoint(
            *(server, LiveKeys(server), meter, routes, self.engines),
            isolates_tenants=isolates_tenants,
        )

    async def _predict(self, *_: object) -> None:
        return None

    def salts(self, path: str) -> list[str | None]:
        """The salts of Alice's request, of Bob's and of a line of each."""
        is_form = ENDPOINTS[path].is_form

        async def scenario() -> None:
            for key in (ALICE, BOB):
                body, kind = a_form(BODY) if is_form else (json.dumps(BODY).encode(), b"")
                state = {"body": body, "request_id": "1", "api_key": key}
                scope = {"path": path, "state": state, "headers": [(b"content-type", kind)]}
                await self.clients(scope, never_gone, CollectedAnswer().send)
            for key in (ALICE, BOB) if ENDPOINTS[path].in_batches else ():
                line = {"owner": key.name, "path": path, "body": {**BODY, "stream": False}}
                more = {"request_id": "1", "engine": None, "timeout_s": 9}
                await self.lines.complete(LineRequest.model_validate({**line, **more}))

        asyncio.run(scenario())
        sent = [request.content for request in self.engines.asked]
        return [
            each.salt or (None if is_form else json.loads(each.encoded).get("cache_salt"))
            for each in sent
        ]


@pytest.mark.parametrize("path", FORWARDED)
def test_keys_have_salts_of_their_own_at_every_endpoint_and_in_batches(path: str) -> None:
    salts = Gateway(isolates_tenants=True).salts(path)
    alices, bobs, *of_lines = salts
    if not ENDPOINTS[path].computes:
        assert alices is bobs is None, "it needs no KV blocks"
        return
    assert alices is not None
    assert bobs not in (None, alices)
    assert of_lines == ([alices, bobs] if ENDPOINTS[path].in_batches else [])


@pytest.mark.parametrize("path", FORWARDED)
def test_keys_that_share_have_no_salt(path: str) -> None:
    assert Gateway(isolates_tenants=False).salts(path) in ([None] * 2, [None] * 4)
