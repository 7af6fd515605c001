"""A model whose load decides on its replicas: what operators ask for, and what is done."""

from __future__ import annotations

import asyncio

import pytest

from loomserve.deployments.controller.controller import Controller
from loomserve.platform.base.errors import BadRequest
from loomserve.platform.config import Config, Model
from loomserve.platform.fleet.messages import Heartbeat
from loomserve.platform.rebalancing import runner
from loomserve.platform.state import FootprintState, ReplicaLoad
from tests.unit.deployments.controller.controllers import (
    FakeServe,
    controlled,
    heard,
    told,
    until,
)
from tests.unit.platform.fleet.heartbeats import report

RULES = {"min": 1, "max": 2, "target_ongoing_requests": 2, "upscale_delay_s": 0}
SCALED = Model(name="scaled", source="demo", devices=("core0", "core1"), replicas=RULES)
PLAIN = Model(name="plain", source="demo", devices=("core0", "core1"), replicas=1)
CONFIG = Config(
    devices=[{"name": "core0", "cores": (0,)}, {"name": "core1", "cores": (1,)}],
    models=[SCALED, PLAIN],
)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_TICK_S", 0.02)


def said(device: str, ready_at: float, running: int = 0) -> Heartbeat:
    load = ReplicaLoad(running=running, waiting=0, kv_cache_usage=0, step_time_s=0, measured_at=0)
    footprint = FootprintState(
        layers=1, layer_bytes=1, kv_heads=1, block_bytes=1, block_tokens=1, memory_bytes=1,
        memory_measured_at=0, start_s=1.0, ready_at=ready_at,
    )  # fmt: skip
    return report(
        f"on-{device}", device, model=SCALED, load=load, footprint=footprint, in_flight=running
    )


def target(controller: Controller) -> int:
    return controller._fleet.registry.record(SCALED.name).target_replicas


def test_load_starts_a_replica_and_an_operators_number_holds_until_auto(serve: FakeServe) -> None:
    async def scenario() -> None:
        async with controlled(first=True, config=CONFIG) as one:
            await heard(one, said("core0", 0, running=3))
            await until(lambda: serve.devices(SCALED.name) == ["core0", "core1"])
            state = await told(one.scale(SCALED.name, 1))
            (shown,) = [each.scaling for each in state.models if each.scaling is not None]
            assert (shown.min, shown.max, shown.fixed) == (1, 2, True)
            await until(lambda: serve.devices(SCALED.name) == ["core0"])
            await asyncio.sleep(0.2)
            assert target(one) == 1
        async with controlled(config=CONFIG) as other:
            await heard(other, said("core0", 0, running=3))
            await asyncio.sleep(0.2)
            assert target(other) == 1, "the next controller knows of the operator's wish"
            await told(other.scale(SCALED.name, None))
            await until(lambda: len(serve.devices(SCALED.name)) == 2)
            reported = await told(other.rebalancing_state())
            assert [each.direction for each in reported.scaling.decisions] == ["up"]

    asyncio.run(scenario())


def test_auto_is_for_models_with_bounds(serve: FakeServe) -> None:
    async def scenario() -> None:
        async with controlled(first=True, config=CONFIG) as one:
            with pytest.raises(BadRequest, match=r"no replicas\.min"):
                await told(one.scale(PLAIN.name, None))
            state = await told(one.scale(PLAIN.name, 2))
            assert [each.scaling is None for each in state.models] == [False, True]

    asyncio.run(scenario())


def test_the_one_that_was_drained_is_the_one_that_ends(serve: FakeServe) -> None:
    async def scenario() -> None:
        async with controlled(first=True, config=CONFIG) as one:
            await told(one.scale(SCALED.name, 2))
            await until(lambda: len(serve.devices(SCALED.name)) == 2)
            # By their age the other one would go.
            await heard(one, said("core0", 5.0), said("core1", 9.0))
            one._fleet.registry.drains.leaving.add("on-core0")
            (desired,) = await one.report(said("core0", 5.0))
            assert desired.draining
            one._fleet.registry.drains.has_left("on-core0")
            one._models.set_replicas(SCALED.name, 1)
            await until(lambda: serve.devices(SCALED.name) == ["core1"])

    asyncio.run(scenario())
