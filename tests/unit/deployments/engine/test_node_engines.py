"""Which engines a node has, who holds them, and what becomes of them when holders end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from loomserve.deployments.engine import node_engines
from loomserve.deployments.engine.node_engines import NodeEngines
from loomserve.platform.config import Model
from loomserve.platform.fleet.messages import EngineOrder, FrontEndSpec
from tests.unit.deployments.engine.test_app import CORE, spec_of
from tests.waiting import PATIENCE_S

MODEL = Model(name="m", source="org/m", devices=("d",))
KEY = ("m", "d")


class Engine:
    """An engine that takes no time to start, unless its model says that it cannot."""

    def __init__(self, order: EngineOrder, heartbeats: Any) -> None:
        self.order, self.pid = order, 7
        self.replica: int | None = None
        self.stays = self.ended = False
        self.started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.living = asyncio.create_task(asyncio.sleep(3600))
        if order.spec.path == "broken":
            self.started.set_result("it cannot start")
            self.living.cancel()
        else:
            self.started.set_result("")

    @property
    def ends(self) -> bool:
        return bool(self.started.result() or self.ended)

    async def end(self) -> None:
        self.ended = True
        self.living.cancel()
        await asyncio.wait([self.living])


class Heartbeats:
    async def send_now(self, engine: Engine) -> None:
        """Nobody listens."""


def order(model: Model = MODEL, path: str = "org/m") -> dict[str, Any]:
    spec = spec_of(model, CORE).model_copy(update={"path": path})
    front_end = FrontEndSpec(path=path, engine_options={})
    made = EngineOrder(spec=spec, device="d", options={}, environment={}, front_end=front_end)
    return made.model_dump(mode="json")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(node_engines, "HostedEngine", Engine)

    def ran(scenario: Callable[[NodeEngines], Awaitable[None]]) -> None:
        async def with_engines() -> None:
            made = NodeEngines.__new__(NodeEngines)
            made._engines, made._heartbeats = {}, Heartbeats()  # type: ignore[assignment]
            async with asyncio.timeout(PATIENCE_S):
                await scenario(made)

        asyncio.run(with_engines())

    return ran


def there(engines: NodeEngines) -> Any:
    return engines._engines[KEY]


def test_a_replica_holds_the_engine_that_was_begun_for_it(run: Callable[..., None]) -> None:
    async def scenario(engines: NodeEngines) -> None:
        await engines.start(order())
        begun = there(engines)
        assert await engines.hold(order(), 1) == (7, "")
        assert there(engines) is begun
        assert begun.replica == 1
        await engines.release(*KEY, 1)
        assert begun.ended

    run(scenario)


def test_an_engine_that_sleeps_stays_without_its_replica_and_ends_with_the_next_one(
    run: Callable[..., None],
) -> None:
    async def scenario(engines: NodeEngines) -> None:
        await engines.hold(order(), 1)
        engine = there(engines)
        await engines.let_go(*KEY)
        await engines.release(*KEY, 1)
        assert (engine.replica, engine.ended) == (None, False)
        await engines.hold(order(), 2)
        assert there(engines) is engine
        # It is not the first one's any more.
        await engines.release(*KEY, 1)
        assert not engine.ended
        await engines.release(*KEY, 2)
        assert engine.ended

    run(scenario)


def test_one_that_nobody_holds_ends_when_it_is_told_to(run: Callable[..., None]) -> None:
    async def scenario(engines: NodeEngines) -> None:
        await engines.start(order())
        engine = there(engines)
        await engines.end("another", "d")
        assert not engine.ended
        await engines.end(*KEY)
        assert engine.ended
        await engines.hold(order(), 1)
        assert there(engines) is not engine

    run(scenario)


def test_why_an_engine_cannot_start_is_told_and_it_is_tried_anew(run: Callable[..., None]) -> None:
    async def scenario(engines: NodeEngines) -> None:
        assert await engines.hold(order(path="broken"), 1) == (0, "it cannot start")
        assert await engines.hold(order(), 1) == (7, "")

    run(scenario)


def test_a_model_that_was_loaded_anew_has_an_engine_of_its_own(run: Callable[..., None]) -> None:
    async def scenario(engines: NodeEngines) -> None:
        await engines.start(order())
        before = there(engines)
        await engines.start(order(MODEL.model_copy(update={"source": "org/other"})))
        assert before.ended
        assert there(engines).order.spec.model.source == "org/other"

    run(scenario)
