"""Who comes, who goes for whom, and who is refused."""

from __future__ import annotations

import pytest

from loomserve.platform.elastic.policy.decide import decide
from loomserve.platform.elastic.policy.snapshot import (
    ElasticDecision,
    ElasticModel,
    ElasticSnapshot,
    ModelDemand,
)
from loomserve.platform.state import Presence
from tests.unit.platform.elastic.policy.models import RULES, changes, decided, model

READY, ASLEEP, UNLOADED = Presence.READY, Presence.ASLEEP, Presence.UNLOADED


@pytest.mark.parametrize("presence", [ASLEEP, UNLOADED])
def test_a_model_with_room_comes_at_once(presence: Presence) -> None:
    assert changes(decided([model("a"), model("b", presence)], "b")) == {"b": READY}


def test_without_a_budget_there_is_always_room() -> None:
    models = [model("a"), model("b", UNLOADED, ready=2.0**60)]
    snapshot = ElasticSnapshot(models, [ModelDemand("b", 0)], {})
    assert changes(decide(snapshot, RULES)) == {"b": READY}


def test_an_idle_model_sleeps_for_another_which_comes_once_it_does() -> None:
    first = [model("a"), model("b"), model("c", UNLOADED)]
    assert changes(decided(first, "c")) in ({"a": ASLEEP}, {"b": ASLEEP})
    falling = [
        model("a", ASLEEP, settled=False, held_bytes=4.0), model("b"), model("c", UNLOADED)
    ]  # fmt: skip
    assert changes(decided(falling, "c")) == {}
    fallen = [model("a", ASLEEP), model("b"), model("c", UNLOADED)]
    assert changes(decided(fallen, "c")) == {"c": READY}


def test_where_sleep_does_not_free_enough_engines_end() -> None:
    models = [model("a", asleep=3.0), model("b", UNLOADED, ready=8.0)]
    assert changes(decided(models, "b")) == {"a": UNLOADED}


def test_a_model_that_cannot_sleep_is_unloaded() -> None:
    models = [model("a", can_sleep=False), model("b", UNLOADED, ready=8.0)]
    assert changes(decided(models, "b")) == {"a": UNLOADED}


@pytest.mark.parametrize(
    "stays", [{"idle_s": 0.0}, {"settled": False}], ids=lambda each: next(iter(each))
)
def test_one_with_requests_or_on_its_way_stays_and_the_other_waits(
    stays: dict[str, object],
) -> None:
    decision = decided([model("a", **stays), model("b", UNLOADED, ready=8.0)], "b")
    assert (decision.changes, decision.refused) == ((), ())
    late = decided([model("a", **stays), model("b", UNLOADED, ready=8.0)], "b", waited_s=59.0)
    assert "settled" not in stays or [each.model for each in late.refused] == ["b"]


def test_a_pinned_one_stays_and_the_other_is_refused() -> None:
    decision = decided([model("a", pinned=True), model("b", UNLOADED, ready=8.0)], "b")
    assert changes(decision) == {}
    (refused,) = decision.refused
    assert refused.model == "b"
    assert "of a, which stays" in refused.why


def test_one_that_always_has_requests_gives_way_to_who_has_waited_for_as_long_as_it_may_stay() -> (
    None
):
    models = [model("a", idle_s=0.0), model("b", UNLOADED, ready=8.0)]
    assert changes(decided(models, "b", waited_s=19.0)) == {}
    decision = decided(models, "b", waited_s=20.0)
    assert [(each.model, each.presence, each.drains) for each in decision.changes] == [
        ("a", ASLEEP, True)
    ]
    # It has been there for as long, too.
    young = [model("a", idle_s=0.0, since_s=5.0), model("b", UNLOADED, ready=8.0)]
    assert changes(decided(young, "b", waited_s=20.0)) == {}


def test_one_without_requests_goes_rather_than_one_that_has_some() -> None:
    models = [
        model("a", idle_s=0.0), model("b", returns_s=0.1), model("c", UNLOADED)
    ]  # fmt: skip
    decision = decided(models, "c", waited_s=30.0)
    assert [(each.model, each.drains) for each in decision.changes] == [("b", False)]


def test_one_that_gives_way_and_is_asked_for_meanwhile_comes_after_who_waits() -> None:
    models = [
        model("a", ASLEEP, settled=False, idle_s=0.0, held_bytes=8.0, ready=8.0),
        model("b", UNLOADED, ready=8.0),
    ]
    decision = decided(models, "b", "a")
    assert (decision.changes, decision.refused) == ((), ())


def spread(*models: ElasticModel, budget: float = 10.0) -> ElasticDecision:
    """Decide with a demand for ``new``, which may come to device ``d`` or ``e``."""
    new = model("new", UNLOADED, devices=("d",), choices=("d", "e"))
    budgets = {"d": budget, "e": budget}
    return decide(ElasticSnapshot([*models, new], [ModelDemand("new", 0)], budgets), RULES)


@pytest.mark.parametrize(
    ("models", "device"),
    [
        ([model("a")], "e"),  # which is empty
        ([model("a"), model("b", devices=("e",), heat=0.5)], "d"),  # where nobody is busy
        ([model("a"), model("b", devices=("e",), ready=5.0)], "d"),  # which is emptier
        ([model("a", heat=0.9), model("b", ASLEEP, devices=("e",), heat=0.1)], "e"),
    ],
)
def test_a_model_comes_to_the_device_with_least_to_do(
    models: list[ElasticModel], device: str
) -> None:
    (change,) = spread(*models).changes
    assert (change.model, change.presence, change.device) == ("new", READY, device)
    assert change.why_there.startswith(f"{device} has least to do (d: busy ")


