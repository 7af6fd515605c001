"""Controllers that die: what operators wished is carried out by the next one."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from types import SimpleNamespace
from typing import Any

import pytest

from loomserve.deployments.controller import controller as module
from loomserve.deployments.controller import published_routes
from loomserve.deployments.controller.controller import Controller
from loomserve.platform.base.errors import Conflict, TakenOver
from loomserve.platform.config import Config, Model
from loomserve.platform.fleet.messages import replica_app
from loomserve.platform.fleet.registry import SILENCE_ENDS_S
from loomserve.platform.state import FootprintState, ModelStatus
from tests.unit.deployments.controller.controllers import (
    PATIENCE_S,
    FakeServe,
    controlled,
    heard,
    states,
    told,
    until,
)
from tests.unit.platform.fleet.heartbeats import COLD, HOT, borrowing, report

EXTRA = Model(name="org/extra", source="demo", devices=("core0", "core1"))


def test_an_unload_goes_on_with_the_next_controller(serve: FakeServe) -> None:
    async def scenario() -> None:
        async with controlled(first=True) as one:
            await heard(one, report("c0", model=COLD, in_flight=1))
            await told(one.unload(COLD.name, 600))
            assert states(one)[COLD.name] is ModelStatus.UNLOADING
        async with controlled() as other:
            assert states(other)[COLD.name] is ModelStatus.UNLOADING
            await heard(other, report("c0", model=COLD, in_flight=1))
            assert states(other)[COLD.name] is ModelStatus.UNLOADING
            await heard(other, report("c0", model=COLD))
            await until(lambda: COLD.name not in states(other))
            await heard(other, report("c0", model=COLD))
            assert COLD.name not in states(other), "its last words do not bring it back"
        async with controlled() as third:
            await until(lambda: [*states(third)] == [HOT.name])
        assert serve.devices(HOT.name)
        assert not serve.devices(COLD.name)

    asyncio.run(scenario())


def test_what_serve_does_not_delete_is_tried_again_until_it_is(serve: FakeServe) -> None:
    async def scenario() -> None:
        async with controlled(first=True) as one:
            serve.failing = [TimeoutError("60 s"), RuntimeError("away"), OSError("gone")]
            await told(one.unload(COLD.name, 0))
            with pytest.raises(Conflict):
                await told(one.unload(COLD.name, 0))
            await until(lambda: COLD.name not in states(one))
            assert serve.deletes == 4
            assert serve.cancelled == [COLD.name]
            await one.check_health()
            await told(one.load(COLD))
            await until(lambda: serve.devices(COLD.name))

    asyncio.run(scenario())


def test_the_number_of_replicas_is_as_wished_after_a_restart(serve: FakeServe) -> None:
    async def scenario() -> None:
        async with controlled(first=True) as one:
            await told(one.scale(COLD.name, 2))
            await until(lambda: len(serve.devices(COLD.name)) == 2)
        # Serve was told of another number, by whom ever.
        serve.apps.remove(replica_app(COLD.name, "core1"))
        serve.failing = [RuntimeError("busy")]
        async with controlled() as other:
            await until(lambda: len(serve.devices(COLD.name)) == 2)
            assert other._fleet.registry.targets()[COLD.name] == 2

    asyncio.run(scenario())


def test_a_scale_that_serve_refuses_is_tried_again_until_it_is_done(serve: FakeServe) -> None:
    async def scenario() -> None:
        async with controlled(first=True) as one:
            serve.failing = [RuntimeError("busy"), RuntimeError("busy")]
            await told(one.scale(COLD.name, 2))
            await until(lambda: serve.devices(COLD.name) == ["core0", "core1"])
            serve.failing = [RuntimeError("busy")]
            await told(one.scale(COLD.name, 1))
            await until(lambda: serve.devices(COLD.name) == ["core0"])
            await one.check_health()

    asyncio.run(scenario())


def test_a_scale_during_which_the_controller_dies_is_carried_out_by_the_next(
    serve: FakeServe,
) -> None:
    async def scenario() -> None:
        async with controlled(first=True) as one:
            serve.hangs = True
            await told(one.scale(COLD.name, 2))
            await asyncio.sleep(0.05)
            assert len(serve.devices(COLD.name)) == 1
        serve.hangs = False
        async with controlled():
            await until(lambda: len(serve.devices(COLD.name)) == 2)

    asyncio.run(scenario())


def test_a_replica_whose_node_is_down_starts_elsewhere_if_a_device_is_free(
    serve: FakeServe,
) -> None:
    config = Config(
        cluster={},
        devices=[
            {"name": "a0", "cores": (0,), "node": "a"},
            {"name": "b0", "cores": (0,), "node": "b"},
        ],
        models=[COLD.model_copy(update={"devices": ("a0", "b0")})],
    )

    async def scenario() -> None:
        serve.up = {"a", "b"}
        async with controlled(first=True, config=config) as one:
            assert serve.devices(COLD.name) == ["a0"]
            serve.failing = [RuntimeError("busy")]
            serve.up = {"b"}
            await until(lambda: serve.devices(COLD.name) == ["b0"])
            serve.up = {"a", "b"}
            await told(one.scale(COLD.name, 2))
            await until(lambda: serve.devices(COLD.name) == ["a0", "b0"])
            # There is no other: they come back with their nodes.
            serve.up = {"b"}
            await asyncio.sleep(0.2)
            assert serve.devices(COLD.name) == ["a0", "b0"]
            await one.check_health()

    asyncio.run(scenario())


def served_since(ready_at: float) -> FootprintState:
    return FootprintState(
        layers=1,
        layer_bytes=0,
        kv_heads=1,
        block_bytes=1,
        block_tokens=1,
        memory_bytes=1,
        memory_measured_at=0,
        start_s=1,
        ready_at=ready_at,
    )


def test_a_replica_that_is_being_ended_as_a_controller_dies_is_started_again(
    serve: FakeServe,
) -> None:
    async def scenario() -> None:
        async with controlled(first=True) as one:
            await told(one.scale(COLD.name, 2))
            await until(lambda: len(serve.devices(COLD.name)) == 2)
        serve.deleting.add(replica_app(COLD.name, "core1"))
        async with controlled():
            await until(lambda: not serve.deleting)
            await until(lambda: len(serve.devices(COLD.name)) == 2)

    asyncio.run(scenario())


def test_the_newest_replica_ends_where_there_are_too_many(serve: FakeServe) -> None:
    async def scenario() -> None:
        async with controlled(first=True) as one:
            await told(one.scale(COLD.name, 2))
            await until(lambda: len(serve.devices(COLD.name)) == 2)
            old = report("c1", "core1", model=COLD, footprint=served_since(5.0))
            new = report("c0", "core0", model=COLD, footprint=served_since(9.0))
            await heard(one, old, new)
            await told(one.scale(COLD.name, 1))
            await until(lambda: serve.devices(COLD.name) == ["core1"])

    asyncio.run(scenario())


def test_a_model_loaded_at_run_time_is_loaded_again_if_it_never_came_to_serve(
    serve: FakeServe,
) -> None:
    async def scenario() -> None:
        async with controlled(first=True) as one:
            serve.hangs = True
            await told(one.load(EXTRA))
        serve.hangs = False
        async with controlled() as other:
            assert EXTRA.name in states(other)
            await until(lambda: serve.devices(EXTRA.name))
            await told(other.unload(EXTRA.name, 0))
            await until(lambda: EXTRA.name not in states(other))
        async with controlled() as third:
            await until(lambda: EXTRA.name not in states(third))

    asyncio.run(scenario())


def test_drained_replicas_roles_and_pairs_stay_as_they_were_switched(serve: FakeServe) -> None:
    async def scenario() -> None:
        reports = [report("c1", "core1", model=COLD), borrowing()]
        async with controlled(first=True) as one:
            await heard(one, *reports)
            await told(one.drain("c1", True))
            await told(one.set_role("c1", "prefill"))
            await told(one.set_pair(f"{HOT.name}/{COLD.name}", False))
        async with controlled() as other:
            await heard(other, *reports)
            (replica,) = next(m for m in other._state().models if m.name == COLD.name).replicas
            assert (replica.draining, replica.role) == (True, "prefill")
            (pair,) = (await told(other.lending())).pairs
            assert not pair.enabled
            await told(other.drain("c1", False))
        async with controlled() as third:
            (desired,) = await third.report(report("c1", "core1", model=COLD))
            assert not desired.draining

    asyncio.run(scenario())


def test_a_model_that_serve_does_not_start_is_tried_again_until_it_is(serve: FakeServe) -> None:
    async def scenario() -> None:
        async with controlled(first=True) as one:
            serve.failing = [TimeoutError("60 s"), RuntimeError("away")]
            await told(one.load(EXTRA))
            await until(lambda: states(one)[EXTRA.name] is ModelStatus.FAILED)
            await until(lambda: serve.devices(EXTRA.name))
            await until(lambda: states(one)[EXTRA.name] is ModelStatus.LOADING)
            await one.check_health()
            # One that is unloaded is not.
            await told(one.unload(EXTRA.name, 0))
            await until(lambda: EXTRA.name not in states(one))
            serve.failing = [TimeoutError("60 s")]
            await told(one.load(EXTRA))
            await until(lambda: states(one)[EXTRA.name] is ModelStatus.FAILED)
            await told(one.unload(EXTRA.name, 0))
            await until(lambda: EXTRA.name not in states(one) and len(one._models._tasks) == 0)
            assert not serve.devices(EXTRA.name)

    asyncio.run(scenario())


def test_a_loop_that_ends_is_noticed_and_a_model_that_cannot_be_loaded_is_not_one(
    serve: FakeServe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with controlled(first=True) as one:
            serve.failing = [ValueError("no weights")]
            await told(one.load(EXTRA))
            await until(lambda: states(one)[EXTRA.name] is ModelStatus.FAILED)
            await one.check_health()

            def broken(now: float) -> Any:
                raise KeyError("a bug")

            monkeypatch.setattr(one._fleet.views.__class__, "routes", lambda self, now: broken(now))
            await until(lambda: any(task.done() for task in one._tasks))
            with pytest.raises(RuntimeError, match="has ended"):
                await one.check_health()

    asyncio.run(scenario())
    assert "no weights" in caplog.text


def test_work_on_a_model_that_ends_with_an_error_is_noticed(
    serve: FakeServe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with controlled(first=True) as one:

            def broken(*_: Any) -> bool:
                raise KeyError("a bug")

            monkeypatch.setattr(one._fleet.registry.__class__, "unload_may_finish", broken)
            await told(one.unload(COLD.name, 0))
            await until(lambda: one._models.failure)
            with pytest.raises(RuntimeError, match="has ended"):
                await one.check_health()

    asyncio.run(scenario())
    assert "a bug" in caplog.text


def test_wishes_that_cannot_be_kept_just_now_are_kept_later(
    serve: FakeServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with controlled(first=True) as one:
            save = one._store.save

            def full(wishes: Any) -> None:
                raise sqlite3.OperationalError("disk is full")

            monkeypatch.setattr(one._store, "save", full)
            await told(one.scale(COLD.name, 2))
            await until(lambda: len(serve.devices(COLD.name)) == 2)
            await one.check_health()
            monkeypatch.setattr(one._store, "save", save)
            await until(lambda: one._store.wishes == one._fleet.wishes())

    asyncio.run(scenario())


def test_a_controller_that_hung_cannot_overwrite_the_wishes_of_the_next(serve: FakeServe) -> None:
    async def scenario() -> None:
        async with controlled(first=True) as hung, controlled() as other:
            await told(other.scale(COLD.name, 2))
            hung._fleet.registry.set_target(COLD.name, 7)
            beat = report("c0", model=COLD)
            (late,), (newest,) = await hung.report(beat), await other.report(beat)
            assert late.generation < newest.generation
            assert (hung._routes.current.generation, other._routes.current.generation) == (
                late.generation,
                newest.generation,
            )
            with pytest.raises(TakenOver):
                await hung._save()
            await until(lambda: any(task.done() for task in hung._tasks))
            with pytest.raises(RuntimeError, match="has ended"):
                await hung.check_health()
        async with controlled() as third:
            assert third._fleet.registry.targets()[COLD.name] == 2

    asyncio.run(scenario())


def test_an_unload_deadline_survives(serve: FakeServe) -> None:
    async def scenario() -> None:
        busy = report("c0", model=COLD, in_flight=1)
        async with controlled(first=True) as one:
            await heard(one, busy)
            await told(one.unload(COLD.name, 500))
            before = one._fleet.registry.record(COLD.name).unload_deadline
        async with controlled() as other:
            record = other._fleet.registry.record(COLD.name)
            assert record.unload_deadline == before
            assert before is not None
            assert 400 < before - time.monotonic() <= 500

    asyncio.run(scenario())


def test_a_replica_that_kills_its_engine_says_why_once(serve: FakeServe) -> None:
    async def run() -> None:
        async with controlled(first=True) as one:
            await heard(one, report("c0", model=COLD))
            why = "its process slept and came to the end of no step for 121 s"
            ending = report("c0", model=COLD, ends=why, draining=True)
            await heard(one, ending, ending)
            (model,) = (each for each in one._state().models if each.name == COLD.name)
            assert [(each.message, each.draining) for each in model.replicas] == [(why, True)]
            told = (await one.model_events(9)).get().events
            assert [each.why for each in told if each.model == COLD.name] == [
                f"replica c0 kills its engine: {why}"
            ]

    asyncio.run(run())


def test_gateways_are_told_nothing_before_a_new_controller_knows_the_replicas(
    serve: FakeServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = (report("h0", model=HOT), report("c0", "core1", model=COLD))

    async def replicas(controller: Controller) -> set[str]:
        async with asyncio.timeout(PATIENCE_S):
            routes = await controller.watch(-1, "gateway")
        return {each.id for route in routes.models for each in route.replicas}

    async def scenario() -> None:
        async with controlled(first=True) as one:
            # There was none before it that gateways could go on with.
            assert await replicas(one) == set()
            await heard(one, *reports)
        async with controlled() as other:
            asked = asyncio.create_task(replicas(other))
            await heard(other, reports[0])
            await asyncio.sleep(0.2)
            assert not asked.done()
            await heard(other, reports[1])
            assert await asked == {"h0", "c0"}
        monkeypatch.setattr(published_routes, "_LEARNS_S", 0.3)
        async with controlled() as third:
            await heard(third, reports[0])
            # The other is gone, it seems.
            assert await replicas(third) == {"h0"}

    asyncio.run(scenario())


def test_gateways_are_told_nothing_before_a_controller_that_stood_still_has_heard_of_replicas(
    serve: FakeServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = (report("h0", model=HOT), report("c0", "core1", model=COLD))
    stood_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stood_s)
    monkeypatch.setattr(module, "time", clock)

    async def scenario() -> None:
        nonlocal stood_s
        async with controlled(first=True) as one:
            await heard(one, *reports)
            known = one._routes.current
            assert {each.id for route in known.models for each in route.replicas} == {"h0", "c0"}
            stood_s = 2 * SILENCE_ENDS_S
            await heard(one, reports[0])
            await one._publish()
            assert one._routes.current == known
            await heard(one, reports[1])
            known = one._routes.current
            assert {each.id for route in known.models for each in route.replicas} == {"h0", "c0"}

    asyncio.run(scenario())
