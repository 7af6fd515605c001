"""Heartbeats, and the desired states that answer them."""

from __future__ import annotations

import pytest

from loomserve.platform.base.errors import NotFound
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.state.roles import Role
from tests.unit.platform.fleet.heartbeats import DEVICES, fleet, report


def test_draining_is_ordered_with_the_next_report_and_survives_a_new_controller() -> None:
    some = fleet()
    some.report(report(), 0)
    some.registry.set_draining("r0", True)
    assert some.report(report(), 1).draining
    restarted = Fleet(DEVICES, drain_timeout_s=60)
    restarted.restore(some.wishes())
    assert restarted.report(report(draining=True), 2).draining
    restarted.registry.set_draining("r0", False)
    again = Fleet(DEVICES, drain_timeout_s=60)
    again.restore(restarted.wishes())
    # The replica has not heard of it yet.
    assert not again.report(report(draining=True), 3).draining


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
