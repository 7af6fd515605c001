"""A gateway's orders: those of a controller that another has taken over from change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from loomserve.deployments.gateway.gateway import Gateway
from loomserve.platform.base.errors import TakenOver
from loomserve.platform.base.generation import LatestGeneration
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

    made._controller = SimpleNamespace(report_gateway=SimpleNamespace(remote=report))
    made._others = SimpleNamespace(address="http://here", elsewhere={})
    made._sequences = SimpleNamespace(open=SimpleNamespace(total=lambda: 0))
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
    assert made._others.elsewhere == others
