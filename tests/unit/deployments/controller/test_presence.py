"""Models that come and go: what the controller does for requests, for operators and by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from loomserve.deployments.controller import controller as module
from loomserve.deployments.controller import presence, presence_mover
from loomserve.deployments.controller.controller import Controller
from loomserve.deployments.controller.replica_calls import ReplicaUnreachableError
from loomserve.deployments.engine.app import Handed
from loomserve.platform.base.errors import Conflict, Unavailable, UnknownModel
from loomserve.platform.config import Config, Idle, Model
from loomserve.platform.fleet.messages import Heartbeat
from loomserve.platform.state import ModelStatus, Presence, ReplicaLoad
from loomserve.routers.snapshot import RoutingStats
from tests.unit.deployments.controller.controllers import (
    FakeServe,
    controlled,
    heard,
    states,
    told,
    until,
)
from tests.unit.platform.fleet.heartbeats import report

# It takes long, so that it begins first.
pytestmark = pytest.mark.xdist_group("presence")

GIB = 2**30
HERE = Model(name="here", source="demo", devices=("core0",))
AWAY = HERE.model_copy(update={"name": "away", "start": "on_demand"})
# One that is ready and one that sleeps fit, and no two that are ready.
CONFIG = Config(
    devices=[{"name": "core0", "cores": (0,), "memory": int(1.2 * GIB)}],
    models=[HERE, AWAY],
    elastic={"residence_s": 0},
)


class FakeCalls:
    """Replicas' engines: whether each sleeps, and what they are told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bool]] = []
        self.failing: list[Exception] = []
        self.loads: dict[str, RoutingStats] = {}
        self.holds = asyncio.Event()
        self.holds.set()

    async def set_awake(self, address: str, awake: bool) -> None:
        self.told.append((address.partition(".")[0], awake))
        await self.holds.wait()
        if self.failing:
            raise self.failing.pop(0)

    async def stats(self, address: str) -> RoutingStats:
        stats = self.loads.get(address.partition(".")[0])
        if stats is None:
            raise ReplicaUnreachableError("nobody")
        return stats

    async def close(self) -> None:
        pass


@pytest.fixture
def calls(serve: FakeServe, monkeypatch: pytest.MonkeyPatch) -> FakeCalls:
    fake = FakeCalls()
    monkeypatch.setattr(module, "ReplicaCalls", lambda *_: fake)
    monkeypatch.setattr(presence, "_TICK_S", 0.02)
    monkeypatch.setattr(presence, "_RETRY_S", 0.02)
    monkeypatch.setattr(presence, "_PLACE_AGAIN_S", 0.05)
    monkeypatch.setattr(presence, "_held_bytes", lambda *_, on_gpus: 0)
    monkeypatch.setattr(presence_mover, "_GATEWAYS_KNOW_S", 0.0)
    return fake


def alive(
    model: Model, *, idle_s: float = 50.0, asleep: bool = False, in_flight: int = 0, **load: Any
) -> Heartbeat:
    """A replica of the model, on core0."""
    values = {"running": 0, "waiting": 0, "kv_cache_usage": 0, "step_time_s": 0, "measured_at": 0}
    return report(
        f"{model.name}-0",
        model=model,
        address=f"{model.name}.127.0.0.1",
        in_flight=in_flight,
        load=ReplicaLoad(**{**values, **load}, idle_s=idle_s, asleep=asleep),
    )


@asynccontextmanager
async def running(config: Config = CONFIG, *, first: bool = True) -> AsyncIterator[Controller]:
    """A controller whose first model is ready."""
    async with controlled(config=config) as one:
        if first:
            await one.load_configured()
            await heard(one, alive(HERE))
        yield one


async def wanted(controller: Controller, name: str) -> None:
    (await controller.want(name)).get()


def test_a_model_on_demand_is_started_with_its_first_request(
    serve: FakeServe,
    calls: FakeCalls,
) -> None:
    async def scenario() -> None:
        async with running() as one:
            assert states(one) == {"here": ModelStatus.READY, "away": ModelStatus.UNLOADED}
            (_, route) = one._routes.current.models
            assert (route.on_demand, route.replicas) == (True, ())
            await asyncio.sleep(0.1)
            assert serve.devices("away") == []
            await told(one.unload("here", 0))
            await wanted(one, "away")
            await until(lambda: serve.devices("away"))
            assert states(one)["away"] is ModelStatus.LOADING
            # Gateways set its front end up while its engine starts.
            (route,) = (each for each in one._routes.current.models if each.name == "away")
            assert route.front_end is not None
            await heard(one, alive(AWAY))
            assert states(one)["away"] is ModelStatus.READY

    asyncio.run(scenario())


