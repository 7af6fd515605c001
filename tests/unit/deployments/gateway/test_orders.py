"""What a gateway and its controller are to each other: whose orders hold, and how one ends."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from loomserve.deployments.gateway.gateway import Gateway
from loomserve.platform.base.errors import TakenOver
from loomserve.platform.base.sqlite import LatestGeneration
from loomserve.platform.fleet.messages import Routes
from loomserve.platform.fleet.nodes import GatewayOrders

OTHERS = {"http://there": "two"}


def gateway(*orders: GatewayOrders) -> Any:
    """One that has heard of the second controller."""
    made: Any = Gateway.__new__(Gateway)
    made._controllers = LatestGeneration()
    made._controllers.check(2)
    left = iter(orders)

    async def report(heartbeat: object) -> GatewayOrders:
        return next(left)

    made._parts = SimpleNamespace(
        controller=SimpleNamespace(report_gateway=SimpleNamespace(remote=report)),
        others=SimpleNamespace(address="http://here", elsewhere={}),
        sequences=SimpleNamespace(total=0),
    )
    return made


def test_routes_of_an_earlier_controller_are_not_taken_over() -> None:
    # It has no routes that they could replace.
    with pytest.raises(TakenOver):
        gateway()._apply(Routes(generation=1, version=9, models=()))


@pytest.mark.parametrize(("generation", "others"), [(1, {}), (2, OTHERS), (3, OTHERS)])
def test_limits_and_others_of_an_earlier_controller_are_not_taken_over(
    generation: int, others: Mapping[str, str]
) -> None:
    limits: Any = object()
    made = gateway(GatewayOrders(limits, OTHERS, generation))

    async def report() -> Any:
        try:
            return await made._report(limits)
        except TakenOver:
            return None

    assert asyncio.run(report()) is (limits if others else None)
    assert made._parts.others.elsewhere == others


class Call:
    """As of Serve: who waits for it no longer does not end it by that."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._answer = asyncio.get_running_loop().create_future()

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self._answer).__await__()

    def cancel(self) -> None:
        self.is_cancelled = True


async def _ended_while_it_watches() -> Call:
    call, made = Call(), gateway()
    made._version, made._id = 1, "this"
    watch = SimpleNamespace(remote=lambda version, gateway: call)
    made._parts.controller = SimpleNamespace(watch=watch)
    following = asyncio.create_task(made._follow_controller())
    await asyncio.sleep(0)
    following.cancel()
    await asyncio.wait([following])
    assert following.cancelled()
    return call


def test_a_gateway_that_ends_lets_its_controller_end() -> None:
    assert asyncio.run(_ended_while_it_watches()).is_cancelled
