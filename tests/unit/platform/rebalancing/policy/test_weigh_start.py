"""A start by load beside what the planner would move meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from loomserve.platform.rebalancing.policy.actions import AddReplica
from loomserve.platform.rebalancing.policy.forecast import Corrections
from loomserve.platform.rebalancing.policy.limits import Reason, Refusal
from loomserve.platform.rebalancing.policy.measured import Flaw, Measured, Unfit
from loomserve.platform.rebalancing.policy.planner import weigh_start
from loomserve.platform.rebalancing.policy.snapshot import Snapshot
from tests.unit.platform.rebalancing.fleets import (
    GIB,
    MIB,
    OPTIONS,
    engine,
    fleet,
    proposed,
)

START = AddReplica(model="m0", device="d1")
START_S = 20.0


def scaled(*loads: tuple[float, float], **changes: Any) -> Snapshot:
    """A fleet whose first model is scaled by its load, and takes so long to start."""
    made = fleet(list(loads))
    given = {"replica": engine("m0", "d0", 0, 0), "start_s": START_S, "replica_bytes": 512 * MIB}
    model = replace(made.models[0], scaled=True, **{**given, **changes})
    return replace(made, models=(model, *made.models[1:]))


def weighed(
    snapshot: Snapshot | None, *flaws: Flaw, moves: bool = True, short_s: float = 2.0
) -> Refusal | None:
    measured = Measured(snapshot, flaws)
    return weigh_start(measured, Corrections(), OPTIONS, moves, START, short_s)


# Its attention can be computed by the other device within milliseconds.
EASED = scaled((0.9, 0.6), (0.05, 0.1))


def test_what_moves_sooner_holds_a_start_for_as_long_as_that_would_take() -> None:
    assert proposed(EASED).chosen, "the planner has something to move"
    held = weighed(EASED)
    assert held is not None
    assert held.reason is Reason.CHEAPER
    assert f"{START_S:.1f} s" in held.detail
    assert weighed(EASED, short_s=START_S) is None


def test_a_plan_that_nobody_carries_out_holds_nothing() -> None:
    assert weighed(EASED, moves=False) is None


def test_a_start_that_takes_no_longer_is_not_held() -> None:
    assert weighed(scaled((0.9, 0.6), (0.05, 0.1), start_s=0.001), short_s=0.0) is None


def test_what_does_not_carry_the_load_holds_nothing() -> None:
    assert weighed(scaled((2.5, 0.6), (0.05, 0.1))) is None


def test_without_a_measurement_that_is_fit_nothing_speaks_against_it() -> None:
    assert weighed(None, Flaw(Unfit.PARTIAL, "profile")) is None
    assert weighed(EASED, Flaw(Unfit.PARTIAL, "r")) is None
    assert weighed(replace(EASED, at_s=1000.0)) is None


@pytest.mark.parametrize("moves", [True, False])
def test_the_planners_own_limit_of_memory_holds(moves: bool) -> None:
    full = scaled((0.9, 0.6), (0.9, 0.6), replica_bytes=2 * GIB)
    refused = weighed(full, moves=moves)
    assert refused is not None
    assert refused.reason is Reason.NO_MEMORY


def test_plans_do_not_change_the_replicas_of_a_model_that_is_scaled() -> None:
    still = fleet([(0.9, 0.1), (0.0, 0.0)], frozenset())
    model = replace(
        still.models[0], replica=engine("m0", "d0", 0, 0), replica_bytes=512 * MIB, start_s=1.0
    )
    free = replace(still, models=(model, *still.models[1:]))
    assert [each.action for each in proposed(free).chosen] == [START]
    bound = replace(still, models=(replace(model, scaled=True), *still.models[1:]))
    assert proposed(bound).chosen == ()