def test_the_idle_one_sleeps_first_and_wakes_when_it_is_asked_for(
    serve: FakeServe,
    calls: FakeCalls,
) -> None:
    async def scenario() -> None:
        async with running() as one:
            await wanted(one, "away")
            await until(lambda: states(one)["here"] is ModelStatus.ASLEEP)
            await until(lambda: serve.devices("away"))
            assert calls.told == [("here", False)]
            await heard(one, alive(AWAY), alive(HERE, asleep=True))
            assert states(one) == {"here": ModelStatus.ASLEEP, "away": ModelStatus.READY}
            await wanted(one, "here")
            await until(lambda: states(one)["here"] is ModelStatus.READY)
            assert calls.told == [("here", False), ("away", False), ("here", True)]
            assert states(one)["away"] is ModelStatus.ASLEEP
            events = (await one.model_events(3)).get().events
            assert [(each.model, each.presence) for each in events] == [
                ("here", Presence.READY),
                ("away", Presence.ASLEEP),
                ("away", Presence.READY),
            ]
            assert events[1].why == "here needs its memory"
            # Both engines are kept.
            assert (serve.devices("here"), serve.deletes) == (["core0"], 0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("host", "idle", "becomes"),
    [
        (14, Idle(), Presence.ASLEEP),
        (11, Idle(), Presence.UNLOADED),
        # vLLM was not started so that it can sleep.
        (14, None, Presence.UNLOADED),
    ],
)
def test_one_on_a_gpu_is_unloaded_where_it_cannot_sleep_or_its_host_not_hold_its_weights(
    serve: FakeServe,
    calls: FakeCalls,
    monkeypatch: pytest.MonkeyPatch,
    host: int,
    idle: Idle | None,
    becomes: Presence,
) -> None:
    monkeypatch.setattr(presence, "_held_bytes", lambda *_, on_gpus: 10 * GIB)
    # "core0" is what its replicas say; beside ten GiB of weights an engine takes 1.5 of the host.
    gpu = {"name": "core0", "kind": "cuda", "gpu": 0, "memory": 15 * GIB}
    config = Config(
        devices=[{**gpu, "host_memory": host * GIB}],
        models=[HERE.model_copy(update={"idle": idle}), AWAY],
        elastic={"residence_s": 0},
    )

    async def scenario() -> None:
        async with running(config) as one:
            await wanted(one, "away")
            await until(lambda: one._fleet.registry.record("here").presence is not Presence.READY)
            assert one._fleet.registry.record("here").presence is becomes

    asyncio.run(scenario())


def test_one_with_requests_goes_once_they_have_ended(
    serve: FakeServe,
    calls: FakeCalls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence_mover, "_POLL_S", 0.02)

    async def scenario() -> None:
        async with running() as one:
            await heard(one, alive(HERE, idle_s=0.0, running=1, in_flight=1))
            calls.failing = [Conflict("it has requests")] * 10**6
            await wanted(one, "away")
            await until(lambda: len(calls.told) > 3)
            # Requests that come meanwhile wait.
            assert states(one)["here"] is ModelStatus.ASLEEP
            assert states(one)["away"] is ModelStatus.UNLOADED
            assert not serve.devices("away")
            calls.failing = []
            await until(lambda: serve.devices("away"))

    asyncio.run(scenario())


def test_one_whose_requests_do_not_end_stays(
    serve: FakeServe,
    calls: FakeCalls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence_mover, "_POLL_S", 0.02)
    config = CONFIG.model_copy(
        update={"elastic": CONFIG.elastic.model_copy(update={"wait_timeout_s": 0.6})}
    )

    async def scenario() -> None:
        async with running(config) as one:
            await heard(one, alive(HERE, idle_s=0.0, running=1, in_flight=1))
            calls.failing = [Conflict("it has requests")] * 10**6
            await wanted(one, "away")
            assert states(one)["here"] is ModelStatus.ASLEEP
            await until(lambda: states(one)["here"] is ModelStatus.READY)
            assert states(one)["away"] is ModelStatus.UNLOADED

    asyncio.run(scenario())


