"""Records of models and replicas, driven with a clock of the test's own."""

from __future__ import annotations

import pytest

from loomserve.platform.base.errors import Conflict, NotFound, UnknownModel
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.registry import SILENCE_ENDS_S
from loomserve.platform.state import (
    LentState,
    ModelStatus,
)
from tests.unit.platform.fleet.heartbeats import (
    COLD,
    DEVICES,
    HOT,
    MODEL,
    fleet,
    lending_fleet,
    report,
    status,
)


def test_a_replica_that_is_silent_for_long_is_forgotten() -> None:
    some = fleet(target=1)
    some.report(report(), 0)
    some.report(report("r1", "core1"), SILENCE_ENDS_S)
    with pytest.raises(NotFound, match="the replicas are: r1"):
        some.registry.set_draining("r0", True)


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


def test_a_model_loaded_at_run_time_is_known_after_a_restart() -> None:
    restarted = Fleet(DEVICES, drain_timeout_s=60)
    restarted.restore(fleet(target=1).wishes())
    restarted.report(report(), 0)
    assert restarted.views.routes(0)[0].name == "org/m"
    assert status(restarted, 0) is ModelStatus.READY


def test_the_last_words_of_an_unloaded_models_replica_do_not_bring_the_model_back() -> None:
    some = fleet(target=1)
    some.report(report(), 0)
    some.registry.remove("org/m")
    desired = some.report(report(), 1)
    assert (desired.draining, desired.stop_timeout_s) == (True, 0)
    assert not some.views.routes(1)


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
