"""The fleet's bookkeeping, driven with a clock of its own."""

from __future__ import annotations

import pytest

from loomserve.platform.base.errors import Conflict, NotFound, UnknownModel
from loomserve.platform.config import Device, Lending, Lengths, Model
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.messages import Heartbeat
from loomserve.platform.fleet.registry import HEARTBEAT_EXPIRES_S, SILENCE_ENDS_S
from loomserve.platform.state import (
    BorrowingState,
    LentState,
    LoanState,
    ModelStatus,
    ReplicaLoad,
    StageState,
)
from loomserve.platform.state.roles import Role
from loomserve.routers.snapshot import RoutingStats

DEVICES = (Device(name="core0", cores=(0,)), Device(name="core1", cores=(1,)))
MODEL = Model(name="org/m", source="demo", devices=("core0", "core1"))


def fleet(target: int = 2) -> Fleet:
    made = Fleet(DEVICES, drain_timeout_s=60)
    made.registry.add(MODEL, target)
    return made


def report(replica: str = "r0", device: str = "core0", **changes: object) -> Heartbeat:
    load = ReplicaLoad(running=0, waiting=0, kv_cache_usage=0, step_time_s=0, measured_at=0)
    values = {
        "model": MODEL, "replica_id": replica, "device": device, "address": "127.0.0.1:1",
        "pid": 1, "max_model_len": 64, "in_flight": 0,
    }  # fmt: skip
    stats = {"load": load, "max_running": 8, "kv_capacity_tokens": 64, "draining": False,
             "role": Role.UNIFIED}  # fmt: skip
    stats |= {name: changes.pop(name) for name in ("draining", "role") if name in changes}
    return Heartbeat(**{**values, **changes}, stats=RoutingStats(**stats))


def status(of: Fleet, now: float) -> ModelStatus:
    return of.views.models(now)[0].status


def test_a_model_goes_from_loading_over_degraded_to_ready_as_replicas_report() -> None:
    some = fleet()
    assert status(some, 0) is ModelStatus.LOADING
    some.report(report("r0"), 1)
    assert status(some, 1) is ModelStatus.DEGRADED
    some.report(report("r1", "core1"), 2)
    assert status(some, 2) is ModelStatus.READY
    assert [device.models for device in some.views.used_devices(2)] == [("org/m",), ("org/m",)]


def test_a_pipeline_shows_on_all_of_its_devices() -> None:
    some = fleet(target=1)
    stages = (StageState(device="core1", layers=9), StageState(device="core0", layers=21))
    some.report(report("r0", "core1", stages=stages), 1)
    assert status(some, 1) is ModelStatus.READY
    assert [device.models for device in some.views.used_devices(1)] == [("org/m",), ("org/m",)]
    assert some.views.models(1)[0].replicas[0].stages == stages


def test_requests_wait_for_a_silent_replica_only_where_there_is_no_other() -> None:
    some = fleet(target=1)
    some.report(report(), 0)
    later = HEARTBEAT_EXPIRES_S + 0.1
    assert [replica.id for replica in some.views.routes(later)[0].replicas] == ["r0"]
    assert not some.views.routes(SILENCE_ENDS_S)[0].replicas
    assert status(some, later) is ModelStatus.LOADING
    (state,) = some.views.models(HEARTBEAT_EXPIRES_S + 2)
    assert state.message.startswith("nothing was heard of its replicas for 12 s")
    some.report(report("r1", "core1"), later)
    assert [replica.id for replica in some.views.routes(later)[0].replicas] == ["r1"]


def test_a_replica_that_is_silent_for_long_is_forgotten() -> None:
    some = fleet(target=1)
    some.report(report(), 0)
    some.report(report("r1", "core1"), SILENCE_ENDS_S)
    with pytest.raises(NotFound, match="the replicas are: r1"):
        some.registry.set_draining("r0", True)


def test_a_failure_shows_only_while_nothing_answers() -> None:
    some = fleet()
    some.registry.set_failure("org/m", "no memory")
    assert some.views.models(0)[0].status is ModelStatus.FAILED
    assert some.views.models(0)[0].message == "no memory"
    some.report(report(), 1)
    assert status(some, 1) is ModelStatus.DEGRADED


