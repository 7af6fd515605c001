"""Which replicas lend to which."""

from __future__ import annotations

import pytest

from loomserve.platform.base.errors import NotFound
from loomserve.platform.config import Device, Lending
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.registry import HEARTBEAT_EXPIRES_S
from loomserve.platform.state import Presence
from tests.unit.platform.fleet.heartbeats import (
    COLD,
    DEVICES,
    HOT,
    borrowing,
    lenders,
    lending_fleet,
    loan,
    report,
)


def test_a_borrower_hears_of_a_lender_on_another_device_of_its_node() -> None:
    some = lending_fleet()
    (lender,) = some.report(borrowing(), 1).lenders
    assert (lender.model, lender.id, lender.address) == ("org/cold", "c1", "engine-11.127.0.0.1")
    some.report(report("c1", "core1", model=COLD, address="engine-11.10.0.0.2"), 2)
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
    replicas = some.registry.snapshot(0).replicas
    records = {each.id: some.loans.shard_lenders(each, 0) for each in replicas}
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


def test_a_new_controller_knows_which_pairs_are_off() -> None:
    some = lending_fleet()
    some.loans.set_pair("org/hot/org/cold", False)
    restarted = Fleet(DEVICES, drain_timeout_s=60)
    restarted.restore(some.wishes())
    desired = restarted.report(borrowing(), 1)
    assert desired.lenders_off == ("org/cold",)
    restarted.loans.set_pair("org/hot/org/cold", True)
    again = Fleet(DEVICES, drain_timeout_s=60)
    again.restore(restarted.wishes())
    # The borrower has not heard of it yet.
    assert not again.report(borrowing(switched_off=("org/cold",)), 2).lenders_off


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
    hot, cold = (some.registry.live_replica(each, 1) for each in ("h0", "c1"))
    assert [lender.id for lender in some.loans.lenders(hot, 1)] == ["c1"]
    assert some.loans.shard_lenders(hot, 1) == {"c1"}
    assert some.loans.limits("h0") == {"org/cold": 300}
    assert not list(some.loans.lenders(cold, 1))
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


def test_nobody_borrows_from_one_that_is_to_sleep_and_who_sleeps_borrows_nothing() -> None:
    some = lending_fleet()
    assert lenders(some, 1) == ["c1"]
    some.registry.set_presence(COLD.name, Presence.ASLEEP, 1, "")
    assert lenders(some, 1) == []
    assert some.report(borrowing(loan("c1")), 1).drain_loans == ("loan-1",)
    some.registry.set_presence(COLD.name, Presence.READY, 2, "")
    assert lenders(some, 2) == ["c1"]
    some.registry.replica("c1").note_asleep(True)
    assert lenders(some, 2) == []
    some.registry.replica("c1").note_asleep(False)
    some.registry.set_presence(HOT.name, Presence.ASLEEP, 3, "")
    assert lenders(some, 3) == []