def test_one_that_had_a_request_after_all_stays_and_goes_after_it(
    serve: FakeServe,
    calls: FakeCalls,
) -> None:
    async def scenario() -> None:
        async with running() as one:
            calls.failing = [Conflict("it has requests")] * 50
            await wanted(one, "away")
            await until(lambda: len(calls.told) > 1)
            assert states(one)["away"] is ModelStatus.UNLOADED
            calls.failing = []
            await until(lambda: serve.devices("away"))

    asyncio.run(scenario())


def test_one_whose_last_request_ended_since_its_heartbeat_makes_room(
    serve: FakeServe,
    calls: FakeCalls,
) -> None:
    async def scenario() -> None:
        async with running() as one:
            await heard(one, alive(HERE, idle_s=0.0, running=1, in_flight=1))
            calls.loads["here"] = alive(HERE, idle_s=0.1).stats
            await wanted(one, "away")
            await until(lambda: serve.devices("away"))
            assert states(one)["here"] is ModelStatus.ASLEEP

    asyncio.run(scenario())


def test_operators_put_models_to_sleep_wake_and_unload_them(
    serve: FakeServe,
    calls: FakeCalls,
) -> None:
    async def scenario() -> None:
        async with running() as one:
            with pytest.raises(Conflict, match="no engine that could sleep"):
                await told(one.set_presence("away", Presence.ASLEEP))
            with pytest.raises(UnknownModel):
                await told(one.set_presence("other", Presence.ASLEEP))
            calls.failing = [Conflict("it has requests")]
            with pytest.raises(Conflict, match="it has requests"):
                await told(one.set_presence("here", Presence.ASLEEP))
            assert states(one)["here"] is ModelStatus.READY
            await told(one.set_presence("here", Presence.ASLEEP))
            assert states(one)["here"] is ModelStatus.ASLEEP
            await told(one.set_presence("here", Presence.READY))
            await until(lambda: states(one)["here"] is ModelStatus.READY)
            await told(one.set_presence("here", Presence.UNLOADED))
            assert states(one)["here"] is ModelStatus.UNLOADED
            assert serve.devices("here") == []
            (here, _) = one._state().models
            assert here.replicas == ()

    asyncio.run(scenario())


def test_one_that_sleeps_does_so_with_the_next_controller_too(
    serve: FakeServe,
    calls: FakeCalls,
) -> None:
    async def scenario() -> None:
        async with running() as one:
            await told(one.set_presence("here", Presence.ASLEEP))
        async with running(first=False) as other:
            await heard(other, alive(HERE, asleep=True))
            assert states(other) == {"here": ModelStatus.ASLEEP, "away": ModelStatus.UNLOADED}
            # Its engine ended and was started anew: it is put to sleep again.
            calls.told.clear()
            await heard(other, alive(HERE))
            await until(lambda: calls.told == [("here", False)])

    asyncio.run(scenario())


def test_serve_has_replicas_of_engines_that_serve_and_of_no_others(
    serve: FakeServe, calls: FakeCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "_FOLLOW_S", 0.05)
    alone = {"held": False}

    async def scenario() -> None:
        async with running() as one:
            await until(lambda: serve.devices("here"))
            await told(one.set_presence("here", Presence.ASLEEP))
            await heard(one, alive(HERE, asleep=True))
            await until(lambda: not serve.devices("here"))
            assert serve.deletes == 0, "its engine would have ended"
            await heard(one, alive(HERE, asleep=True).model_copy(update=alone))
            await asyncio.sleep(0.2)
            assert serve.devices("here") == []
            await wanted(one, "here")
            await heard(one, alive(HERE).model_copy(update=alone))
            assert states(one)["here"] is ModelStatus.READY
            await until(lambda: serve.devices("here"))

    asyncio.run(scenario())


def test_an_engine_that_ends_in_its_sleep_is_started_and_put_to_sleep_again(
    serve: FakeServe, calls: FakeCalls
) -> None:
    async def scenario() -> None:
        async with running() as one:
            await told(one.set_presence("here", Presence.ASLEEP))
        serve.apps.clear()
        async with running(first=False) as other:
            await until(lambda: serve.devices("here"))
            calls.told.clear()
            await heard(other, alive(HERE))
            await until(lambda: calls.told == [("here", False)])

    asyncio.run(scenario())


def test_one_that_a_request_has_woken_is_ready(
    serve: FakeServe,
    calls: FakeCalls,
) -> None:
    async def scenario() -> None:
        async with running() as one:
            await told(one.set_presence("here", Presence.ASLEEP))
            calls.failing = [Conflict("it has requests")]
            await heard(one, alive(HERE, idle_s=0.0, running=1))
            await until(lambda: states(one)["here"] is ModelStatus.READY)

    asyncio.run(scenario())


