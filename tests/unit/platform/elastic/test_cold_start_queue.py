"""Requests that wait for a model: one call for all, in order, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry

from loomserve.platform.base.errors import RequestError, Unavailable, UnknownModel
from loomserve.platform.config import Elastic
from loomserve.platform.elastic import cold_start_queue as module
from loomserve.platform.elastic.cold_start_queue import ColdStartQueue, WaitingMetrics
from loomserve.platform.fleet.messages import ModelRoute
from loomserve.platform.state import ModelStatus
from tests.unit.platform.fleet.heartbeats import served_model
from tests.waiting import PATIENCE_S


def route(status: ModelStatus, *, on_demand: bool = True) -> ModelRoute:
    return ModelRoute(
        model=served_model(),
        status=status, on_demand=on_demand, max_model_len=None, replicas=(),
    )  # fmt: skip


class Controller:
    """Notes what it is asked for, and answers as told."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.refusal: Exception | None = None

    async def __call__(self, model: str) -> None:
        self.asked.append(model)
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal


Scenario = Callable[[ColdStartQueue, Controller], Awaitable[None]]


def run(scenario: Scenario, **bounds: float) -> CollectorRegistry:
    registry = CollectorRegistry()

    async def main() -> None:
        asked = Controller()
        room = ColdStartQueue(asked, Elastic.model_validate(bounds), WaitingMetrics(registry))
        room.apply([route(ModelStatus.UNLOADED)])
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scenario(room, asked)
        finally:
            await room.close()

    asyncio.run(main())
    return registry


async def some(room: ColdStartQueue, count: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(room.until_ready("m")) for _ in range(count)]
    await asyncio.sleep(0.01)
    return tasks


def test_however_many_wait_the_controller_is_asked_once_and_they_go_on_in_order() -> None:
    order: list[int] = []

    async def scenario(room: ColdStartQueue, asked: Controller) -> None:
        async def wait(number: int) -> None:
            await room.until_ready("m")
            order.append(number)

        tasks = [asyncio.create_task(wait(number)) for number in range(50)]
        while room.waiting("m") < 50 or not asked.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (room.waiting("m"), asked.asked) == (50, ["m"])
        room.apply([route(ModelStatus.WAKING)])
        await asyncio.sleep(0.01)
        assert not order
        room.apply([route(ModelStatus.READY)])
        await asyncio.gather(*tasks)
        assert asked.asked == ["m"]

    registry = run(scenario)
    assert order == list(range(50))
    labels = {"model": "m", "outcome": "ready"}
    assert registry.get_sample_value("loomserve_model_wait_seconds_count", labels) == 50
    state = {"model": "m", "state": "ready"}
    assert registry.get_sample_value("loomserve_model_state", state) == 1


@pytest.mark.parametrize(
    "present",
    [
        route(ModelStatus.READY),
        route(ModelStatus.DEGRADED),
        route(ModelStatus.LOADING, on_demand=False),
    ],
)
def test_nobody_waits_for_a_model_that_serves_or_does_not_come_and_go(present: ModelRoute) -> None:
    async def scenario(room: ColdStartQueue, asked: Controller) -> None:
        room.apply([present])
        assert not room.waits_for("m")
        await room.until_ready("m")
        await room.until_ready("unknown")
        assert not asked.asked

    run(scenario)


def test_all_are_refused_with_the_controllers_reason() -> None:
    async def scenario(room: ColdStartQueue, asked: Controller) -> None:
        asked.refusal = Unavailable("no room", reason="no_room", retry_after_s=7)
        for each in await some(room, 3):
            with pytest.raises(Unavailable, match="no room") as refused:
                await each
            assert refused.value.retry_after_s == 7
        assert room.waiting("m") == 0
        # The next one asks anew.
        asked.refusal = None
        (last,) = await some(room, 1)
        room.apply([route(ModelStatus.READY)])
        await last
        assert len(asked.asked) == 2

    run(scenario)


def test_a_controller_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ASK_AGAIN_S", 0.01)

    async def scenario(room: ColdStartQueue, asked: Controller) -> None:
        asked.refusal = ConnectionError("away")
        (one,) = await some(room, 1)
        while len(asked.asked) <= 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not one.done()
        room.apply([route(ModelStatus.READY)])
        await one

    run(scenario)


@pytest.mark.parametrize("routes", [[], [route(ModelStatus.UNLOADING)]])
def test_who_waits_for_a_model_that_is_unloaded_is_told_so_at_once(
    routes: list[ModelRoute],
) -> None:
    async def scenario(room: ColdStartQueue, asked: Controller) -> None:
        waiting = await some(room, 2)
        room.apply(routes)
        for each in waiting:
            with pytest.raises(UnknownModel, match="was unloaded while"):
                await each

    run(scenario)


def test_a_model_that_fails_is_asked_about_at_once() -> None:
    async def scenario(room: ColdStartQueue, asked: Controller) -> None:
        (one,) = await some(room, 1)
        asked.refusal = Unavailable("could not be loaded", reason="model_failed")
        room.apply([route(ModelStatus.FAILED)])
        with pytest.raises(Unavailable, match="could not be loaded"):
            await one

    run(scenario)


def test_only_so_many_wait_and_only_for_so_long() -> None:
    async def scenario(room: ColdStartQueue, asked: Controller) -> None:
        two = await some(room, 2)
        with pytest.raises(Unavailable) as third:
            await room.until_ready("m")
        assert third.value.code == "too_many_waiting"
        for each in two:
            with pytest.raises(RequestError, match="is unloaded still after"):
                await each

    run(scenario, max_waiting=2, wait_timeout_s=0.1)


def test_a_client_that_leaves_gives_its_place_to_another() -> None:
    async def scenario(room: ColdStartQueue, asked: Controller) -> None:
        one, other = await some(room, 2)
        one.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert room.waiting("m") == 1
        room.apply([route(ModelStatus.READY)])
        await other

    registry = run(scenario, max_waiting=2)
    labels = {"model": "m", "outcome": "left"}
    assert registry.get_sample_value("loomserve_model_wait_seconds_count", labels) == 1


def test_a_model_that_is_put_away_again_at_once_is_asked_for_again_at_once() -> None:
    async def scenario(room: ColdStartQueue, asked: Controller) -> None:
        (one,) = await some(room, 1)
        room.apply([route(ModelStatus.READY)])
        await one
        room.apply([route(ModelStatus.ASLEEP)])
        (other,) = await some(room, 1)
        assert len(asked.asked) == 2
        room.apply([route(ModelStatus.READY)])
        await other

    run(scenario)


def test_who_waits_as_the_gateway_ends_is_told_so() -> None:
    async def scenario(room: ColdStartQueue, asked: Controller) -> None:
        (one,) = await some(room, 1)
        await room.close()
        with pytest.raises(Unavailable, match="the gateway ends"):
            await one

    run(scenario)
