"""Requests that go on with another replica of their model: how many, at what cost, and when not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loomserve.platform.base.errors import Conflict, NotFound
from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.rebalancing.plans.plans import spread
from loomserve.platform.rebalancing.policy.actions import ActionKind, Move, MoveRequests, kind_of
from loomserve.platform.rebalancing.policy.effects import apply
from loomserve.platform.rebalancing.policy.forecast import Corrections, Forecast, forecast
from loomserve.platform.rebalancing.policy.limits import Reason, unable
from loomserve.platform.rebalancing.policy.manual import manual
from loomserve.platform.rebalancing.policy.snapshot import (
    EngineSnapshot,
    MoveKind,
    Snapshot,
)
from loomserve.platform.state.roles import Role
from tests.unit.platform.rebalancing.fleets import (
    GIB,
    MIB,
    OPTIONS,
    carried_on,
    fleet,
    proposed,
)

NOT_LENDING = frozenset[MoveKind]()
RECOMPUTE_S = 1e-9


def replicas(
    *loads: tuple[float, float, int, int], parts: frozenset[MoveKind] = NOT_LENDING
) -> Snapshot:
    """Of one model, a device each: compute, share of KV used, requests that run and that wait."""
    snapshot = fleet([load[:2] for load in loads], parts)
    engines = tuple(
        replace(
            each,
            model="m",
            queue=running + waiting,
            waiting=waiting,
            max_running=64,
            recompute_s=RECOMPUTE_S,
        )
        for each, (*_, running, waiting) in zip(snapshot.engines, loads, strict=True)
    )
    model = replace(snapshot.models[0], name="m", replicas=len(engines))
    return replace(snapshot, engines=engines, models=(model,))


def edited(snapshot: Snapshot, engine: str, **changes: object) -> Snapshot:
    engines = tuple(
        replace(each, **changes) if each.id == engine else each  # type: ignore[arg-type]
        for each in snapshot.engines
    )
    return replace(snapshot, engines=engines)


TWO = replicas((0.9, 0.6, 12, 0), (0.1, 0.1, 1, 0))
SIX = MoveRequests(engine="m0", to="m1", requests=6)


def squares(snapshot: Snapshot) -> float:
    return sum(load**2 for load in snapshot.loads.values())


def totals(snapshot: Snapshot) -> list[float]:
    def both(value: str) -> float:
        return sum(float(getattr(each, value)) for each in snapshot.engines)

    return [both(each) for each in ("compute", "kv_used_bytes", "kv_growth", "queue")]


def test_requests_that_run_take_their_share_of_decoding_and_their_kv_along() -> None:
    after = apply(TWO, SIX)
    hot, cold = after.engines
    assert hot.attention == pytest.approx(TWO.engines[0].attention / 2)
    assert hot.linear == pytest.approx(TWO.engines[0].linear / 2)
    # Their prompts are computed, and others are still to come.
    assert hot.prefill == TWO.engines[0].prefill
    assert hot.kv_used_bytes == pytest.approx(0.3 * GIB, abs=1)
    assert cold.kv_used_bytes == pytest.approx(0.4 * GIB, abs=1)
    assert (hot.queue, cold.queue) == (6, 7)
    assert totals(after) == pytest.approx(totals(TWO), rel=1e-6)
    assert after.device("d0").allocated_bytes == TWO.device("d0").allocated_bytes


def test_requests_that_wait_come_first_take_prompts_along_and_have_no_kv() -> None:
    waiting = replicas((0.9, 0.6, 8, 4), (0.1, 0.1, 1, 0))
    hot, cold = apply(waiting, SIX.model_copy(update={"requests": 4})).engines
    assert hot.kv_used_bytes == waiting.engines[0].kv_used_bytes
    assert hot.prefill == pytest.approx(waiting.engines[0].prefill * 2 / 3)
    assert (hot.queue, hot.waiting, cold.waiting) == (8, 0, 0)
    hot, _ = apply(waiting, SIX).engines
    assert hot.kv_used_bytes == pytest.approx(0.6 * GIB * 6 / 8, abs=1)


def test_a_device_of_half_the_speed_is_busy_with_them_twice_as_long() -> None:
    slow = replace(TWO, devices=(TWO.devices[0], replace(TWO.devices[1], speed=0.5)))
    hot, cold = apply(slow, SIX).engines
    gone = TWO.engines[0].compute - hot.compute
    assert cold.compute - TWO.engines[1].compute == pytest.approx(2 * gone)


def cost(snapshot: Snapshot) -> Forecast:
    return forecast(snapshot, apply(snapshot, SIX), SIX, "d0", "d1")


def test_they_cost_their_kv_computed_again_or_loaded_and_halt_no_engine() -> None:
    again = cost(TWO)
    assert again.cost_s == again.duration_s == pytest.approx(0.3 * GIB * RECOMPUTE_S)
    assert again.pause_s == 0
    stores = edited(TWO, "m0", stores_kv=True)
    assert cost(stores).cost_s == pytest.approx(0.3 * GIB / 2e9)
    assert cost(replace(stores, links=())).cost_s == again.cost_s
    assert again.gain == pytest.approx(
        abs(TWO.loads["d0"] - TWO.loads["d1"])
        - abs(apply(TWO, SIX).loads["d0"] - apply(TWO, SIX).loads["d1"])
    )


def test_the_planner_moves_as_many_as_close_the_gap() -> None:
    proposal = proposed(TWO)
    (chosen,) = proposal.chosen
    assert isinstance(chosen.action, MoveRequests)
    assert kind_of(chosen.action) is ActionKind.RUNNING
    assert (chosen.action.engine, chosen.action.to) == ("m0", "m1")
    assert spread(proposal.after) < OPTIONS.falling
    loads = proposal.after.loads
    assert loads["d0"] >= loads["d1"]
    one_more = chosen.action.model_copy(update={"requests": chosen.action.requests + 1})
    later = apply(TWO, one_more).loads
    assert later["d0"] < later["d1"]


def test_the_cheaper_of_moving_requests_and_lending_their_kv_is_taken() -> None:
    lending = replicas((0.9, 0.6, 12, 0), (0.1, 0.1, 1, 0), parts=frozenset({MoveKind.REQUESTS}))

    def first(snapshot: Snapshot) -> object:
        return type(proposed(snapshot).chosen[0].action)

    assert first(edited(lending, "m1", recompute_s=1e-12)) is MoveRequests
    assert first(edited(lending, "m1", recompute_s=1e-8)) is Move


@pytest.mark.parametrize(
    ("engine", "changes", "reason"),
    [
        ("m1", {"model": "another"}, Reason.NOT_MOVABLE),
        ("m1", {"role": Role.DECODE}, Reason.NOT_MOVABLE),
        ("m1", {"draining": True}, Reason.NOT_MOVABLE),
        ("m1", {"max_running": 0}, Reason.NOT_MOVABLE),
        ("m0", {"queue": 5}, Reason.NOT_MOVABLE),
        ("m1", {"queue": 59}, Reason.NO_COMPUTE),
    ],
)
def test_they_stay_where_they_cannot_go_on(
    engine: str, changes: dict[str, object], reason: Reason
) -> None:
    assert unable(TWO, SIX, OPTIONS) is None
    refusal = unable(edited(TWO, engine, **changes), SIX, OPTIONS)
    assert refusal is not None
    assert refusal.reason is reason


def test_what_an_idle_replica_has_not_shown_is_taken_from_the_other_one() -> None:
    idle = edited(TWO, "m1", recompute_s=None)
    slow = replace(idle, devices=(idle.devices[0], replace(idle.devices[1], speed=0.5)))
    assert cost(slow).cost_s == pytest.approx(2 * 0.3 * GIB * RECOMPUTE_S)
    refusal = unable(edited(idle, "m0", recompute_s=None), SIX, OPTIONS)
    assert refusal is not None
    assert refusal.reason is Reason.NOT_MOVABLE


def test_they_move_between_replicas_that_decode_and_not_between_those_for_prompts() -> None:
    def both(role: Role) -> Snapshot:
        return edited(edited(TWO, "m0", role=role), "m1", role=role)

    assert unable(both(Role.DECODE), SIX, OPTIONS) is None
    assert unable(both(Role.PREFILL), SIX, OPTIONS) is not None


def test_they_stay_while_a_shard_of_one_of_the_replicas_is_away() -> None:
    three = replicas(*[(0.5, 0.4, 8, 0)] * 3, parts=frozenset(MoveKind))
    away = apply(three, Move(kind=MoveKind.HEADS, engine="m0", lender="m2", amount=1))
    refusal = unable(away, SIX, OPTIONS)
    assert refusal is not None
    assert refusal.reason is Reason.HAS_LOANS
    lent = apply(three, Move(kind=MoveKind.REQUESTS, engine="m0", lender="m2", amount=MIB))
    assert unable(lent, SIX, OPTIONS) is None


def test_no_more_move_than_the_cold_replica_has_room_for() -> None:
    for small, most in (
        (edited(TWO, "m1", max_running=4), 3),
        (edited(TWO, "m1", kv_used_bytes=int(0.75 * GIB)), 3),
    ):
        (action,) = (each.action for each in proposed(small).chosen)
        assert isinstance(action, MoveRequests)
        assert 0 < action.requests <= most
    full = edited(TWO, "m1", kv_used_bytes=int(0.88 * GIB))
    refused = Counter(each.reason for each in proposed(full).rejected)
    assert refused[Reason.NO_MEMORY] == 1


def test_a_move_that_takes_too_long_or_costs_too_much_is_not_made() -> None:
    for recompute_s, reason in ((1e-6, Reason.DURATION_BUDGET), (3e-7, Reason.INEFFICIENT)):
        proposal = proposed(edited(TWO, "m1", recompute_s=recompute_s))
        assert proposal.chosen == ()
        assert [
            each.reason for each in proposal.rejected if isinstance(each.action, MoveRequests)
        ] == [reason]


LOADS = st.tuples(
    st.floats(0.02, 1.2), st.floats(0.0, 0.85), st.integers(0, 40), st.integers(0, 20)
)
FLEETS = st.lists(LOADS, min_size=2, max_size=4)
PARTS = st.sampled_from([NOT_LENDING, frozenset({MoveKind.REQUESTS}), frozenset(MoveKind)])


def held(engine: EngineSnapshot) -> bool:
    figures = (engine.compute, engine.kv_used_bytes, engine.kv_growth, engine.waiting)
    return min(figures) >= -1e-9 and engine.waiting <= engine.queue


@settings(max_examples=40, deadline=None)
@given(FLEETS, PARTS)
def test_on_a_steady_load_plans_come_to_an_end_and_never_lead_back(
    loads: list[tuple[float, float, int, int]], parts: frozenset[MoveKind]
) -> None:
    history = carried_on(replicas(*loads, parts=parts), 8)
    moved: Counter[tuple[str, str]] = Counter()
    for before, proposal in history:
        now = before
        for each in proposal.chosen:
            after = apply(now, each.action)
            assert squares(after) < squares(now)
            assert max(after.loads.values()) < max(now.loads.values()) + 1e-9
            assert all(map(held, after.engines))
            if isinstance(action := each.action, MoveRequests):
                assert action.requests <= now.engine(action.engine).queue
                assert after.engine(action.to).queue <= 64
                assert totals(after) == pytest.approx(totals(now), rel=1e-6, abs=4)
                moved[action.engine, action.to] += 1
            now = after
    assert not any(proposal.chosen for _, proposal in history[-3:])
    assert not any((to, engine) in moved for engine, to in moved)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 4), st.floats(0.7, 0.95), st.floats(0.4, 0.7), st.integers(8, 40))
def test_a_hot_replica_among_cold_ones_is_relieved_within_four_periods(
    devices: int, compute: float, used: float, requests: int
) -> None:
    loads = [(compute, used, requests, 0), *[(0.1, 0.1, 1, 0)] * (devices - 1)]
    *_, (last, _) = carried_on(replicas(*loads), 5)
    assert spread(last) <= OPTIONS.rising


def by_hand(action: MoveRequests, options: Rebalancing = OPTIONS) -> object:
    return manual(TWO, [action], Corrections(), options, forced=False).chosen[0]


def test_an_operators_own_is_held_to_the_same_limits_and_not_to_a_gain() -> None:
    back = MoveRequests(engine="m1", to="m0", requests=1)
    chosen = manual(TWO, [back], Corrections(), OPTIONS, forced=False).chosen[0]
    assert (chosen.source, chosen.target) == ("d1", "d0")
    assert chosen.predicted.gain < 0
    with pytest.raises(Conflict, match="m0 has 12 requests"):
        by_hand(SIX.model_copy(update={"requests": 13}))
    with pytest.raises(NotFound):
        by_hand(SIX.model_copy(update={"to": "m9"}))