def test_names_that_would_share_an_application_conflict() -> None:
    some = fleet()
    for name in ("org/m", "org--m"):
        with pytest.raises(Conflict, match="already loaded"):
            some.registry.add(MODEL.model_copy(update={"name": name}), 1)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    some = fleet()
    with pytest.raises(UnknownModel, match="org/m"):
        some.registry.set_target("other", 1)
    with pytest.raises(NotFound, match="none"):
        some.registry.set_draining("r9", True)


def test_draining_is_ordered_with_the_next_report_and_survives_a_new_controller() -> None:
    some = fleet()
    some.report(report(), 0)
    some.registry.set_draining("r0", True)
    assert some.report(report(), 1).draining
    restarted = fleet()
    assert restarted.report(report(draining=True), 2).draining


def test_a_model_loaded_at_run_time_is_learned_from_its_replicas_after_a_restart() -> None:
    restarted = Fleet(DEVICES, drain_timeout_s=60)
    restarted.report(report(), 0)
    assert restarted.views.routes(0)[0].name == "org/m"


def test_unload_waits_for_what_runs_but_not_beyond_its_deadline() -> None:
    some = fleet(target=1)
    some.report(report(in_flight=1), 0)
    some.registry.begin_unload("org/m", deadline=10)
    assert status(some, 0) is ModelStatus.UNLOADING
    desired = some.report(report(in_flight=1), 4)
    assert (desired.draining, desired.stop_timeout_s) == (True, 6)
    assert not some.registry.unload_may_finish("org/m", 4)
    assert some.registry.unload_may_finish("org/m", 10)
    some.report(report(in_flight=0), 5)
    assert some.registry.unload_may_finish("org/m", 5)
    with pytest.raises(Conflict, match="already being unloaded"):
        some.registry.begin_unload("org/m", deadline=20)
    some.registry.remove("org/m")
    assert not some.views.routes(5)


def test_a_role_is_ordered_with_the_next_report_and_belongs_to_the_device() -> None:
    some = fleet()
    some.report(report("r0", "core0"), 0)
    some.registry.set_role("r0", Role.PREFILL)
    assert some.report(report("r0", "core0"), 1).role is Role.PREFILL
    assert some.report(report("r1", "core1"), 1).role is Role.UNIFIED
    # The replica that takes its place starts with what the configuration says.
    assert some.report(report("r2", "core0"), 2).role is Role.PREFILL
    assert {r.id: r.role for r in some.views.models(2)[0].replicas}["r2"] is Role.PREFILL
    with pytest.raises(NotFound, match="r0"):
        some.registry.set_role("r9", Role.DECODE)


def test_a_new_controller_leaves_replicas_in_the_roles_they_have() -> None:
    assert fleet().report(report(role=Role.DECODE), 0).role is Role.DECODE


def test_only_decode_replicas_hear_of_their_peers_and_of_their_roles_to_come() -> None:
    some = fleet()
    some.report(report("r0", "core0"), 0)
    some.registry.set_role("r0", Role.PREFILL)
    assert not some.report(report("r1", "core1"), 1).peers
    some.registry.set_role("r1", Role.DECODE)
    peers = {peer.id: peer for peer in some.report(report("r1", "core1"), 1).peers}
    assert peers["r0"].stats.role is Role.PREFILL
    some.registry.set_draining("r0", True)
    peers = {peer.id: peer for peer in some.report(report("r1", "core1"), 2).peers}
    assert peers["r0"].stats.draining
    later = HEARTBEAT_EXPIRES_S + 1
    assert {peer.id for peer in some.report(report("r1", "core1"), later).peers} == {"r1"}


HOT = Model(name="org/hot", source="demo", devices=("core0",), lending={"borrow_memory": 2**30})
COLD = Model(
    name="org/cold", source="demo", devices=("core0", "core1"), lending={"lend_memory": 2**20}
)


