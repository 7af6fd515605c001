"""A replica has its engine get the adapters that are wanted, and says of each what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from loomserve.deployments.engine import adapters as module
from loomserve.deployments.engine.adapters import ReplicaAdapters
from loomserve.platform.adapters import sources
from loomserve.platform.adapters.messages import Adapter, AdapterOrder, AdapterReports
from loomserve.platform.adapters.sources import kept_folder, take
from loomserve.platform.config import Model
from loomserve.platform.fleet.messages import ADAPTERS_PATH, DesiredState
from loomserve.platform.state.roles import Role
from tests.peft_folders import write_adapter
from tests.unit.deployments.engine.test_app import spec_of
from tests.unit.platform.fleet.heartbeats import DEVICES
from tests.waiting import PATIENCE_S

SHAPES = {"model.layers.0.self_attn.q_proj.weight": (8, 8)}
MODEL = Model(name="chat", source="demo", devices=("core0",), adapters={})


class Engine:
    """An engine's host that notes what it was told to have."""

    def __init__(self) -> None:
        self.told: list[list[dict[str, Any]]] = []
        self.refuses: dict[int, str] = {}
        self.left = 0

    async def set_adapters(
        self, wanted: Sequence[Mapping[str, Any]], *, timeout_s: float
    ) -> tuple[dict[int, str], int]:
        self.told.append([dict(each) for each in wanted])
        there = {each["id"] for each in wanted}
        return {n: why for n, why in self.refuses.items() if n in there}, self.left

    @property
    def last(self) -> list[int]:
        return [each["id"] for each in self.told[-1]]


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder, self.engine = folder, Engine()
        self.asleep, self.changes = False, 0
        engine: Any = self.engine
        self.adapters = ReplicaAdapters(
            engine,
            spec_of(MODEL, DEVICES[0]),
            lambda: self.asleep,
            self._changed,
        )

    async def _changed(self) -> None:
        self.changes += 1

    def adapter(self, number: int, digest: str | None = None) -> Adapter:
        folder = write_adapter(self.folder / f"a{number}", SHAPES, seed=number, rank=4)
        digest = digest or take(MODEL, str(folder), Path("/")).digest
        return Adapter(
            name=f"a{number}", model="chat", id=number, digest=digest, source=str(folder), rank=4
        )

    def want(self, *adapters: Adapter) -> None:
        desired = DesiredState(
            draining=False, stop_timeout_s=1, role=Role.UNIFIED, adapters=adapters
        )
        self.adapters.apply(desired)

    @property
    def reports(self) -> dict[int, str]:
        return {each.id: each.problem for each in self.adapters.reports}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sources, "_shapes", lambda model, base: SHAPES)
    monkeypatch.setattr(module, "_AGAIN_S", 0.02)
    return Bench(tmp_path)


def run(bench: Bench, play: Callable[[], Awaitable[None]]) -> None:
    async def scenario() -> None:
        running = asyncio.create_task(bench.adapters.run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await play()
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    asyncio.run(scenario())


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def test_the_engine_gets_them_by_key_and_place_once(bench: Bench) -> None:
    one = bench.adapter(1)

    async def play() -> None:
        bench.want(one)
        await until(lambda: bench.reports == {1: ""})
        place = str(kept_folder(one.digest))
        assert bench.engine.told == [[{"id": 1, "name": one.key, "path": place}]]
        bench.want(one)
        await asyncio.sleep(0.1)
        assert len(bench.engine.told) == 1
        bench.want()
        await until(lambda: bench.reports == {})
        assert bench.engine.last == []
        await until(lambda: bench.changes == 2)

    run(bench, play)


def test_what_the_engine_refuses_is_told_and_tried_again(bench: Bench) -> None:
    one, two = bench.adapter(1), bench.adapter(2)
    bench.engine.refuses = {1: "no room"}

    async def play() -> None:
        bench.want(one, two)
        await until(lambda: bench.reports == {1: "no room", 2: ""})
        bench.engine.refuses = {}
        await until(lambda: bench.reports == {1: "", 2: ""})

    run(bench, play)


def test_weights_that_have_changed_where_they_came_from_are_not_taken(bench: Bench) -> None:
    changed = bench.adapter(1, digest="of-other-weights")

    async def play() -> None:
        bench.want(changed)
        await until(lambda: "has other weights than when it was loaded" in bench.reports.get(1, ""))
        assert bench.engine.last == []

    run(bench, play)


def test_one_that_is_not_wanted_is_unloaded_once_its_requests_have_ended(bench: Bench) -> None:
    bench.engine.left = 1

    async def play() -> None:
        bench.want(bench.adapter(1))
        await until(lambda: len(bench.engine.told) > 2)
        bench.engine.left = 0
        await asyncio.sleep(0.1)
        calls = len(bench.engine.told)
        await asyncio.sleep(0.1)
        assert len(bench.engine.told) == calls

    run(bench, play)


def test_an_engine_that_sleeps_gets_them_when_it_wakes(bench: Bench) -> None:
    bench.asleep = True

    async def play() -> None:
        bench.want(bench.adapter(1))
        await asyncio.sleep(0.1)
        assert bench.engine.told == []
        bench.asleep = False
        bench.adapters.look_again()
        await until(lambda: bench.reports == {1: ""})

    run(bench, play)


def test_an_order_is_answered_once_it_is_carried_out(bench: Bench) -> None:
    one = bench.adapter(1)
    bench.engine.refuses = {1: "vLLM says no"}
    transport = httpx.ASGITransport(Starlette(routes=bench.adapters.routes))

    async def play() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            order = AdapterOrder(adapters=(one,)).model_dump_json()
            answer = await client.put(ADAPTERS_PATH, content=order)
        (said,) = AdapterReports.model_validate_json(answer.text).reports
        assert (said.id, said.problem) == (1, "vLLM says no")

    run(bench, play)
