"""What is decided on: models as their replicas say that they are."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from loomserve.platform.config import Idle, Model
from loomserve.platform.devices.memory import GPU_ENGINE_BYTES, replica_bytes
from loomserve.platform.elastic.observe import ElasticObserver
from loomserve.platform.elastic.policy.snapshot import ElasticModel
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.messages import Heartbeat
from loomserve.platform.state import FootprintState, LentState, Presence, ReplicaLoad
from tests.unit.platform.fleet.heartbeats import COLD, DEVICES, report
from tests.unit.platform.fleet.heartbeats import footprint as size

IDLE = Idle(sleep_after_s=30, unload_after_s=60)
MODEL = Model(name="m", source="demo", devices=("core0", "core1"), idle=IDLE)
KV = MODEL.kv_cache_memory


class Watched:
    """A fleet of one model, and its observer."""

    def __init__(self, model: Model = MODEL, target: int = 1, gpus: Collection[str] = ()) -> None:
        self.fleet = Fleet(DEVICES, drain_timeout_s=60)
        self.model = model
        self.fleet.registry.add(model, target)
        self.wake_s: dict[str, float] = {}
        self.observer = ElasticObserver(self.fleet, {}, self.wake_s, gpus)
        self.observer.sizes.set_weights(model.name, 1000)

    def report(self, now: float, **changes: Any) -> None:
        load = {"idle_s": 5.0, "requests": 0, "asleep": False}
        load |= {name: changes.pop(name) for name in load if name in changes}
        measured = ReplicaLoad.model_validate(
            {"running": 0, "waiting": 0, "kv_cache_usage": 0, "step_time_s": 0, "measured_at": 0}
            | load
        )
        heartbeat: Heartbeat = report(model=self.model, load=measured, **changes)
        self.fleet.report(heartbeat, now)

    def seen(self, now: float, *moving: str) -> ElasticModel:
        (model,) = self.observer.snapshot(now, {}, moving).models
        return model


def footprint(memory: int, measured_at: float, dropped: int = 0) -> FootprintState:
    return size(
        memory_bytes=memory, dropped_bytes=dropped, memory_measured_at=measured_at, start_s=7.0
    )


def test_one_that_is_ready_is_as_large_as_it_can_be_and_idle_since_its_last_request() -> None:
    watched = Watched()
    watched.report(10)
    seen = watched.seen(12)
    assert (seen.presence, seen.settled, seen.devices) == (Presence.READY, True, ("core0",))
    assert seen.ready_bytes == seen.held_bytes == replica_bytes(MODEL, 1000)
    assert seen.asleep_bytes == seen.ready_bytes - KV
    # The report was of that moment, and two seconds have passed.
    assert seen.idle_s == pytest.approx(7)
    assert (seen.sleep_after_s, seen.unload_after_s) == (30, 60)


@pytest.mark.parametrize("busy", [{"idle_s": 0.0}, {"in_flight": 1}], ids=str)
def test_one_with_requests_is_not_idle(busy: dict[str, Any]) -> None:
    watched = Watched()
    watched.report(10, **busy)
    assert watched.seen(12).idle_s == 0


def test_one_whose_replicas_have_not_come_or_is_on_its_way_is_not_settled() -> None:
    watched = Watched(target=2)
    seen = watched.seen(0)
    assert (seen.settled, seen.idle_s, seen.devices) == (False, 0, ("core0", "core1"))
    assert seen.held_bytes == seen.ready_bytes
    watched.report(1)
    assert not watched.seen(1).settled
    watched.report(1, replica="r1", device="core1")
    assert watched.seen(1).settled
    assert not watched.seen(1, "m").settled


def test_it_is_there_since_its_start_ended_not_since_that_was_wished() -> None:
    watched = Watched()
    watched.fleet.registry.set_presence("m", Presence.UNLOADED, 0, "idle")
    watched.fleet.registry.set_presence("m", Presence.READY, 10, "asked for")
    assert watched.seen(25, "m").since_s == 15
    watched.report(30)
    assert watched.seen(30, "m").since_s == 20
    assert watched.seen(31).since_s == 0
    watched.report(40)
    assert watched.seen(40).since_s == 9
    # A wish that came to nothing, as the mover says it.
    watched.fleet.registry.set_presence("m", Presence.ASLEEP, 41, "idle")
    watched.seen(41, "m")
    watched.fleet.registry.set_presence("m", Presence.READY, 10, "it has requests")
    assert watched.seen(42).since_s == 11


def test_an_engine_on_a_gpu_sleeps_only_if_it_was_started_so() -> None:
    stays = MODEL.model_copy(update={"idle": None})
    for model, gpus, sleeps in (
        (MODEL, MODEL.devices, True), (stays, MODEL.devices, False), (stays, (), True)
    ):  # fmt: skip
        assert Watched(model, gpus=gpus).seen(0).can_sleep is sleeps


def test_the_weights_of_one_that_falls_asleep_on_a_gpu_count_on_its_host_from_the_first() -> None:
    watched = Watched(gpus=MODEL.devices)
    watched.report(10)
    assert watched.seen(10).host_held_bytes == GPU_ENGINE_BYTES
    watched.fleet.registry.set_presence("m", Presence.ASLEEP, 11, "")
    assert watched.seen(11).host_held_bytes == GPU_ENGINE_BYTES + 1000
    watched.report(12, asleep=True)
    assert watched.seen(12).host_held_bytes == GPU_ENGINE_BYTES + 1000
    watched.fleet.registry.set_presence("m", Presence.UNLOADED, 13, "")
    assert watched.seen(13).host_held_bytes == GPU_ENGINE_BYTES + 1000
    assert Watched().seen(0).host_held_bytes == 0


def test_one_that_falls_asleep_holds_all_until_it_does_and_then_what_was_measured() -> None:
    watched = Watched()
    watched.report(10)
    watched.fleet.registry.set_presence("m", Presence.ASLEEP, 11, "")
    falling = watched.seen(11)
    assert (falling.settled, falling.held_bytes) == (False, falling.ready_bytes)
    watched.report(12, asleep=True)
    fallen = watched.seen(12)
    assert (fallen.settled, fallen.held_bytes) == (True, fallen.asleep_bytes)
    watched.report(13, asleep=True, footprint=footprint(600, -1))  # of before it slept
    assert watched.seen(13).asleep_bytes == fallen.asleep_bytes
    watched.report(20, asleep=True, footprint=footprint(600, 0))
    assert watched.seen(20).asleep_bytes == 600
    assert watched.seen(20).ready_bytes == 600 + KV
    assert watched.seen(20).load_s == 7
    # What it does without in sleep it needs again.
    watched.report(30, asleep=True, footprint=footprint(500, 0, dropped=70))
    assert watched.seen(30).asleep_bytes == 500
    assert watched.seen(30).ready_bytes == 500 + 70 + KV
    # An estimate bounds nothing.
    large = int(2 * fallen.asleep_bytes)
    watched.report(40, asleep=True, footprint=footprint(large, 0))
    assert (watched.seen(40).asleep_bytes, watched.seen(40).ready_bytes) == (large, large + KV)


def test_what_a_sleep_would_free_is_known_before_the_first() -> None:
    watched = Watched()
    watched.report(10, footprint=footprint(900, 10, dropped=70))
    seen = watched.seen(10)
    assert seen.ready_bytes == replica_bytes(MODEL, 1000)
    assert seen.asleep_bytes == seen.ready_bytes - KV - 70


def test_one_that_ends_holds_what_it_has_until_it_has_gone() -> None:
    watched = Watched()
    watched.report(10)
    watched.fleet.registry.set_presence("m", Presence.UNLOADED, 11, "")
    ending = watched.seen(11)
    assert (ending.settled, ending.held_bytes) == (False, ending.ready_bytes)
    gone = watched.seen(30)
    assert (gone.settled, gone.held_bytes, gone.devices) == (True, 0, ("core0",))


def test_a_lender_is_not_put_away_for_being_idle() -> None:
    watched = Watched(COLD.model_copy(update={"idle": IDLE}))
    lent = LentState.model_construct(name="loan")
    watched.report(10, lent=(lent,))
    assert watched.seen(10).sleep_after_s is None
    assert watched.seen(10).idle_s > 0
    watched.report(12)
    assert watched.seen(12).sleep_after_s == 30


def test_uses_are_counted_from_what_engines_have_taken() -> None:
    watched = Watched()
    for at, requests in ((0, 1), (10, 2), (20, 3)):
        watched.report(at, requests=requests)
        seen = watched.seen(at)
    assert seen.returns_s == pytest.approx(10)
    watched.wake_s["m"] = 0.2
    assert watched.seen(20).wake_s == 0.2


def test_a_replica_that_starts_takes_memory_where_it_will_be() -> None:
    watched = Watched()
    watched.report(10)
    assert watched.seen(11).devices == ("core0",)
    watched.fleet.registry.set_target(MODEL.name, 2)
    assert watched.seen(11).devices == ("core0", "core1")
