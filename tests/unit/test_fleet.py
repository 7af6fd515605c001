"""The fleet's bookkeeping, driven with a clock of its own."""

from __future__ import annotations

import pytest

from loomserve.deployments.base import EngineReport
from loomserve.deployments.fleet import REPORT_EXPIRES_S, Fleet
from loomserve.platform.config import Device, Model
from loomserve.platform.errors import Conflict, NotFound, UnknownModel
from loomserve.platform.roles import Role
from loomserve.platform.state import ModelStatus, ReplicaLoad
from loomserve.routers.snapshot import RoutingStats

DEVICES = (Device(name="core0", cores=(0,)), Device(name="core1", cores=(1,)))
MODEL = Model(name="org/m", source="demo", devices=("core0", "core1"))


def fleet(target: int = 2) -> Fleet:
    made = Fleet(DEVICES, drain_timeout_s=60)
    made.add(MODEL, target)
    return made


def report(replica: str = "r0", device: str = "core0", **changes: object) -> EngineReport:
    load = ReplicaLoad(running=0, waiting=0, kv_cache_usage=0, step_time_s=0, measured_at=0)
    values = {
        "model": MODEL, "replica_id": replica, "device": device, "address": "127.0.0.1:1",
        "pid": 1, "max_model_len": 64, "in_flight": 0,
    }  # fmt: skip
    stats = {"load": load, "max_running": 8, "kv_capacity_tokens": 64, "draining": False,
             "role": Role.UNIFIED}  # fmt: skip
    stats |= {name: changes.pop(name) for name in ("draining", "role") if name in changes}
    return EngineReport(**{**values, **changes}, stats=RoutingStats(**stats))


def status(of: Fleet, now: float) -> ModelStatus:
    return of.model_states(now)[0].status


def test_a_model_goes_from_loading_over_degraded_to_ready_as_replicas_report() -> None:
    some = fleet()
    assert status(some, 0) is ModelStatus.LOADING
    some.report(report("r0"), 1)
    assert status(some, 1) is ModelStatus.DEGRADED
    some.report(report("r1", "core1"), 2)
    assert status(some, 2) is ModelStatus.READY
    assert [device.models for device in some.device_states(2)] == [("org/m",), ("org/m",)]


def test_a_replica_that_stops_reporting_is_no_answer_any_more() -> None:
    some = fleet(target=1)
    some.report(report(), 0)
    assert some.routes(REPORT_EXPIRES_S - 0.1)[0].replicas
    assert not some.routes(REPORT_EXPIRES_S + 0.1)[0].replicas
    assert status(some, REPORT_EXPIRES_S + 0.1) is ModelStatus.LOADING


def test_a_failure_shows_only_while_nothing_answers() -> None:
    some = fleet()
    some.set_failure("org/m", "no memory")
    assert some.model_states(0)[0].status is ModelStatus.FAILED
    assert some.model_states(0)[0].message == "no memory"
    some.report(report(), 1)
    assert status(some, 1) is ModelStatus.DEGRADED


def test_names_that_would_share_an_application_conflict() -> None:
    some = fleet()
    for name in ("org/m", "org--m"):
        with pytest.raises(Conflict, match="already loaded"):
            some.add(MODEL.model_copy(update={"name": name}), 1)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    some = fleet()
    with pytest.raises(UnknownModel, match="org/m"):
        some.set_target("other", 1)
    with pytest.raises(NotFound, match="none"):
        some.set_draining("r9", True)


def test_draining_is_ordered_with_the_next_report_and_survives_a_new_controller() -> None:
    some = fleet()
    some.report(report(), 0)
    some.set_draining("r0", True)
    assert some.report(report(), 1).draining
    restarted = fleet()
    assert restarted.report(report(draining=True), 2).draining


def test_a_model_loaded_at_run_time_is_learned_from_its_replicas_after_a_restart() -> None:
    restarted = Fleet(DEVICES, drain_timeout_s=60)
    restarted.report(report(), 0)
    assert restarted.routes(0)[0].name == "org/m"


def test_unload_waits_for_what_runs_but_not_beyond_its_deadline() -> None:
    some = fleet(target=1)
    some.report(report(in_flight=1), 0)
    some.begin_unload("org/m", deadline=10)
    assert status(some, 0) is ModelStatus.UNLOADING
    orders = some.report(report(in_flight=1), 4)
    assert (orders.draining, orders.stop_timeout_s) == (True, 6)
    assert not some.unload_may_finish("org/m", 4)
    assert some.unload_may_finish("org/m", 10)
    some.report(report(in_flight=0), 5)
    assert some.unload_may_finish("org/m", 5)
    with pytest.raises(Conflict, match="already being unloaded"):
        some.begin_unload("org/m", deadline=20)
    some.remove("org/m")
    assert not some.routes(5)


def test_a_role_is_ordered_with_the_next_report_and_belongs_to_the_device() -> None:
    some = fleet()
    some.report(report("r0", "core0"), 0)
    some.set_role("r0", Role.PREFILL)
    assert some.report(report("r0", "core0"), 1).role is Role.PREFILL
    assert some.report(report("r1", "core1"), 1).role is Role.UNIFIED
    # The replica that takes its place starts with what the configuration says.
    assert some.report(report("r2", "core0"), 2).role is Role.PREFILL
    assert {r.id: r.role for r in some.model_states(2)[0].replicas}["r2"] is Role.PREFILL
    with pytest.raises(NotFound, match="r0"):
        some.set_role("r9", Role.DECODE)


def test_a_new_controller_leaves_replicas_in_the_roles_they_have() -> None:
    assert fleet().report(report(role=Role.DECODE), 0).role is Role.DECODE


def test_only_decode_replicas_hear_of_their_peers_and_of_their_roles_to_come() -> None:
    some = fleet()
    some.report(report("r0", "core0"), 0)
    some.set_role("r0", Role.PREFILL)
    assert not some.report(report("r1", "core1"), 1).peers
    some.set_role("r1", Role.DECODE)
    peers = {peer.id: peer for peer in some.report(report("r1", "core1"), 1).peers}
    assert peers["r0"].stats.role is Role.PREFILL
    some.set_draining("r0", True)
    peers = {peer.id: peer for peer in some.report(report("r1", "core1"), 2).peers}
    assert peers["r0"].stats.draining
    later = REPORT_EXPIRES_S + 1
    assert {peer.id for peer in some.report(report("r1", "core1"), later).peers} == {"r1"}
