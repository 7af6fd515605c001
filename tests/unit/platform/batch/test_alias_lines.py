"""Lines of batches that name an alias."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loomserve.platform.batch.executor import (
    AliasedModels,
    LineAnswer,
    LineCall,
    LineOutcome,
)
from loomserve.platform.fleet.messages import ServedModel
from tests.unit.platform.batch.test_lane import Bench, Engines, hurry, request, until

LINES = 200


class Several(Engines):
    """Engines of models ``a`` and ``b``, and the alias ``chat`` of both."""

    def __init__(self, **weights: int) -> None:
        super().__init__(delay_s=0.001)
        self.weights: dict[str, int] | None = weights
        self.away: set[str] = set()
        self.on_demand = False
        self.asked: list[tuple[str, str | None, object]] = []
        self.failing: Callable[[LineCall], bool] = lambda call: False

    async def models(self) -> Any:
        served = await super().models()
        assert served is not None
        engines = served["m"].engines
        models: dict[str, Any] = {
            name: ServedModel(
                max_model_len=1024,
                engines={} if name in self.away else {f"e-{name}": engines["e"]},
                on_demand=self.on_demand,
            )
            for name in ("a", "b")
        }
        return models | ({} if self.weights is None else {"chat": AliasedModels(self.weights)})

    async def execute(self, call: LineCall) -> LineAnswer:
        self.asked.append((call.model, call.engine, call.body["model"]))
        if self.failing(call):
            return LineAnswer(LineOutcome.ENGINE_FAILED, 500, b"{}")
        return await super().execute(call)

    @property
    def split(self) -> Counter[str]:
        return Counter(model for model, _, _ in self.asked)


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def aliased(count: int) -> str:
    return "".join(request(f"q{number}", model="chat") + "\n" for number in range(count))


async def ran(path: Path, engines: Several) -> None:
    bench = Bench(path / "b", engines, concurrency=8)
    batch_id = bench.submit(aliased(LINES))
    async with bench.running():
        batch = await bench.ended(batch_id)
    assert (batch.completed, batch.failed) == (LINES, 0)


def test_lines_are_split_by_weight_each_on_an_engine_of_its_model(tmp_path: Path) -> None:
    engines = Several(a=3, b=1)
    asyncio.run(ran(tmp_path, engines))
    # Five standard deviations of as many draws.
    assert abs(engines.split["a"] - 150) <= 30
    # The gateway is asked by the alias, so that it looks at what the key may use.
    assert {(model, engine, named) for model, engine, named in engines.asked} == {
        ("a", "e-a", "chat"),
        ("b", "e-b", "chat"),
    }


def test_a_model_without_engines_is_passed_over(tmp_path: Path) -> None:
    engines = Several(a=1, b=1)
    engines.away = {"a"}
    asyncio.run(ran(tmp_path, engines))
    assert engines.split == {"b": LINES}


def test_a_model_that_a_line_has_come_gets_its_share(tmp_path: Path) -> None:
    engines = Several(a=1, b=1)
    engines.away, engines.on_demand = {"b"}, True
    asyncio.run(ran(tmp_path, engines))
    assert abs(engines.split["b"] - LINES / 2) <= 40
    # The gateway has it come, and finds the engine.
    assert {engine for model, engine, _ in engines.asked if model == "b"} == {None}


def test_an_attempt_after_a_failure_is_the_same_models(tmp_path: Path) -> None:
    engines = Several(a=1, b=1)
    tried = Counter[object]()

    def fails_once(call: LineCall) -> bool:
        tried[call.body["prompt"]] += 1
        return tried[call.body["prompt"]] == 1

    engines.failing = fails_once
    models: dict[object, set[str]] = {}
    execute = engines.execute

    async def noted(call: LineCall) -> LineAnswer:
        models.setdefault(call.body["prompt"], set()).add(call.model)
        return await execute(call)

    engines.execute = noted  # type: ignore[method-assign]
    asyncio.run(ran(tmp_path, engines))
    assert len(models) == LINES
    assert set(tried.values()) == {2}
    assert all(len(each) == 1 for each in models.values())


async def changed(folder: Path, weights: dict[str, int] | None) -> tuple[Several, Any]:
    """Engines whose alias changes while lines that name it wait, and the batch at its end."""
    engines = Several(a=1)
    bench = Bench(folder / "b", engines, concurrency=4)
    batch_id = bench.submit(aliased(LINES))
    async with bench.running():
        await until(lambda: len(engines.asked) > 20)
        engines.weights = weights
        return engines, await bench.ended(batch_id)


def test_a_change_moves_lines_that_wait(tmp_path: Path) -> None:
    engines, batch = asyncio.run(changed(tmp_path, {"a": 0, "b": 1}))
    assert batch.completed == LINES
    assert engines.split["b"] > LINES / 2
    switched = [model for model, _, _ in engines.asked].index("b")
    assert {model for model, _, _ in engines.asked[switched:]} == {"b"}


def test_lines_of_an_alias_that_is_gone_are_answered_by_the_gateway(tmp_path: Path) -> None:
    engines, _ = asyncio.run(changed(tmp_path, None))
    # It knows the name no more than the lane does.
    assert engines.asked[-1] == ("chat", None, "chat")


def test_lines_wait_while_all_models_of_their_alias_are_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        engines = Several(a=1, b=1)
        engines.away = {"a", "b"}
        bench = Bench(tmp_path / "b", engines, concurrency=4)
        batch_id = bench.submit(aliased(20))
        async with bench.running():
            await asyncio.sleep(0.2)
            assert engines.asked == []
            engines.away = {"b"}
            batch = await bench.ended(batch_id)
        assert (batch.completed, engines.split) == (20, {"a": 20})

    asyncio.run(scenario())
