"""Adapters of controllers: given to replicas first, told to gateways, kept for the next one."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loomserve.deployments.controller.controller import Controller
from loomserve.deployments.controller.replica_calls import ReplicaUnreachableError
from loomserve.platform.adapters import sources
from loomserve.platform.adapters.messages import Adapter, AdapterReport
from loomserve.platform.base.errors import BadRequest, Conflict, NotFound, UnknownModel
from loomserve.platform.config import Alias, Config, Model
from loomserve.platform.fleet.messages import ModelRoute
from tests.peft_folders import write_adapter
from tests.unit.deployments.controller.controllers import FakeServe, controlled, heard, told
from tests.unit.platform.fleet.heartbeats import report

SHAPES = {"model.layers.0.self_attn.q_proj.weight": (8, 8)}
PLAIN = Model(name="plain", source="demo", devices=("core1",))


class Replicas:
    """In the place of calls to replicas: what each was told to have, and what it then says."""

    def __init__(self) -> None:
        self.given: dict[str, list[int]] = {}
        self.refuses = ""
        self.away = False

    async def set_adapters(
        self, address: str, adapters: Sequence[Adapter]
    ) -> tuple[AdapterReport, ...]:
        if self.away:
            raise ReplicaUnreachableError("nobody is there")
        self.given[address] = [each.id for each in adapters]
        last = adapters[-1].id
        return tuple(
            AdapterReport(id=each.id, problem=self.refuses if each.id == last else "")
            for each in adapters
        )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sources, "_shapes", lambda model, base: SHAPES)
    return write_adapter(tmp_path / "loras" / "sql", SHAPES, seed=1, rank=4)


def chat(**adapters: Any) -> Model:
    return Model(name="chat", source="demo", devices=("core0",), adapters=adapters)


def configured(*models: Model, **more: Any) -> Config:
    devices = [{"name": "core0", "cores": (0,)}, {"name": "core1", "cores": (1,)}]
    return Config(devices=devices, models=models or (chat(), PLAIN), **more)


def replicas_of(controller: Controller) -> Replicas:
    calls: Any = Replicas()
    controller._adapters._calls = calls
    return calls


def route(controller: Controller) -> ModelRoute:
    models = controller._fleet.views.routes(time.monotonic())
    return next(each for each in models if each.name == "chat")


def names(controller: Controller) -> dict[str, tuple[str, ...]]:
    """Those that clients may ask for, with the replicas that have each."""
    adapters = (route(controller)).adapters
    return {each.adapter.name: each.replicas for each in adapters if not each.leaves}


def test_an_adapter_is_loaded_listed_replaced_and_unloaded(serve: FakeServe, folder: Path) -> None:
    async def scenario() -> None:
        async with controlled(first=True, config=configured()) as one:
            replicas = replicas_of(one)
            await heard(one, report("r0", model=chat()))
            state = await told(one.set_adapter("chat", "sql", str(folder)))
            (shown,) = state.models[0].adapters
            assert (shown.name, shown.rank, shown.replicas) == ("sql", 4, ("r0",))
            assert names(one) == {"sql": ("r0",)}
            assert replicas.given == {"engine-1.127.0.0.1": [1]}
            # The replica that it was not given learns of it with its heartbeat.
            (desired,) = await one.report(report("r1", model=chat()))
            assert [each.id for each in desired.adapters] == [1]

            write_adapter(folder, SHAPES, seed=2, rank=4)
            await told(one.set_adapter("chat", "sql", str(folder)))
            adapters = (route(one)).adapters
            assert [(each.adapter.id, each.leaves) for each in adapters] == [(2, False), (1, True)]
            assert len({each.adapter.key for each in adapters}) == 2

            await told(one.set_adapter("chat", "sql", None))
            assert names(one) == {}
            with pytest.raises(NotFound):
                await told(one.set_adapter("chat", "sql", None))

    asyncio.run(scenario())


def test_they_outlive_controllers_with_their_weights(serve: FakeServe, folder: Path) -> None:
    async def scenario() -> None:
        async with controlled(first=True, config=configured()) as one:
            replicas_of(one)
            await told(one.set_adapter("chat", "sql", str(folder)))
            (first,) = (route(one)).adapters
        # Whatever becomes of the folder.
        shutil.rmtree(folder)
        async with controlled(config=configured()) as other:
            (desired,) = await other.report(report("r0", model=chat()))
            assert desired.adapters == (first.adapter,)
            has_it = (AdapterReport(id=1),)
            await other.report(report("r0", model=chat(), adapters=has_it))
            assert names(other) == {"sql": ("r0",)}

    asyncio.run(scenario())


def test_one_that_a_replica_refuses_is_given_up(serve: FakeServe, folder: Path) -> None:
    async def scenario() -> None:
        async with controlled(first=True, config=configured()) as one:
            replicas = replicas_of(one)
            await heard(one, report("r0", model=chat()))
            await told(one.set_adapter("chat", "sql", str(folder)))
            write_adapter(folder, SHAPES, seed=2, rank=4)
            replicas.refuses = "vLLM says no"
            with pytest.raises(BadRequest, match="vLLM says no") as error:
                await told(one.set_adapter("chat", "sql", str(folder)))
            assert error.value.param == "source"
            # The one before still answers.
            assert names(one) == {"sql": ("r0",)}
            (desired,) = await one.report(report("r0", model=chat()))
            assert [each.id for each in desired.adapters] == [1]

    asyncio.run(scenario())


def test_one_that_does_not_answer_or_sleeps_gets_it_later(serve: FakeServe, folder: Path) -> None:
    async def scenario() -> None:
        async with controlled(first=True, config=configured()) as one:
            replicas = replicas_of(one)
            replicas.away = True
            await heard(one, report("r0", model=chat()))
            await told(one.set_adapter("chat", "sql", str(folder)))
            assert names(one) == {"sql": ()}
            replicas.away = False
            one._fleet.registry.replica("r0").note_asleep(True)
            await told(one.set_adapter("chat", "other", str(folder)))
            assert replicas.given == {}
            assert names(one) == {"other": (), "sql": ()}

    asyncio.run(scenario())


def test_what_cannot_be_is_refused_by_name(serve: FakeServe, folder: Path) -> None:
    large = write_adapter(folder.parent / "large", SHAPES, seed=1, rank=64)
    config = configured(aliases={"canary": Alias(models={"chat": 1})})

    async def scenario() -> None:
        async with controlled(first=True, config=config) as one:
            replicas_of(one)
            refused = [
                ("gone", "sql", folder, UnknownModel, "'gone'"),
                ("plain", "sql", folder, Conflict, "takes no adapters"),
                ("chat", "plain", folder, Conflict, "a model is named 'plain'"),
                ("chat", "canary", folder, Conflict, "an alias is named 'canary'"),
                ("chat", "sql", folder / "gone", BadRequest, "there is no folder"),
                ("chat", "sql", large, BadRequest, "r is 64, and the model takes adapters of rank"),
            ]
            for model, name, source, error, words in refused:
                with pytest.raises(error, match=words):
                    await told(one.set_adapter(model, name, str(source)))
            assert names(one) == {}
            await told(one.set_adapter("chat", "sql", str(folder)))
            with pytest.raises(Conflict, match="a model is named 'sql'"):
                await told(one.set_alias("sql", Alias(models={"chat": 1})))
            await told(one.set_alias("canary", Alias(models={"chat": 9, "sql": 1})))
            extra = PLAIN.model_copy(update={"name": "sql"})
            with pytest.raises(Conflict, match="'sql' is an adapter of model 'chat'"):
                await told(one.load(extra))

    asyncio.run(scenario())


def test_those_of_the_configuration_come_with_their_models(serve: FakeServe, folder: Path) -> None:
    load = [
        {"name": "sql", "source": str(folder)},
        {"name": "broken", "source": str(folder / "gone")},
    ]
    config = configured(chat(load=load), PLAIN)

    async def scenario() -> None:
        async with controlled(first=True, config=config) as one:
            assert names(one) == {"sql": ()}
            sql, broken = one._state().models[0].adapters
            assert (sql.name, sql.message) == ("sql", "")
            assert (broken.name, broken.rank) == ("broken", None)
            assert "there is no folder" in broken.message
            # Lines of batches may name them, as models.
            assert set((await one.engines()).models) == {"chat", "plain", "sql"}

            loaded = Model(
                name="more", source="demo", devices=("core0",),
                adapters={"load": [{"name": "late", "source": str(folder)}]},
            )  # fmt: skip
            state = await told(one.load(loaded))
            assert [each.name for each in state.models[-1].adapters] == ["late"]
            wrong = loaded.model_copy(
                update={
                    "name": "wrong",
                    "adapters": chat(load=[{"name": "x", "source": "nowhere"}]).adapters,
                }
            )
            with pytest.raises(BadRequest, match=r"adapters.load\[0\].source"):
                await told(one.load(wrong))
            assert [each.name for each in one._state().models] == ["chat", "plain", "more"]

    asyncio.run(scenario())