def test_one_that_does_not_wake_is_tried_again_until_its_replica_is_there(
    serve: FakeServe,
    calls: FakeCalls,
) -> None:
    async def scenario() -> None:
        async with running() as one:
            await told(one.set_presence("here", Presence.ASLEEP))
            calls.failing = [ReplicaUnreachableError("gone")] * 2
            await wanted(one, "here")
            await until(lambda: states(one)["here"] is ModelStatus.READY)
            assert calls.told.count(("here", True)) == 3

    asyncio.run(scenario())


def test_one_that_cannot_be_loaded_is_refused_with_the_reason_and_tried_again_later(
    serve: FakeServe,
    calls: FakeCalls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "_FAILED_S", 0.3)

    async def refuse(*_: Any) -> Handed:
        return Handed(problem="there is no folder")

    async def scenario() -> None:
        async with running() as one:
            await told(one.unload("here", 0))
            deploy, serve.deploy = serve.deploy, refuse  # type: ignore[method-assign]
            await wanted(one, "away")
            await until(lambda: states(one)["away"] is ModelStatus.FAILED)
            with pytest.raises(Unavailable, match=r"has failed, .* ask the operator"):
                await wanted(one, "away")
            serve.deploy = deploy  # type: ignore[method-assign]
            await asyncio.sleep(0.4)
            await wanted(one, "away")
            await until(lambda: serve.devices("away"))
            await heard(one, alive(AWAY))
            assert states(one)["away"] is ModelStatus.READY

    asyncio.run(scenario())


def test_one_that_cannot_be_loaded_is_not_tried_for_ever(
    serve: FakeServe,
    calls: FakeCalls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "_FAILED_S", 0.0)
    tries = 0

    async def refuse(*_: Any) -> Handed:
        nonlocal tries
        tries += 1
        return Handed(problem="there is no folder")

    async def scenario() -> None:
        async with running() as one:
            await told(one.unload("here", 0))
            deploy, serve.deploy = serve.deploy, refuse  # type: ignore[method-assign]
            for _ in range(4):
                await wanted(one, "away")
                await until(lambda: states(one)["away"] is ModelStatus.FAILED)
                await until(lambda: one._fleet.registry.record("away").replicas == 0)
            seen = tries
            for _ in range(3):
                with pytest.raises(Unavailable, match="ask the operator") as raised:
                    await wanted(one, "away")
                assert raised.value.headers() == {}
            assert tries == seen
            # An operator has it tried again at once.
            serve.deploy = deploy  # type: ignore[method-assign]
            await told(one.set_presence("away", Presence.READY))
            await until(lambda: serve.devices("away"))
            await heard(one, alive(AWAY))
            assert states(one)["away"] is ModelStatus.READY

    asyncio.run(scenario())


@pytest.mark.parametrize("model", [HERE, AWAY])
def test_one_that_does_not_answer_fails_with_the_reason_and_gives_its_device_back(
    serve: FakeServe, calls: FakeCalls, model: Model
) -> None:
    name = model.name

    def failing(**update: Any) -> Heartbeat:
        return alive(model).model_copy(update={"answers": False, **update})

    async def scenario() -> None:
        config = CONFIG.model_copy(update={"models": (model,)})
        async with running(config, first=False) as one:
            await one.load_configured()
            await wanted(one, name)
            await until(lambda: serve.devices(name))
            await heard(one, failing())
            assert states(one)[name] is ModelStatus.LOADING
            await heard(one, failing(problem="its template is wrong"))
            assert states(one)[name] is ModelStatus.FAILED
            (state,) = (each for each in one._state().models if each.name == name)
            assert state.message == "its template is wrong"
            await one._presence._look()  # the demand that loaded it does not load it again
            assert one._fleet.registry.record(name).presence is Presence.UNLOADED
            await until(lambda: not serve.devices(name))
            assert states(one)[name] is ModelStatus.FAILED
            for _ in range(2):
                with pytest.raises(Unavailable, match="ask the operator") as raised:
                    await wanted(one, name)
                assert "try again" not in str(raised.value)
            assert serve.devices(name) == []
            await told(one.set_presence(name, Presence.READY))
            await until(lambda: serve.devices(name))
            await heard(one, alive(model))
            assert states(one)[name] is ModelStatus.READY

    asyncio.run(scenario())