def lending_fleet() -> Fleet:
    """A borrower on core0 beside one lender's replica, whose other one is on core1."""
    some = Fleet(DEVICES, drain_timeout_s=60)
    for model in (HOT, COLD):
        some.registry.add(model, 1)
    some.report(report("c0", "core0", model=COLD, address="127.0.0.1:10"), 0)
    some.report(report("c1", "core1", model=COLD, address="127.0.0.1:11"), 0)
    return some


def loan(lender_replica: str, name: str = "loan-1", borrower_replica: str = "h0") -> LoanState:
    return LoanState(
        name=name, borrower=HOT.name, borrower_replica=borrower_replica, lender=COLD.name,
        lender_replica=lender_replica, draining=False, phase="open", most_tokens=9, age_s=1,
        usable_blocks=4, free_blocks=1, requests=1, tasks=1,
        wait_mean_us=1, wait_max_us=1, wait_share=0.1, service_share=0.1,
    )  # fmt: skip


def borrowing(*loans: LoanState, **changes: object) -> Heartbeat:
    values: dict[str, object] = {"own_blocks": 8, "own_free_blocks": 1, "broken": {},
                                 "problems": {}, "switched_off": ()}  # fmt: skip
    state = BorrowingState.model_validate({**values, **changes, "loans": loans})
    return report("h0", "core0", model=HOT, address="127.0.0.1:20", borrowing=state)


def lenders(of: Fleet, now: float, *loans: LoanState) -> list[str]:
    return [lender.id for lender in of.report(borrowing(*loans), now).lenders]


def test_a_borrower_hears_of_a_lender_on_another_device_of_its_node() -> None:
    some = lending_fleet()
    (lender,) = some.report(borrowing(), 1).lenders
    assert (lender.model, lender.id, lender.address) == ("org/cold", "c1", "127.0.0.1:11")
    some.report(report("c1", "core1", model=COLD, address="10.0.0.2:11"), 2)
    assert lenders(some, 2) == []


def test_lenders_that_drain_unload_or_report_no_more_lend_nothing() -> None:
    some = lending_fleet()
    some.registry.set_draining("c1", True)
    assert lenders(some, 1) == []
    some.registry.set_draining("c1", False)
    assert lenders(some, 1) == ["c1"]
    assert lenders(some, HEARTBEAT_EXPIRES_S + 1) == []
    some.report(report("c1", "core1", model=COLD), 9)
    assert lenders(some, 9) == ["c1"]
    some.registry.begin_unload(COLD.name, deadline=60)
    assert lenders(some, 9) == []


def test_a_lender_hears_of_its_loans_only_while_their_borrower_lives() -> None:
    some = lending_fleet()
    some.report(borrowing(loan("c1")), 1)
    assert some.report(report("c1", "core1", model=COLD), 1).loans == ("loan-1",)
    assert some.report(report("c0", "core0", model=COLD), 1).loans == ()
    later = HEARTBEAT_EXPIRES_S + 2
    assert some.report(report("c1", "core1", model=COLD), later).loans == ()


def test_of_a_models_replicas_the_one_in_use_lends_or_else_the_least_asked() -> None:
    devices = (*DEVICES, Device(name="core2", cores=(2,)), Device(name="core3", cores=(3,)))
    some = Fleet(devices, drain_timeout_s=60)
    many = {"devices": tuple(device.name for device in devices)}
    for model in (HOT.model_copy(update=many), COLD.model_copy(update=many)):
        some.registry.add(model, 2)
    for number in (1, 2, 3):
        some.report(report(f"c{number}", f"core{number}", model=COLD), 0)
    assert lenders(some, 0) == ["c1"]
    assert lenders(some, 0, loan("c3")) == ["c3"]
    other = borrowing(loan("c1", "loan-2", "h1"))
    some.report(other.model_copy(update={"replica_id": "h1", "device": "core2"}), 0)
    assert lenders(some, 0) == ["c2"]


