"""A controller of a cluster that KubeRay has started plans once, and goes on if started anew."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from loomserve.deployments.controller import pod_controller as module
from loomserve.deployments.controller.pod_controller import PodController
from loomserve.deployments.ray_node import LivingNode
from loomserve.platform.base.errors import StartError
from loomserve.platform.config import LOCAL_NODE, Config, Model
from tests.unit.deployments.controller.controllers import CONFIG, FakeServe, end, states, until
from tests.unit.platform.fleet.heartbeats import COLD, HOT

TOKEN = "t" * 32


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been planned so far; the nodes are there."""
    made: list[str] = []

    def plan(config: Config, base: Path, say: Any) -> dict[str, int]:
        made.append("planned")
        return {model.name: 1 for model in config.models}

    monkeypatch.setattr(module, "plan", plan)
    monkeypatch.setattr(module, "wishes_folder", lambda: tmp_path)
    up = {LOCAL_NODE: LivingNode("id", has_state=False)}
    monkeypatch.setattr(module, "living_nodes", lambda: up)
    return made


@asynccontextmanager
async def pod_controller(
    token: str = TOKEN, config: Config = CONFIG
) -> AsyncIterator[PodController]:
    """One that dies at the end of the block without a word."""
    made = PodController.__new__(PodController)
    await PodController.__init__(made, config.model_dump(mode="json"), token, "/")
    try:
        yield made
    finally:
        await end(made)


def wished(controller: PodController) -> set[str]:
    """The models that the next controller goes on with."""
    wishes = controller._store.wishes
    return {wish.model.name for wish in wishes.models} if wishes is not None else set()


def test_it_loads_what_is_configured_by_itself(serve: FakeServe, planned: list[str]) -> None:
    async def scenario() -> None:
        async with pod_controller() as one:
            assert set(states(one)) == {HOT.name, COLD.name}
            await until(lambda: serve.devices(HOT.name) and serve.devices(COLD.name))

    asyncio.run(scenario())
    assert planned == ["planned"]


def test_one_that_is_started_anew_plans_nothing_and_keeps_what_operators_said(
    serve: FakeServe, planned: list[str]
) -> None:
    async def scenario() -> None:
        async with pod_controller() as one:
            await until(lambda: serve.devices(HOT.name) and serve.devices(COLD.name))
            await one.unload(COLD.name, 0)
            await until(lambda: COLD.name not in states(one))
        # Memory is taken by the models that run: to plan again would find too little.
        async with pod_controller() as other:
            await until(lambda: set(states(other)) == {HOT.name})

    asyncio.run(scenario())
    assert planned == ["planned"]


def test_another_cluster_begins_with_the_configuration(
    serve: FakeServe, planned: list[str]
) -> None:
    async def scenario() -> None:
        async with pod_controller() as one:
            await one.unload(COLD.name, 0)
            await until(lambda: COLD.name not in states(one))
        async with pod_controller("u" * 32) as other:
            assert set(states(other)) == {HOT.name, COLD.name}

    asyncio.run(scenario())
    assert planned == ["planned", "planned"]


def test_models_come_and_go_with_the_configuration_and_others_are_left_alone(
    serve: FakeServe, planned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    kept, gone, added, by_operator = (
        Model(name=name, source="demo", devices=("core1",))
        for name in ("kept", "gone", "added", "operators")
    )
    before = CONFIG.model_copy(update={"models": (kept, gone)})
    changed = kept.model_copy(update={"max_concurrent_requests": 7})
    after = CONFIG.model_copy(update={"models": (changed, added)})

    async def scenario() -> None:
        async with pod_controller(config=before) as one:
            (await one.load(by_operator)).get()
            await until(lambda: serve.devices("kept") and serve.devices("operators"))
        async with pod_controller(config=after) as another:
            await until(lambda: serve.devices("added"))
            await until(lambda: set(states(another)) == {"kept", "added", "operators"})
            assert another._fleet.registry.record("kept").model == kept
            # One that died sooner would leave the unloading to the next.
            await until(lambda: "gone" not in wished(another))
        async with pod_controller(config=after) as again:
            assert set(states(again)) == {"kept", "added", "operators"}

    asyncio.run(scenario())
    assert planned == ["planned"]
    assert "kept goes on as it was" in caplog.text


def test_what_an_operator_unloaded_stays_unloaded_when_the_configuration_changes(
    serve: FakeServe, planned: list[str]
) -> None:
    other = CONFIG.model_copy(
        update={"server": CONFIG.server.model_copy(update={"max_sequences": 7})}
    )

    async def scenario() -> None:
        async with pod_controller() as one:
            await one.unload(COLD.name, 0)
            await until(lambda: COLD.name not in states(one))
        async with pod_controller(config=other) as another:
            await until(lambda: set(states(another)) == {HOT.name})

    asyncio.run(scenario())


def test_what_a_node_lacks_is_the_applications_message_and_the_log_says_where(
    serve: FakeServe,
    planned: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: Any) -> dict[str, int]:
        raise StartError("node 'one': there is no C++ compiler: install g++")

    monkeypatch.setattr(module, "plan", refuse)
    monkeypatch.setattr(sys, "tracebacklimit", 1000, raising=False)

    async def scenario() -> None:
        try:
            async with pod_controller():
                pass
        except StartError:
            # As Serve's replica does, whose error Ray passes on as the deployment's message.
            raise RuntimeError(traceback.format_exc()) from None

    with pytest.raises(RuntimeError) as raised:
        asyncio.run(scenario())
    error = raised.value
    said = "".join(traceback.format_exception(error))
    assert str(RayTaskError("start", said, error, "replica", 1, "ip").as_instanceof_cause()) == (
        "RuntimeError: loomserve.platform.base.errors.StartError: node 'one': there is no C++ "
        "compiler: install g++"
    )
    assert "in refuse" in caplog.text
    assert not serve.apps


def test_it_waits_for_nodes_that_have_no_room_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []

    def up() -> dict[str, LivingNode]:
        looks.append("look")
        return {"one": LivingNode("id", has_state=False)} if len(looks) > 2 else {}

    monkeypatch.setattr(module, "living_nodes", up)
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    module.await_nodes(("one",))
    assert len(looks) == 3
