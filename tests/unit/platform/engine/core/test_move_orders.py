"""A replica carries each order out once, and says what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from loomserve.platform.engine.core.host import MoveOrders
from loomserve.platform.fleet.messages import MovedRequests, MoveOrder
from tests.waiting import PATIENCE_S

FIRST = MoveOrder(id="p/0", to="b", requests=4)


class Engine:
    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None
        self.told = 0

    async def move_requests(self, to: str, most: int, *, timeout_s: float) -> int:
        self.asked.append((to, most))
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return most - 1

    async def tell(self) -> None:
        self.told += 1
        raise ConnectionError("the controller is away")


def played(play: Callable[[Engine, MoveOrders], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = Engine()
        orders = MoveOrders(engine, engine.tell)
        async with asyncio.timeout(PATIENCE_S):
            await play(engine, orders)
            await orders.close()

    asyncio.run(run())


async def settled(engine: Engine, told: int) -> None:
    while engine.told < told:  # noqa: ASYNC110 - of whatever the test looks at
        await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_each_order_is_carried_out_once_and_one_at_a_time() -> None:
    async def play(engine: Engine, orders: MoveOrders) -> None:
        orders.apply(None)
        assert orders.last is None
        second = MoveOrder(id="p/1", to="c", requests=2)
        for order in (FIRST, FIRST, second):
            orders.apply(order)
            await asyncio.sleep(0)
        assert engine.asked == [("b", 4)]
        assert orders.last is None
        engine.may_answer.set()
        await settled(engine, 1)
        assert orders.last == MovedRequests(order="p/0", requests=3)
        for order in (FIRST, None, second):
            orders.apply(order)
        await settled(engine, 2)
        assert engine.asked == [("b", 4), ("c", 2)]
        assert orders.last == MovedRequests(order="p/1", requests=1)

    played(play)


def test_an_engine_that_ends_is_told_as_a_problem_and_not_asked_again() -> None:
    async def play(engine: Engine, orders: MoveOrders) -> None:
        engine.error = RuntimeError("its process has ended")
        engine.may_answer.set()
        orders.apply(FIRST)
        await settled(engine, 1)
        orders.apply(FIRST)
        await asyncio.sleep(0)
        assert orders.last is not None
        assert orders.last.requests == 0
        assert "its process has ended" in orders.last.problem
        assert len(engine.asked) == 1

    played(play)


def test_an_order_that_is_under_way_ends_with_the_replica() -> None:
    async def play(engine: Engine, orders: MoveOrders) -> None:
        orders.apply(FIRST)
        await asyncio.sleep(0)
        assert engine.asked

    played(play)
