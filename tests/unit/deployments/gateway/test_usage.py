"""Both ways into the platform count what engines computed, however an answer ends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from loomserve.deployments.gateway.client_endpoint import ClientEndpoint
from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.deployments.gateway.line_endpoint import LineEndpoint
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.access.token_meter import KeyMetrics, TokenMeter
from loomserve.platform.base.errors import EngineGone, RequestError
from loomserve.platform.config import ApiKey, Server
from loomserve.platform.fleet.messages import LineRequest
from loomserve.platform.http.asgi import CollectedAnswer, never_gone
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.usage.files import UsageFiles, UsageRecord
from loomserve.platform.usage.meter import UsageMeter, UsageMetrics
from tests.unit.deployments.gateway.engines import Answer, FakeEngines, answered, one_model

ALICE = ApiKey(name="alice", hash=f"sha256:{0:064}")
PATH = "/v1/completions"
ALL = ("2000-01-01T00:00Z", "2100-01-01T00:00Z")


class Gateway:
    """Both endpoints, before engines that compute ten tokens of a prompt and five of an answer."""

    def __init__(self, folder: Path, answer: Answer | None) -> None:
        self._answer = answer
        self.usage = UsageMeter(UsageMetrics(CollectorRegistry()), UsageFiles(folder))
        registry = CollectorRegistry()
        meter = TokenMeter(KeyMetrics(registry), folder / "tokens.json")
        routes = one_model()
        engines = FakeEngines(self._compute)
        server = Server(api_keys=(ALICE,))
        lengths: Any = SimpleNamespace(predict=_nothing)
        self.clients = ClientEndpoint(
            Server(),
            *(routes, engines, lengths, GatewayMetrics(registry), meter),
            isolates_tenants=False,
            usage=self.usage,
        )
        self.lines = LineEndpoint(
            *(server, LiveKeys(server), meter, routes, engines),
            isolates_tenants=False,
            usage=self.usage,
        )

    async def _compute(self, request: ModelRequest) -> Answer:
        request.usage.add_prompt("p", 10, 4)
        request.usage.completion_tokens += 5
        if self._answer is None:
            await asyncio.Event().wait()
        return self._answer or []

    async def ask(self, key: ApiKey | None) -> None:
        body = {"model": "alias", "prompt": "x"}
        state = {"body": json.dumps(body).encode(), "request_id": "1", "api_key": key}
        send = CollectedAnswer().send
        await self.clients({"path": PATH, "state": state}, never_gone, send)

    async def send_line(self) -> None:
        line = {"owner": ALICE.name, "path": PATH, "body": {"model": "m", "prompt": "x"}}
        more = {"request_id": "1", "engine": None, "timeout_s": 0.05}
        await self.lines.complete(LineRequest.model_validate({**line, **more}))

    def kept(self) -> UsageRecord:
        (record,) = self.usage.read(*ALL)
        return record


async def _nothing(*_: object) -> None:
    return None


@pytest.mark.parametrize("key", [ALICE, None])
def test_a_clients_request_counts_under_its_key_and_its_model(
    tmp_path: Path, key: ApiKey | None
) -> None:
    gateway = Gateway(tmp_path, answered(b"{}"))
    asyncio.run(gateway.ask(key))
    kept = gateway.kept()
    assert (kept.key, kept.model) == (key.name if key else "", "m")
    assert (kept.requests, kept.prompt_tokens, kept.cached_tokens) == (1, 10, 4)
    assert kept.completion_tokens == 5


def test_a_line_of_a_batch_counts_for_its_owner(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, answered(b"{}"))
    asyncio.run(gateway.send_line())
    assert (gateway.kept().key, gateway.kept().prompt_tokens) == ("alice", 10)


def test_what_was_computed_of_a_line_that_took_too_long_counts(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, None)
    asyncio.run(gateway.send_line())
    assert gateway.kept().completion_tokens == 5


def test_what_was_computed_of_an_answer_that_broke_off_counts(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, EngineGone("gone"))
    with pytest.raises(RequestError):
        asyncio.run(gateway.ask(ALICE))
    assert gateway.kept().completion_tokens == 5


def test_what_was_computed_for_a_client_that_left_counts(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, None)

    async def left() -> None:
        async with asyncio.timeout(0.05):
            await gateway.ask(ALICE)

    with pytest.raises(TimeoutError):
        asyncio.run(left())
    assert gateway.kept().completion_tokens == 5
