"""A replica's heartbeats, and what of their answers it carries out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from loomserve.deployments.engine import heartbeat as module
from loomserve.deployments.engine.heartbeat import HeartbeatSender
from loomserve.platform.fleet.messages import DesiredState
from loomserve.platform.state.roles import Role


def test_what_an_earlier_controller_wants_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = answered_by(1, 1, 2, 1, 2, 3)

    async def report(*beats: Any) -> list[DesiredState]:
        return [next(answers) for _ in beats]

    handle = SimpleNamespace(report=SimpleNamespace(remote=report))
    monkeypatch.setattr(module.serve, "get_deployment_handle", lambda *_: handle)
    applied: list[DesiredState] = []
    engine: Any = SimpleNamespace(heartbeat=object, apply=applied.append)
    sender = HeartbeatSender(lambda: [engine])

    async def send() -> None:
        for _ in range(6):
            await sender.send_now(engine)

    asyncio.run(send())
    assert [desired.stop_timeout_s for desired in applied] == [0, 1, 2, 4, 5]


def answered_by(*generations: int) -> Iterator[DesiredState]:
    for number, generation in enumerate(generations):
        yield DesiredState(
            generation=generation, draining=False, stop_timeout_s=number, role=Role.UNIFIED
        )
