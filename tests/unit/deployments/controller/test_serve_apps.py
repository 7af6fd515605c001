"""Serve and Ray are ordered nothing by a controller that another has taken over from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from loomserve.deployments.controller.serve_apps import ServeApps
from loomserve.platform.base.errors import TakenOver
from tests.unit.deployments.controller.controllers import CONFIG


@pytest.mark.parametrize(
    "order",
    [
        lambda apps: apps.deploy(None, ["c0"], "/"),
        lambda apps: apps.delete("m", ["c0"]),
        lambda apps: apps.start_gateway("two"),
        lambda apps: apps.release("m", ["c0"]),
        lambda apps: apps.end_on("two"),
        lambda apps: apps.drain_node("id", 1.0),
    ],
)
def test_an_earlier_controller_orders_nothing(order: Callable[[Any], Awaitable[Any]]) -> None:
    def check_owner() -> None:
        raise TakenOver("another one does")

    apps = ServeApps(CONFIG, "token", None, check_owner)

    async def give() -> None:
        await order(apps)

    with pytest.raises(TakenOver):
        asyncio.run(give())
