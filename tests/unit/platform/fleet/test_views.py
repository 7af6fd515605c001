"""What gateways, the batch lane and operators see of a fleet."""

from __future__ import annotations

from loomserve.platform.config import Lengths
from loomserve.platform.fleet.registry import HEARTBEAT_EXPIRES_S, SILENCE_ENDS_S
from loomserve.platform.state import (
    ChatParsers,
    ModelStatus,
    ParserChoice,
    Presence,
    ReplicaLoad,
    StageState,
)
from tests.unit.platform.fleet.heartbeats import FRONT_END, HOT, fleet, report, status


def test_a_model_goes_from_loading_over_degraded_to_ready_as_replicas_report() -> None:
    some = fleet()
    assert status(some, 0) is ModelStatus.LOADING
    some.report(report("r0"), 1)
    assert status(some, 1) is ModelStatus.DEGRADED
    some.report(report("r1", "core1"), 2)
    assert status(some, 2) is ModelStatus.READY
    assert [device.models for device in some.views.used_devices(2)] == [("org/m",), ("org/m",)]


def test_operators_see_what_reads_a_models_answers_before_and_after_it_has_replicas() -> None:
    some = fleet()
    (unknown,) = some.views.models(0)
    later, now = (
        ChatParsers(
            tool_call=ParserChoice(name=name, why="w"), reasoning=ParserChoice(name=None, why="w")
        )
        for name in ("hermes", "mistral")
    )
    some.registry.set_front_end("org/m", FRONT_END.model_copy(update={"parsers": later}))
    (starting,) = some.views.models(0)
    some.report(report(front_end=FRONT_END.model_copy(update={"parsers": now})), 1)
    (running,) = some.views.models(1)
    assert (unknown.parsers, starting.parsers, running.parsers) == (None, later, now)


def test_a_pipeline_shows_on_all_of_its_devices() -> None:
    some = fleet(target=1)
    stages = (StageState(device="core1", layers=9), StageState(device="core0", layers=21))
    some.report(report("r0", "core1", stages=stages), 1)
    assert status(some, 1) is ModelStatus.READY
    assert [device.models for device in some.views.used_devices(1)] == [("org/m",), ("org/m",)]
    assert some.views.models(1)[0].replicas[0].stages == stages


def test_gateways_know_of_a_silent_replica_until_it_has_been_silent_for_long() -> None:
    some = fleet(target=1)
    some.report(report(), 0)
    later = HEARTBEAT_EXPIRES_S + 0.1
    assert [replica.id for replica in some.views.routes(later)[0].replicas] == ["r0"]
    assert not some.views.routes(SILENCE_ENDS_S)[0].replicas
    assert status(some, later) is ModelStatus.LOADING
    (state,) = some.views.models(HEARTBEAT_EXPIRES_S + 2)
    assert state.message.startswith("nothing was heard of its replicas for 12 s")
    some.report(report("r1", "core1"), later)
    assert [replica.id for replica in some.views.routes(later)[0].replicas] == ["r1", "r0"]
    assert status(some, later) is ModelStatus.READY
    some.report(report("r2"), later)
    assert [replica.id for replica in some.views.routes(later)[0].replicas] == ["r1", "r2"]


def test_gateways_know_no_more_of_a_replica_that_has_been_silent_for_a_minute() -> None:
    some = fleet(target=1)
    some.report(report(), 0)
    some.report(report("r1", "core1"), SILENCE_ENDS_S)
    assert [replica.id for replica in some.views.routes(SILENCE_ENDS_S)[0].replicas] == ["r1"]


def test_a_failure_shows_only_while_nothing_answers() -> None:
    some = fleet()
    some.registry.set_failure("org/m", "no memory")
    assert some.views.models(0)[0].status is ModelStatus.FAILED
    assert some.views.models(0)[0].message == "no memory"
    some.report(report(), 1)
    assert status(some, 1) is ModelStatus.DEGRADED


def test_the_batch_lane_hears_of_live_replicas_as_they_will_be() -> None:
    some = fleet()
    assert some.views.engines(0).models["org/m"].engines == {}
    some.report(report("r0"), 1)
    some.report(report("r1", "core1"), 1)
    some.registry.set_draining("r1", True)
    model = some.views.engines(1).models["org/m"]
    assert model.max_model_len == 64
    assert {id_: stats.draining for id_, stats in model.engines.items()} == {
        "r0": False,
        "r1": True,
    }
    assert some.views.engines(1 + HEARTBEAT_EXPIRES_S).models["org/m"].engines == {}
    some.registry.begin_unload("org/m", 60)
    assert some.views.engines(1).models["org/m"].engines == {}


def test_the_batch_lane_hears_what_predicts_a_models_lengths() -> None:
    some = fleet()
    some.registry.add(
        HOT.model_copy(update={"lending": None, "lengths": Lengths(predictor="hot-v1")}), 1
    )
    found = some.views.engines(0).models
    assert (found["org/m"].predictor, found["org/hot"].predictor) == (None, "hot-v1")


def test_gateways_hear_where_engines_are_and_which_of_them_requests_have_to_leave() -> None:
    some = fleet()
    assert some.views.routes(0)[0].front_end is None
    for replica, device in (("r0", "core0"), ("r1", "core1")):
        some.report(report(replica, device), 1)
    some.registry.set_draining("r1", True)
    (route,) = some.views.routes(1)
    assert route.front_end == FRONT_END
    assert [(each.id, each.draining) for each in route.replicas] == [("r0", False), ("r1", True)]
    assert route.replicas[1].engine == report("r1").engine


def test_a_model_sleeps_wakes_has_no_engine_and_is_loaded_again() -> None:
    some = fleet(target=1)
    some.report(report(), 0)
    assert not some.views.routes(0)[0].on_demand
    some.registry.set_presence("org/m", Presence.ASLEEP, 1, "idle for 9 s")
    assert some.views.models(1)[0].message == "idle for 9 s; a request wakes it"
    some.registry.replica("r0").note_asleep(True)
    assert (status(some, 1), some.views.routes(1)[0].on_demand) == (ModelStatus.ASLEEP, True)
    assert some.views.models(1)[0].replicas[0].asleep
    some.registry.set_presence("org/m", Presence.READY, 2, "it is asked for")
    assert status(some, 2) is ModelStatus.WAKING
    load = ReplicaLoad(running=0, waiting=0, kv_cache_usage=0, step_time_s=0, measured_at=0)
    some.report(report(load=load), 3)
    assert status(some, 3) is ModelStatus.READY
    some.registry.set_presence("org/m", Presence.UNLOADED, 4, "")
    assert status(some, 4) is ModelStatus.UNLOADED
    assert some.registry.targets() == {"org/m": 0}
    assert some.report(report(), 5).draining
    gone = 5 + SILENCE_ENDS_S
    # What takes long to set up stays for the engine that comes next.
    assert some.views.routes(gone)[0].front_end == FRONT_END
    assert some.views.engines(gone).models["org/m"].on_demand
    some.registry.set_presence("org/m", Presence.READY, gone, "")
    assert status(some, gone) is ModelStatus.LOADING


def test_what_is_asleep_is_so_for_the_next_controller() -> None:
    some, other = fleet(), fleet()
    other.registry.remove("org/m")
    some.registry.set_presence("org/m", Presence.ASLEEP, 1, "")
    other.restore(some.wishes())
    assert other.registry.record("org/m").presence is Presence.ASLEEP
    assert other.registry.record("org/m").on_demand