def test_one_replica_that_does_not_answer_does_not_take_the_others_with_it(
    serve: FakeServe,
    calls: FakeCalls,
) -> None:
    async def scenario() -> None:
        async with running() as one:
            bad = alive(HERE).model_copy(update={"answers": False, "problem": "it is odd"})
            await heard(one, bad.model_copy(update={"replica_id": "here-1"}))
            assert states(one)["here"] is ModelStatus.READY
            (here, _) = one._state().models
            assert [each.message for each in here.replicas] == ["", "it is odd"]
            assert [each.answers for each in one._routes.current.models[0].replicas] == [
                True,
                False,
            ]

    asyncio.run(scenario())


def test_one_that_serve_has_lost_is_placed_again(
    serve: FakeServe,
    calls: FakeCalls,
) -> None:
    async def scenario() -> None:
        async with running() as one:
            await told(one.unload("here", 0))
            await wanted(one, "away")
            await until(lambda: serve.devices("away"))
            serve.apps.clear()
            await until(lambda: serve.devices("away"))
            # One that ended and came again at once is not taken for the one before.
            await heard(one, alive(AWAY))
            await told(one.set_presence("away", Presence.UNLOADED))
            await wanted(one, "away")
            await until(lambda: serve.devices("away"))
            assert states(one)["away"] is ModelStatus.LOADING

    asyncio.run(scenario())


def test_idle_models_sleep_and_end_by_themselves(
    serve: FakeServe,
    calls: FakeCalls,
) -> None:
    idle = Idle(sleep_after_s=0.2, unload_after_s=0.6)
    model = HERE.model_copy(update={"idle": idle})
    config = CONFIG.model_copy(update={"models": (model,)})

    async def scenario() -> None:
        async with running(config) as one:
            await heard(one, alive(model, idle_s=0.1))
            await until(lambda: states(one)["here"] is ModelStatus.ASLEEP)
            await heard(one, alive(model, idle_s=0.3, asleep=True))
            await until(lambda: states(one)["here"] is ModelStatus.UNLOADED)
            await until(lambda: not serve.devices("here"))

    asyncio.run(scenario())


# Two devices of which each holds one that is ready.
TWO = Config(
    devices=[
        {"name": "core0", "cores": (0,), "memory": GIB},
        {"name": "core1", "cores": (1,), "memory": GIB},
    ],
    models=[HERE],
    elastic={"residence_s": 0},
)
LATE = Model(name="late", source="demo")


def placement(controller: Controller, name: str) -> str:
    return next(model.placement for model in controller._state().models if model.name == name)


def test_a_model_without_devices_comes_where_there_is_least_to_do(
    serve: FakeServe,
    calls: FakeCalls,
) -> None:
    async def scenario() -> None:
        async with running(TWO) as one:
            await heard(one, alive(HERE, in_flight=1, idle_s=0.0, running=1))
            await told(one.load(LATE))
            await until(lambda: serve.devices("late"))
            assert serve.devices("late") == ["core1"]
            assert placement(one, "late").startswith("core1 has least to do (core0: busy ")
            assert placement(one, "here") == ""
            await one._save()  # as twice a second
        # Who comes after knows where it is.
        async with running(TWO, first=False) as next_one:
            assert next_one._fleet.registry.record("late").devices == ("core1", "core0")
            assert placement(next_one, "late").startswith("core1 has least to do")

    asyncio.run(scenario())


def test_one_without_devices_waits_for_a_request_where_there_is_no_room(
    serve: FakeServe,
    calls: FakeCalls,
) -> None:
    async def scenario() -> None:
        busy = {"in_flight": 1, "idle_s": 0.0, "running": 1}
        config = TWO.model_copy(update={"devices": TWO.devices[:1]})
        async with running(config) as one:
            await heard(one, alive(HERE, **busy))  # type: ignore[arg-type]
            await told(one.load(LATE))
            assert states(one)["late"] is ModelStatus.UNLOADED
            await heard(one, alive(HERE))
            await wanted(one, "late")
            await until(lambda: serve.devices("late"))

    asyncio.run(scenario())


def test_one_without_devices_that_is_on_demand_is_not_loaded_yet(
    serve: FakeServe,
    calls: FakeCalls,
) -> None:
    async def scenario() -> None:
        async with running(TWO) as one:
            await told(one.load(LATE.model_copy(update={"start": "on_demand"})))
            await asyncio.sleep(0.1)
            assert (states(one)["late"], serve.devices("late")) == (ModelStatus.UNLOADED, [])

    asyncio.run(scenario())
