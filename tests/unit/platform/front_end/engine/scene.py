"""A client of several peers, for tests: what it chose, and what it told."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason

from loomserve.platform.disaggregation.metrics import HandoffMetrics
from loomserve.platform.front_end.engine.handoffs import Handoffs
from loomserve.platform.front_end.engine.replica_client import ReplicaSetClient
from loomserve.platform.front_end.metrics import ContinuationMetrics
from loomserve.platform.front_end.policy.continuation import ContinuationBounds
from loomserve.platform.front_end.routing import RoutingRequest
from loomserve.platform.state.load_report import LoadReport
from loomserve.platform.state.roles import Role
from tests.unit.platform.front_end.engine.peer import PeerEngine
from tests.waiting import PATIENCE_S

BOUNDS = ContinuationBounds(silence_s=2.0, hang_s=2.5, reroute_timeout_s=1.0, begun_timeout_s=1.5)


def request(request_id: str, tokens: int = 20, **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id, [1, 2, 3], None, SamplingParams(max_tokens=tokens, **params), None, 0.0,
        None, None, None,
    )  # fmt: skip


async def until(condition: Callable[[], bool], timeout_s: float = 8.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - of whatever the test looks at
            await asyncio.sleep(0.01)


class Scene:
    """A client, its replicas' engines, and all that it told."""

    def __init__(self, folder: Path, bounds: ContinuationBounds) -> None:
        self.registry = CollectorRegistry()
        self.folder = folder
        self.asked: list[RoutingRequest] = []
        self.left: list[tuple[RoutingRequest, str]] = []
        self.loads: list[tuple[str, LoadReport, float]] = []
        self.failed: dict[str, Exception] = {}
        self.got: dict[str, list[int]] = {}
        self.told: dict[str, dict[str, Any]] = {}
        """What connectors tell the client."""
        self.finished: dict[str, FinishReason] = {}
        self.engines: dict[str, PeerEngine] = {}
        self.roles: dict[str, Role] = {}
        self.handoffs: dict[str, HandoffMetrics] = {}
        metrics = ContinuationMetrics(self.registry).of("chat")
        handoffs = Handoffs(lambda name: self.roles.get(name, Role.UNIFIED), 2)
        self.client = ReplicaSetClient(
            "chat",
            self.choose,
            metrics,
            left=lambda *each: self.left.append(each),
            loaded=lambda *each: self.loads.append(each),
            bounds=bounds,
            handoffs=handoffs,
        )
        self.client.requests.on_failed = self.failed.__setitem__
        self.first = "a"
        """Preferred where it can be had."""
        self.refuses: Exception | None = None
        self.refuses_prompts: Exception | None = None
        self.prefills = 0
        """Prefills that the front end has been told of."""

    def choose(self, routing: RoutingRequest) -> str | None:
        self.asked.append(routing)
        if self.refuses is not None:
            raise self.refuses
        if routing.prompt_only and self.refuses_prompts is not None:
            raise self.refuses_prompts
        among = routing.candidates - routing.excluded
        return self.first if self.first in among else min(among)

    def count(self, name: str, **labels: str) -> float:
        labels["model"] = "chat"
        return self.registry.get_sample_value(f"loomserve_{name}", labels) or 0.0

    async def have(self, *names: str) -> None:
        for name in names:
            self.engines.setdefault(name, PeerEngine(self.folder).start())
        self.client.set_replicas({name: self.engines[name].address for name in names})
        await until(lambda: set(self.client.replicas) >= set(names))

    async def ask(self, *asked: EngineCoreRequest, on: str | None = "a") -> None:
        for each in asked:
            await self.client.add_request_async(each)
        if on is not None:
            await until(lambda: {each.request_id for each in asked} <= set(self.engines[on].work))

    async def read(self) -> None:
        while True:
            outputs = await self.client.get_output_async()
            for output in outputs.outputs:
                self.got.setdefault(output.request_id, []).extend(output.new_token_ids)
                self.prefills += output.prefill_stats is not None
                if output.kv_transfer_params is not None:
                    self.told[output.request_id] = output.kv_transfer_params
                if output.finish_reason is not None:
                    assert output.request_id not in self.finished, "it has finished twice"
                    self.finished[output.request_id] = output.finish_reason


@asynccontextmanager
async def scene(bounds: ContinuationBounds = BOUNDS) -> AsyncIterator[Scene]:
    # pytest's own folders are too deep for sockets.
    with tempfile.TemporaryDirectory() as folder:
        made = Scene(Path(folder), bounds)
        reading = asyncio.create_task(made.read())
        try:
            yield made
            assert not reading.done(), reading
        finally:
            reading.cancel()
            made.client.shutdown()
            await made.client.closed()
            for engine in made.engines.values():
                if engine._tasks:
                    engine.end()


Play = Callable[[Scene], Awaitable[None]]


def played(play: Play, bounds: ContinuationBounds = BOUNDS) -> None:
    async def run() -> None:
        async with scene(bounds) as made, asyncio.timeout(PATIENCE_S):
            await play(made)

    asyncio.run(run())