def test_it_comes_where_whoever_goes_is_missed_least() -> None:
    on_d = [model("a", returns_s=60.0), model("b", idle_s=0.0)]
    on_e = [model("c", devices=("e",), returns_s=6000.0), model("f", devices=("e",), idle_s=0.0)]
    assert changes(spread(*on_d, *on_e)) == {"c": ASLEEP}
    # Once that one is on its way, there it is.
    falling = model("c", ASLEEP, devices=("e",), settled=False, held_bytes=4.0)
    assert changes(spread(*on_d, falling, on_e[1])) == {}
    (change,) = spread(*on_d, model("c", ASLEEP, devices=("e",)), on_e[1]).changes
    assert change.device == "e"


def test_who_waits_at_a_device_stays_there_whatever_else_gets_better() -> None:
    new = model("new", UNLOADED, choices=("d", "e"), ready=8.0)
    models = [model("a"), model("b", devices=("e",), heat=0.5), new]
    budgets = {"d": 10.0, "e": 10.0}

    def at(device: str | None) -> dict[str, Presence]:
        asked = [ModelDemand("new", 0, device)]
        decision = decide(ElasticSnapshot(models, asked, budgets), RULES)
        assert decision.waiting_at == {"new": device or "d"}
        return changes(decision)

    assert at(None) == {"a": ASLEEP}
    assert at("e") == {"b": ASLEEP}
    # But for one at which nobody can go any more.
    models[1] = model("b", devices=("e",), idle_s=0.0)
    asked = [ModelDemand("new", 0, "e")]
    assert changes(decide(ElasticSnapshot(models, asked, budgets), RULES)) == {"a": ASLEEP}


def test_it_does_not_come_where_it_never_fits() -> None:
    new = model("new", UNLOADED, choices=("d", "e"))
    snapshot = ElasticSnapshot([new], [ModelDemand("new", 0)], {"d": 3.0, "e": 5.0})
    (change,) = decide(snapshot, RULES).changes
    assert change.device == "e"
    snapshot = ElasticSnapshot([new], [ModelDemand("new", 0)], {"d": 3.0, "e": 3.0})
    assert "device d may give models" in decide(snapshot, RULES).refused[0].why


def test_two_that_come_at_once_do_not_meet() -> None:
    both = [model(name, UNLOADED, choices=("d", "e"), ready=6.0) for name in "ab"]
    asked = [ModelDemand(name, 0) for name in "ab"]
    decision = decide(ElasticSnapshot(both, asked, {"d": 10.0, "e": 10.0}), RULES)
    assert {each.model: each.device for each in decision.changes} == {"a": "d", "b": "e"}


def test_what_never_fits_is_refused_and_puts_nobody_away() -> None:
    decision = decided([model("a"), model("b", UNLOADED, ready=11.0)], "b")
    assert changes(decision) == {}
    assert "device d may give models" in decision.refused[0].why


def test_a_demand_waits_for_one_that_came_a_moment_ago_and_then_has_its_place() -> None:
    b = model("b", UNLOADED, ready=8.0)
    young = decided([model("a", since_s=5.0), b], "b")
    assert (changes(young), young.refused) == ({}, ())
    assert changes(decided([model("a", since_s=20.0), b], "b")) == {"a": ASLEEP}


def test_a_demand_that_would_wait_too_long_is_refused_with_the_time() -> None:
    decision = decided(
        [model("a", since_s=5.0), model("b", UNLOADED, ready=8.0)], "b", waited_s=50.0
    )
    assert [(each.model, each.retry_after_s) for each in decision.refused] == [("b", 15.0)]


def test_a_later_demand_does_not_take_what_an_earlier_one_waits_for() -> None:
    models = [
        model("a", ASLEEP, settled=False, held_bytes=8.0, ready=8.0),
        model("big", UNLOADED, ready=8.0),
        model("small", UNLOADED, ready=2.0),
    ]
    # There is room for the small one now, but then none for the big one.
    assert changes(decided(models, "big", "small")) == {}
    assert changes(decided(models, "small", "big")) == {"small": READY}


def test_nobody_who_is_asked_for_goes_for_another() -> None:
    models = [model("a", ASLEEP, asleep=4.0, ready=8.0), model("b", UNLOADED, ready=8.0)]
    assert changes(decided(models, "a", "b")) == {"a": READY}
    # Nor for one that came before it.
    assert changes(decided(models, "b", "a")) == {}


def test_idle_models_sleep_and_then_end() -> None:
    rules = {"sleep_after_s": 30.0, "unload_after_s": 60.0}
    assert changes(decided([model("a", idle_s=29.0, **rules)])) == {}
    assert changes(decided([model("a", idle_s=30.0, **rules)])) == {"a": ASLEEP}
    assert changes(decided([model("a", ASLEEP, idle_s=59.0, **rules)])) == {}
    assert changes(decided([model("a", ASLEEP, idle_s=60.0, **rules)])) == {"a": UNLOADED}
    assert changes(decided([model("a", idle_s=60.0, can_sleep=False, **rules)])) == {"a": UNLOADED}


def test_one_that_an_operator_woke_stays_for_as_long_as_after_a_request() -> None:
    woken = model("a", idle_s=1000.0, since_s=10.0, sleep_after_s=30.0)
    assert changes(decided([woken])) == {}


def test_pinned_models_are_never_idle_and_models_without_rules_stay() -> None:
    tired = {"idle_s": 9e9, "since_s": 9e9}
    models: list[ElasticModel] = [
        model("a", pinned=True, sleep_after_s=1.0, **tired), model("b", **tired)
    ]  # fmt: skip
    assert changes(decided(models)) == {}


def test_a_demand_for_an_unknown_or_ready_model_changes_nothing() -> None:
    decision = decided([model("a")], "gone", "a")
    assert (changes(decision), decision.refused) == ({}, ())