def test_replicas_of_one_model_have_parts_of_one_another_and_only_if_ordered() -> None:
    devices = (*DEVICES, Device(name="core2", cores=(2,)))
    some = Fleet(devices, drain_timeout_s=60)
    both = Lending(borrow_memory=2**30, lend_memory=2**20)
    names = tuple(device.name for device in devices)
    model = HOT.model_copy(update={"lending": both, "devices": names})
    some.registry.add(model, 3)
    for number in (1, 2):
        some.report(report(f"h{number}", f"core{number}", model=model), 0)
    me = borrowing().model_copy(update={"model": model})
    assert not some.report(me, 0).lenders
    records = {each.heartbeat.replica_id: each.shard_lenders for each in some.engine_records(0)}
    assert records == {"h0": {"h1", "h2"}, "h1": {"h0", "h2"}, "h2": {"h0", "h1"}}
    some.loans.move_shard("h0", model.name, {"heads": 1}, "core2")
    desired = some.report(me, 0)
    assert [lender.id for lender in desired.lenders] == ["h2"]
    assert desired.shards == {model.name: {"heads": 1}}
    some.loans.move_shard("h0", model.name, None)
    assert not some.report(me, 0).lenders


def test_a_pair_that_is_switched_off_has_no_lender_until_it_is_switched_on() -> None:
    some = lending_fleet()
    some.loans.set_pair("org/hot/org/cold", False)
    desired = some.report(borrowing(), 1)
    assert (desired.lenders, desired.lenders_off) == ((), ("org/cold",))
    # A replica that is started anew hears the same.
    anew = borrowing().model_copy(update={"replica_id": "h1"})
    assert some.report(anew, 1).lenders_off == ("org/cold",)
    assert [pair.enabled for pair in some.loans.state(1).pairs] == [False]
    some.loans.set_pair("org/hot/org/cold", True)
    assert lenders(some, 1) == ["c1"]
    with pytest.raises(NotFound, match="the pairs are: org/hot/org/cold"):
        some.loans.set_pair("org/cold/org/hot", False)


def test_a_new_controller_learns_from_a_borrower_which_pairs_are_off() -> None:
    restarted = lending_fleet()
    desired = restarted.report(borrowing(switched_off=("org/cold",)), 1)
    assert desired.lenders_off == ("org/cold",)
    restarted.loans.set_pair("org/hot/org/cold", True)
    # The borrower has not heard of it yet.
    assert not restarted.report(borrowing(switched_off=("org/cold",)), 2).lenders_off


def test_a_loan_is_drained_by_order_to_its_borrower() -> None:
    some = lending_fleet()
    some.report(borrowing(loan("c1")), 1)
    with pytest.raises(NotFound, match="the loans are: loan-1"):
        some.loans.drain("loan-2", 1)
    some.loans.drain("loan-1", 1)
    assert some.report(borrowing(loan("c1")), 2).drain_loans == ("loan-1",)
    assert not some.report(borrowing(loan("c1", "loan-2")), 3).drain_loans


def test_loans_of_a_lender_that_is_unloaded_drain_at_once() -> None:
    some = lending_fleet()
    some.report(report("c1", "core1", model=COLD), 1)
    assert not some.report(borrowing(loan("c1")), 2).drain_loans
    some.registry.begin_unload(COLD.name, deadline=10)
    assert some.report(borrowing(loan("c1")), 3).drain_loans == ("loan-1",)


def test_loans_of_a_lender_that_has_not_reported_stay_as_they_are() -> None:
    some = lending_fleet()
    assert not some.report(borrowing(loan("c1")), 1).drain_loans


def test_unload_waits_for_what_a_lender_has_lent() -> None:
    some = lending_fleet()
    lent = LentState(name="loan-1", lender=COLD.name, lender_replica="c1", borrower=HOT.name,
                     blocks=2, most_blocks=4, taken_back_blocks=0)  # fmt: skip
    some.report(report("c1", "core1", model=COLD, lent=(lent,)), 1)
    some.registry.begin_unload(COLD.name, deadline=10)
    assert not some.registry.unload_may_finish(COLD.name, 2)
    assert some.registry.unload_may_finish(COLD.name, 10)
    some.report(report("c1", "core1", model=COLD), 3)
    assert some.registry.unload_may_finish(COLD.name, 3)


