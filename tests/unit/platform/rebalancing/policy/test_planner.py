"""The planner: what it does to skewed loads, and that it lets balanced ones alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.rebalancing.plans.plans import spread
from loomserve.platform.rebalancing.policy.actions import (
    ActionKind,
    AddReplica,
    Move,
    RemoveReplica,
    SetRole,
)
from loomserve.platform.rebalancing.policy.candidates import candidates
from loomserve.platform.rebalancing.policy.effects import apply
from loomserve.platform.rebalancing.policy.forecast import MOST, Corrections, Forecast
from loomserve.platform.rebalancing.policy.heat import Heat, classify
from loomserve.platform.rebalancing.policy.limits import Reason, unable
from loomserve.platform.rebalancing.policy.measured import Flaw, Unfit
from loomserve.platform.rebalancing.policy.planner import propose
from loomserve.platform.rebalancing.policy.snapshot import (
    ModelSnapshot,
    MoveKind,
    Snapshot,
    memory_share,
)
from loomserve.platform.state.roles import Role
from tests.unit.platform.rebalancing.fleets import (
    GIB,
    MIB,
    OPTIONS,
    carried_on,
    engine,
    fleet,
    measured_at,
    noisy,
    proposed,
)

LOADS = st.tuples(st.floats(0.02, 1.2), st.floats(0.0, 0.85))
FLEETS = st.lists(LOADS, min_size=2, max_size=4)
PARTS = st.sets(st.sampled_from(MoveKind)).map(frozenset)
SKEWED = fleet([(0.9, 0.8), (0.1, 0.1)])


def reasons(snapshot: Snapshot, options: Rebalancing = OPTIONS) -> Counter[Reason]:
    return Counter(each.reason for each in proposed(snapshot, options).rejected)


def test_a_skewed_load_is_evened_out_by_the_cheapest_actions_first() -> None:
    proposal = proposed(SKEWED)
    assert proposal.chosen
    assert proposal.flaws == ()
    assert spread(proposal.after) <= OPTIONS.falling < OPTIONS.rising < spread(SKEWED)
    first = proposal.chosen[0]
    assert (first.source, first.target) == ("d0", "d1")
    # Layers take all of their work along, so they move more with a byte, unless they are large.
    assert isinstance(first.action, Move)
    assert first.action.kind is MoveKind.LAYERS
    large = proposed(edited(layer_bytes=64 * MIB)).chosen[0].action
    assert isinstance(large, Move)
    assert large.kind is not MoveKind.LAYERS


def test_layers_move_where_nothing_else_can() -> None:
    proposal = proposed(fleet([(0.9, 0.8), (0.1, 0.1)], frozenset({MoveKind.LAYERS})))
    assert [each.action.kind for each in proposal.chosen if isinstance(each.action, Move)] == [
        MoveKind.LAYERS
    ]
    assert spread(proposal.after) < OPTIONS.falling


@pytest.mark.parametrize(("lent", "moves"), [(4 * GIB, False), (16 * MIB, True)])
def test_no_part_moves_where_its_engine_would_lose_as_much_memory_with_the_lender(
    lent: int, moves: bool
) -> None:
    hot, cold = fleet(
        [(0.9, 0.8), (0.1, 0.1)], frozenset({MoveKind.HEADS, MoveKind.LAYERS})
    ).engines
    borrows = replace(hot, borrowed=((cold.id, lent),))
    proposal = proposed(replace(SKEWED, engines=(borrows, cold)))
    assert bool(proposal.chosen) is moves
    refused = [each for each in proposal.rejected if "borrows what" in each.detail]
    assert bool(refused) is not moves


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 0.19), min_size=2, max_size=5), LOADS, PARTS)
def test_balanced_loads_are_let_alone(
    off: list[float], load: tuple[float, float], parts: frozenset[MoveKind]
) -> None:
    snapshot = fleet([(load[0] + 2 * each, load[1]) for each in off], parts)
    proposal = proposed(snapshot)
    assert proposal.chosen == ()
    assert proposal.after == snapshot


def squares(snapshot: Snapshot) -> float:
    return sum(load**2 for load in snapshot.loads.values())


@settings(max_examples=20, deadline=None)
@given(FLEETS, PARTS)
def test_on_a_steady_load_plans_come_to_an_end_and_never_lead_back(
    loads: list[tuple[float, float]], parts: frozenset[MoveKind]
) -> None:
    history = carried_on(fleet(loads, parts), 8)
    for before, proposal in history:
        if proposal.chosen:
            assert squares(proposal.after) < squares(before)
            assert max(proposal.after.loads.values()) < max(before.loads.values()) + 1e-9
    assert not any(proposal.chosen for _, proposal in history[-3:])


@settings(max_examples=20, deadline=None)
@given(FLEETS, PARTS)
def test_plans_exceed_neither_memory_nor_the_pause_budget(
    loads: list[tuple[float, float]], parts: frozenset[MoveKind]
) -> None:
    start = fleet(loads, parts)
    for before, proposal in carried_on(start, 4):
        after = proposal.after
        for device in after.devices:
            assert device.allocated_bytes <= 0.9 * device.memory_bytes
            assert 0 <= memory_share(after, device.name) <= 1
        for each in after.engines:
            least = min(before.idle_kv(before.engine(each.id)), OPTIONS.headroom * each.kv_bytes)
            assert after.idle_kv(each) >= least - 1
            assert sum(map(after.kept_for, after.loans_at(each.id))) <= each.lend_bytes
            assert each.layers >= 1
            assert each.heads >= 1
            pauses = (
                chosen.predicted.pause_s
                for chosen in proposal.chosen
                if isinstance(chosen.action, Move)
                and each.id in (chosen.action.engine, chosen.action.lender)
            )
            assert 1000 * sum(pauses) <= OPTIONS.pause_budget_ms
    total = sum(each.layers for each in start.engines)
    lent = sum(loan.amount for loan in after.loans if loan.kind is MoveKind.LAYERS)
    assert total == sum(each.layers for each in after.engines) + lent


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 6), st.floats(0.7, 0.95), st.floats(0.5, 0.8), st.integers(0, 5))
def test_a_hot_device_among_cold_ones_is_relieved_within_four_periods(
    devices: int, compute: float, used: float, hot: int
) -> None:
    loads = [(0.1, 0.1)] * devices
    loads[hot % devices] = (compute, used)
    *_, (last, _) = carried_on(fleet(loads), 5)
    assert spread(last) <= OPTIONS.rising


@settings(max_examples=15, deadline=None)
@given(st.lists(LOADS, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_noise_below_a_quarter_of_the_hysteresis_never_moves_work_back(
    loads: list[tuple[float, float]], random: object
) -> None:
    snapshot = fleet(loads)
    options = OPTIONS.model_copy(update={"rising": 0.6, "falling": 0.2})
    heat: dict[str, Heat] = {}
    for period in range(12):
        snapshot = measured_at(snapshot, 10.0 * period)
        off = {each.name: random.uniform(-0.05, 0.05) for each in snapshot.devices}  # type: ignore[attr-defined]
        seen = noisy(snapshot, off)
        heat = classify(heat, seen.loads, options)
        chosen = propose(seen, heat, Corrections(), options).chosen
        for each in chosen:
            snapshot = apply(snapshot, each.action)
        assert not any(isinstance(each.action, Move) and each.action.back for each in chosen)


def test_what_was_lent_comes_home_when_the_load_turns() -> None:
    lent = proposed(SKEWED).after
    turned = replace(
        lent,
        engines=tuple(
            replace(each, linear=0.05, prefill=0.02, attention=0.02)
            if each.id == "m0"
            else replace(each, linear=0.7)
            for each in lent.engines
        ),
    )
    proposal = proposed(turned)
    assert any(isinstance(each.action, Move) and each.action.back for each in proposal.chosen)
    assert spread(proposal.after) < spread(turned)


def edited(**changes: object) -> Snapshot:
    engines = tuple(replace(each, **changes) for each in SKEWED.engines)  # type: ignore[arg-type]
    return replace(SKEWED, engines=engines)


def options(**changes: object) -> Rebalancing:
    return OPTIONS.model_copy(update=changes)


@pytest.mark.parametrize(
    ("snapshot", "settings_", "reason"),
    [
        (edited(movable=frozenset()), OPTIONS, Reason.NOT_MOVABLE),
        (replace(SKEWED, links=()), OPTIONS, Reason.NO_LINK),
        (
            replace(
                SKEWED,
                links=tuple(replace(each, measured_at_s=-1e6) for each in SKEWED.links),
            ),
            OPTIONS,
            Reason.NO_LINK,
        ),
        (edited(lend_bytes=0), OPTIONS, Reason.NOT_MOVABLE),
        (edited(borrow_bytes=0), OPTIONS, Reason.NOT_MOVABLE),
        (edited(tpot_s=1e-5), OPTIONS, Reason.TPOT_BUDGET),
        (SKEWED, options(duration_budget_s=1e-3), Reason.DURATION_BUDGET),
        (SKEWED, options(efficiency=1e6), Reason.INEFFICIENT),
        (SKEWED, options(least_gain=1.9), Reason.NO_GAIN),
    ],
)
def test_every_candidate_that_is_not_taken_has_its_reason(
    snapshot: Snapshot, settings_: Rebalancing, reason: Reason
) -> None:
    proposal = proposed(snapshot, settings_)
    assert proposal.chosen == ()
    assert set(reasons(snapshot, settings_)) == {reason}


def test_heads_and_layers_halt_their_engines_and_requests_do_not() -> None:
    slow = proposed(edited(sync_s=1.0))
    assert {each.action.kind for each in slow.chosen if isinstance(each.action, Move)} == {
        MoveKind.REQUESTS
    }
    refused = {each.reason for each in proposed(edited(sync_s=1.0, kv_used_bytes=0)).rejected}
    assert Reason.PAUSE_BUDGET in refused


def test_requests_go_only_where_their_engine_has_a_limit_to_be_raised() -> None:
    assert set(
        reasons(edited(movable=frozenset({MoveKind.REQUESTS}), lenders=frozenset()), OPTIONS)
    ) == {Reason.NOT_MOVABLE}
    lenders = frozenset({"m1", "m2", "m3"})
    proposal = proposed(edited(movable=frozenset({MoveKind.REQUESTS}), lenders=lenders))
    assert proposal.chosen


def test_heads_and_layers_go_only_to_engines_that_may_have_them() -> None:
    move = Move(kind=MoveKind.HEADS, engine="m0", lender="m1", amount=1)
    for may, refused in ((None, False), (frozenset({"m1"}), False), (frozenset({"m2"}), True)):
        refusal = unable(edited(shard_lenders=may), move, OPTIONS)
        assert (refusal is not None) is refused
        assert refusal is None or refusal.reason is Reason.NOT_MOVABLE


def test_of_a_models_replicas_any_may_go_but_the_last_ones() -> None:
    base = fleet([(0.9, 0.9), (0.1, 0.1)])
    first, second = (replace(each, model="m") for each in base.engines)
    model = ModelSnapshot(
        name="m", devices=("d0", "d1"), replicas=2, replica_bytes=GIB, replica=first
    )
    both = replace(base, engines=(first, second), models=(model,))
    for each in ("m0", "m1"):
        assert unable(both, RemoveReplica(engine=each), OPTIONS) is None
    for action, now in (
        (RemoveReplica(engine="m1"), replace(both, models=(replace(model, least=2),))),
        (AddReplica(model="m", device="d1"), replace(both, engines=(second,))),
    ):
        refusal = unable(now, action, OPTIONS)
        assert refusal is not None
        assert refusal.reason is Reason.NOT_MOVABLE


@pytest.mark.parametrize(
    ("cold", "taken"),
    [
        (0.2, True),
        # Half of the device would not do for it.
        (0.6, False),
    ],
)
def test_a_swamped_model_gets_a_replica_beside_one_that_needs_little(
    cold: float, taken: bool
) -> None:
    base = fleet([(4.0, 0.3), (cold, 0.1)], parts=frozenset())
    swamped = base.engines[0]
    nothing = replace(swamped, prefill=0.0, attention=0.0, linear=0.0, kv_used_bytes=0, queue=0)
    may_grow = replace(base.models[0], replica=nothing)
    proposal = proposed(replace(base, models=(may_grow, *base.models[1:])))
    found = [each.action for each in proposal.chosen]
    assert found == ([AddReplica(model="m0", device="d1")] if taken else [])
    refused = {each.reason for each in proposal.rejected}
    assert (Reason.NO_COMPUTE in refused) is not taken


def test_of_an_engine_one_part_is_away_and_comes_home_as_a_whole() -> None:
    three = fleet([(0.9, 0.8), (0.05, 0.1), (0.05, 0.1)])
    out = Move(kind=MoveKind.LAYERS, engine="m0", lender="m1", amount=6)
    away = apply(three, out)
    for action, reason in (
        (out, Reason.HAS_LOANS),
        (Move(kind=MoveKind.HEADS, engine="m0", lender="m2", amount=1), Reason.HAS_LOANS),
        (out.model_copy(update={"amount": 3, "back": True}), Reason.NOT_MOVABLE),
    ):
        refusal = unable(away, action, OPTIONS)
        assert refusal is not None
        assert refusal.reason is reason
    assert unable(away, out.model_copy(update={"back": True}), OPTIONS) is None
    homes = [
        action
        for action in candidates(away, away, "d1", "d0", OPTIONS)
        if isinstance(action, Move) and action.back
    ]
    assert homes == [out.model_copy(update={"back": True})]


def test_a_full_plan_and_a_lender_that_borrows_are_reasons_too() -> None:
    one_hot = fleet([(0.9, 0.8), (0.05, 0.1), (0.05, 0.1)])
    assert reasons(one_hot, options(most_actions=1))[Reason.PLAN_FULL]
    three = fleet([(0.9, 0.8), (0.05, 0.1), (0.1, 0.7)])
    loan = Move(kind=MoveKind.HEADS, engine="m1", lender="m2", amount=2)
    borrowing = apply(three, loan)
    assert reasons(borrowing)[Reason.HAS_LOANS]


@pytest.mark.parametrize(
    ("kind", "amount", "share"),
    [
        (MoveKind.HEADS, 1, 1 / 4),
        (MoveKind.LAYERS, 6, 6 / 30),
        (MoveKind.LAYERS, 12, 15 / 30),  # two blocks abreast, and 6 layers empty
        (MoveKind.LAYERS, 16, 1.0),
    ],
)
def test_a_part_has_room_for_all_blocks_of_its_engine(
    kind: MoveKind, amount: int, share: float
) -> None:
    away = apply(SKEWED, Move(kind=kind, engine="m0", lender="m1", amount=amount))
    (loan,) = away.loans_at("m1")
    assert away.kept_for(loan) == pytest.approx(share * GIB)
    assert loan.kv_bytes < away.kept_for(loan)


@pytest.mark.parametrize(("kind", "most"), [(MoveKind.HEADS, 1), (MoveKind.LAYERS, 7)])
def test_no_more_of_a_part_moves_than_its_lender_has_room_for(kind: MoveKind, most: int) -> None:
    small = edited(lend_bytes=GIB // 4, movable=frozenset({kind}))
    moves = [each.action for each in proposed(small).chosen]
    assert moves
    assert all(isinstance(move, Move) and move.amount <= most for move in moves)


def test_each_action_is_checked_against_the_state_after_those_before_it() -> None:
    """Two hot devices and one cold one, whose memory has room for the borrowers of one."""
    snapshot = fleet([(0.9, 0.5), (0.9, 0.5), (0.05, 0.05)])
    small = replace(snapshot.engine("m2"), lend_bytes=60 * MIB)
    snapshot = replace(snapshot, engines=(*snapshot.engines[:2], small))
    proposal = proposed(snapshot, options(tpot_budget=10.0, most_actions=10))
    assert proposal.chosen
    borrowers = proposal.after.loans_at("m2")
    assert sum(loan.kv_bytes for loan in borrowers) <= 60 * MIB
    assert reasons(snapshot, options(tpot_budget=10.0, most_actions=10))[Reason.NO_MEMORY]


@pytest.mark.parametrize(
    ("damage", "flaw"),
    [
        (lambda s: replace(s, at_s=11.0), Flaw(Unfit.STALE, "d0")),
        (lambda s: replace(s, at_s=-1.0), Flaw(Unfit.STALE, "d0")),
        (lambda s: replace(s, engines=s.engines[:1]), Flaw(Unfit.PARTIAL, "m1")),
        (lambda s: replace(s, devices=s.devices[:1]), Flaw(Unfit.EMPTY, "devices")),
        (lambda s: replace(s, models=s.models[:1]), Flaw(Unfit.PARTIAL, "m1")),
        (lambda s: replace(s, changed_at_s=5.0), Flaw(Unfit.SETTLING, "d0")),
        (
            lambda s: replace(
                apply(s, Move(kind=MoveKind.HEADS, engine="m0", lender="m1", amount=1)),
                engines=s.engines[:1],
            ),
            Flaw(Unfit.PARTIAL, "m1"),
        ),
    ],
)
def test_stale_or_partial_snapshots_give_no_plan(
    damage: Callable[[Snapshot], Snapshot], flaw: Flaw
) -> None:
    proposal = proposed(damage(SKEWED))
    assert (proposal.chosen, proposal.rejected) == ((), ())
    assert flaw in proposal.flaws


def two_replicas(first: Role, second: Role) -> Snapshot:
    """Of one model with roles, one device with all the work of its phase."""
    snapshot = fleet([(0.0, 0.8), (0.0, 0.0)], frozenset())
    a, b = snapshot.engines
    model = replace(
        snapshot.models[0], replicas=2, roles=True, replica=engine("m0", "d0", 0, 0), start_s=5.0
    )
    return replace(
        snapshot,
        models=(model,),
        engines=(
            replace(a, role=first, prefill=0.0, attention=0.5, linear=0.3),
            replace(b, id="m0b", model="m0", role=second, prefill=0.05),
        ),
    )


def test_a_role_changes_where_one_phase_has_all_the_work() -> None:
    proposal = proposed(two_replicas(Role.DECODE, Role.PREFILL), options(efficiency=1e-3))
    assert [type(each.action) for each in proposal.chosen] == [SetRole]
    assert spread(proposal.after) < 0.4
    assert sum(each.compute for each in proposal.after.engines) == pytest.approx(0.85)


def test_a_replica_is_added_on_a_cold_device_and_removed_from_a_hot_one() -> None:
    snapshot = fleet([(0.9, 0.8), (0.0, 0.0)], frozenset())
    model = replace(
        snapshot.models[0],
        replica=replace(engine("m0", "d0", 0, 0), movable=frozenset()),
        start_s=5.0,
        replica_bytes=GIB + GIB // 8,
    )
    snapshot = replace(snapshot, models=(model, *snapshot.models[1:]))
    proposal = proposed(snapshot)
    assert [each.action for each in proposal.chosen] == [AddReplica(model="m0", device="d1")]
    added = proposal.after
    assert len(added.of("m0")) == added.model("m0").replicas == 2
    busy = tuple(replace(each, linear=0.7) if each.id == "m1" else each for each in added.engines)
    later = proposed(replace(added, engines=busy))
    assert [each.action for each in later.chosen] == [RemoveReplica(engine="m0@d1")]
    assert later.after.device("d1").allocated_bytes == snapshot.device("d1").allocated_bytes


def test_a_replica_without_memory_for_it_is_not_added() -> None:
    snapshot = fleet([(0.9, 0.8), (0.0, 0.0)], frozenset())
    model = replace(
        snapshot.models[0], replica=engine("m0", "d0", 0, 0), replica_bytes=int(1.7 * GIB)
    )
    assert reasons(replace(snapshot, models=(model, *snapshot.models[1:])))[Reason.NO_MEMORY] == 1


def test_corrections_decide_what_is_cheapest_and_what_fits_the_budget() -> None:
    heat = classify({}, SKEWED.loads, OPTIONS)
    cheapest = propose(SKEWED, heat, Corrections(), OPTIONS).chosen[0]
    assert isinstance(cheapest.action, Move)
    kind = ActionKind(cheapest.action.kind.value)
    predicted = Forecast(gain=1, cost_s=1, pause_s=0.001, duration_s=1)
    slow = Forecast(gain=1, cost_s=1, pause_s=1, duration_s=1)
    corrections = Corrections()
    for _ in range(50):
        corrections = corrections.learn(kind, "d0", "d1", predicted, slow)
    assert corrections.of(kind, "d0", "d1").pause_s == pytest.approx(MOST, rel=1e-3)
    tight = options(pause_budget_ms=3000 * cheapest.predicted.pause_s)
    again = propose(SKEWED, heat, corrections, tight)
    assert all(
        each.action.kind is not cheapest.action.kind
        for each in again.chosen
        if isinstance(each.action, Move)
    )
    alone = edited(movable=frozenset({cheapest.action.kind}))
    assert any(
        each.reason is Reason.PAUSE_BUDGET
        for each in propose(alone, heat, corrections, tight).rejected
        if isinstance(each.action, Move) and each.action.kind is cheapest.action.kind
    )
