"""First answers by vLLM's own serving layer, of an engine that only a test makes step."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
from vllm.v1.serial_utils import UtilityResult

from loomserve.deployments.gateway.model_front_end import ModelFrontEnd
from loomserve.platform.fleet.messages import FrontEndSpec, ModelRoute, ReplicaRoute
from loomserve.platform.front_end.metrics import ContinuationMetrics
from loomserve.platform.front_end.policy.continuation import ContinuationBounds
from loomserve.platform.models import simulated
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.state import ModelStatus
from loomserve.routers.in_flight import InFlight
from tests.unit.platform.fleet.heartbeats import served_model
from tests.unit.platform.front_end.engine.peer import PeerEngine
from tests.waiting import PATIENCE_S

OPTIONS = {"max_model_len": 512, "block_size": 32, "enforce_eager": True, "dtype": "float32"}


class Generating(PeerEngine):
    async def _send(self, outputs: EngineCoreOutputs, to: bytes | None = None) -> None:
        if (asked := outputs.utility_output) is not None:
            told = UtilityOutput(asked.call_id, None, UtilityResult(["generate"]))
            outputs = EngineCoreOutputs(utility_output=told)
        await super()._send(outputs, to)


async def first_answer(options: dict[str, Any], folder: Path) -> tuple[str, list[int]]:
    """What the replica is told, and the lengths of the prompts that came to its engine."""
    engine = Generating(folder).start()
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def tell(address: str, problem: str) -> None:
        told.set_result(problem)

    async def no_load(*_: Any) -> str:
        raise TimeoutError

    registry = CollectorRegistry()
    route = ModelRoute(
        model=served_model(),
        status=ModelStatus.LOADING, max_model_len=None,
        front_end=FrontEndSpec(
            path=str(simulated.fetch()), engine_options={**OPTIONS, **options}
        ),
        replicas=(
            ReplicaRoute(
                id="r1", device="core0", address="none", engine=engine.address, answers=False
            ),
        ),
    )  # fmt: skip
    front_end = ModelFrontEnd(
        *(route, InFlight(), GatewayMetrics(registry), ContinuationMetrics(registry).of("m")),
        get=no_load,
        tell=tell,
        bounds=ContinuationBounds(),
    )
    front_end.apply(route)

    async def step() -> None:
        while True:
            await asyncio.sleep(0.02)
            await engine.step()

    stepping = asyncio.create_task(step())
    try:
        async with asyncio.timeout(PATIENCE_S):
            problem = await told
        return problem, [len(each.prompt_token_ids or ()) for each in engine.added]
    finally:
        stepping.cancel()
        with suppress(asyncio.CancelledError):
            await stepping
        await front_end.close()
        engine.end()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, ""),
        ({"max_model_len": 20}, ""),
        ({"chat_template_content_format": "openai"}, "(/v1/chat/completions) was answered"),
        ({"chat_template": "{{ messages[0].nothing.deeper }}"}, "(/v1/chat/completions)"),
        ({"override_generation_config": {"temperature": "warm"}}, "not supported between"),
        ({"override_generation_config": {"eos_token_id": "</s>", "top_p": "all"}}, "not supported"),
    ],
)
def test_what_would_refuse_each_request_is_found_out(options: dict[str, Any], problem: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        told, prompts = asyncio.run(first_answer(options, Path(folder)))
    assert problem in told
    assert bool(told) == bool(problem)
    # Neither the client's temperature nor its template is at fault where the platform asks.
    assert len(prompts) == (0 if problem else 1)