def test_the_state_of_lending_shows_budgets_pairs_loans_and_why_there_is_none() -> None:
    some = lending_fleet()
    some.report(borrowing(loan("c1")), 1)
    state = some.loans.state(1)
    hot, cold = state.models
    assert (hot.borrow_memory, hot.lend_memory, hot.tpot_budget) == (2**30, None, None)
    assert (cold.borrow_memory, cold.lend_memory, cold.tpot_budget) == (None, 2**20, 1.15)
    (pair,) = state.pairs
    assert (pair.borrower, pair.lender, pair.problem) == ("org/hot", "org/cold", None)
    assert [loan.name for loan in state.loans] == ["loan-1"]
    some.report(borrowing(problems={"org/cold": "nothing is left"}), 2)
    assert some.loans.state(2).pairs[0].problem == "nothing is left"
    some.registry.set_draining("c1", True)
    some.report(borrowing(), 3)
    problem = some.loans.state(3).pairs[0].problem
    assert problem is not None
    assert "no other device of core0's node" in problem


def test_the_batch_lane_hears_of_live_replicas_as_they_will_be() -> None:
    some = fleet()
    assert some.views.engines(0).models["org/m"].replicas == ()
    some.report(report("r0"), 1)
    some.report(report("r1", "core1"), 1)
    some.registry.set_draining("r1", True)
    model = some.views.engines(1).models["org/m"]
    assert model.max_model_len == 64
    assert {peer.id: peer.stats.draining for peer in model.replicas} == {"r0": False, "r1": True}
    assert some.views.engines(1 + HEARTBEAT_EXPIRES_S).models["org/m"].replicas == ()
    some.registry.begin_unload("org/m", 60)
    assert some.views.engines(1).models["org/m"].replicas == ()


def test_a_limit_of_loans_belongs_to_the_device_and_survives_a_new_controller() -> None:
    some = lending_fleet()
    some.report(borrowing(), 1)
    some.loans.limit("h0", "org/cold", 300)
    assert some.report(borrowing(), 2).lender_limits == {"org/cold": 300}
    restarted = lending_fleet()
    assert restarted.report(borrowing(limits={"org/cold": 300}), 3).lender_limits == {
        "org/cold": 300
    }
    restarted.loans.limit("h0", "org/cold", None)
    # It reports what it was told before.
    assert not restarted.report(borrowing(limits={"org/cold": 300}), 4).lender_limits


def test_those_who_move_work_see_live_engines_with_lenders_and_limits() -> None:
    some = lending_fleet()
    some.report(borrowing(loan("c1")), 1)
    some.loans.limit("h0", "org/cold", 300)
    records = {each.heartbeat.replica_id: each for each in some.engine_records(1)}
    assert [lender.id for lender in records["h0"].lenders] == ["c1"]
    assert records["h0"].shard_lenders == {"c1"}
    assert records["h0"].limits == {"org/cold": 300}
    assert not records["c1"].lenders
    some.registry.begin_unload("org/cold", deadline=9)
    assert some.registry.targets() == {"org/hot": 1}


def test_an_operator_that_lets_a_pair_borrow_lifts_the_limits_of_plans() -> None:
    some = lending_fleet()
    some.report(borrowing(), 1)
    some.loans.limit("h0", "org/cold", 0)
    (pair,) = some.loans.state(1).pairs
    assert pair.limits == {"core0": 0}
    assert "a plan moved home" in (pair.problem or "")
    some.loans.set_pair("org/hot/org/cold", True)
    (pair,) = some.loans.state(1).pairs
    assert (pair.limits, pair.problem) == ({}, None)


def test_the_batch_lane_hears_what_predicts_a_models_lengths() -> None:
    some = fleet()
    some.registry.add(
        HOT.model_copy(update={"lending": None, "lengths": Lengths(predictor="hot-v1")}), 1
    )
    found = some.views.engines(0).models
    assert (found["org/m"].predictor, found["org/hot"].predictor) == (None, "hot-v1")
