"""Models on a GPU, whose weights are its host's while they sleep."""

from __future__ import annotations

import pytest

from loomserve.platform.elastic.policy.growth import grow
from loomserve.platform.elastic.policy.snapshot import HOST, ElasticSnapshot
from loomserve.platform.elastic.policy.victims import chosen_victims
from loomserve.platform.state import Presence
from tests.unit.platform.elastic.policy.models import RULES, changes, decided, model, on_gpu

READY, ASLEEP, UNLOADED = Presence.READY, Presence.ASLEEP, Presence.UNLOADED


@pytest.mark.parametrize(("host", "becomes"), [(None, ASLEEP), (5.0, ASLEEP), (4.0, UNLOADED)])
def test_one_whose_weights_the_host_cannot_hold_is_unloaded(
    host: float | None, becomes: Presence
) -> None:
    models = [on_gpu("a"), on_gpu("b"), on_gpu("c", UNLOADED)]
    (went,) = changes(decided(models, "c", host=host)).values()
    assert went is becomes


def test_a_core_has_no_other_host() -> None:
    models = [model("a"), model("b"), model("c", UNLOADED)]
    assert list(changes(decided(models, "c", host=0.0)).values()) == [ASLEEP]


def test_one_that_sleeps_ends_for_the_weights_of_one_that_goes_which_waits_for_that() -> None:
    long_away = on_gpu("old", ASLEEP, idle_s=900.0)
    models = [on_gpu("a", load_s=90.0), on_gpu("b", load_s=90.0), long_away, on_gpu("c", UNLOADED)]
    assert changes(decided(models, "c", budget=11.0, host=6.5)) == {"old": UNLOADED}
    ending = on_gpu("old", UNLOADED, settled=False, held_bytes=1.0, host_held_bytes=3.5)
    assert changes(decided([*models[:2], ending, models[3]], "c", budget=11.0, host=6.5)) == {}
    gone = [*models[:2], on_gpu("old", UNLOADED), models[3]]
    assert list(changes(decided(gone, "c", budget=11.0, host=6.5)).values()) == [ASLEEP]


def test_an_idle_one_stays_where_it_is_while_its_weights_have_no_other_place() -> None:
    idle = [on_gpu(name, sleep_after_s=10.0) for name in "ab"]
    assert changes(decided(idle, host=8.0)) == {"a": ASLEEP, "b": ASLEEP}
    assert changes(decided(idle, host=6.9)) == {"a": ASLEEP}
    assert changes(decided(idle, host=3.9)) == {}


def test_an_engine_for_which_the_host_has_no_memory_is_refused_with_that_reason() -> None:
    decision = decided([on_gpu("a", pinned=True), on_gpu("b", UNLOADED)], "b", host=0.9)
    (refused,) = decision.refused
    assert "the host of device d may give models" in refused.why
    assert "of a, which stays" in refused.why


def test_one_that_sleeps_is_unloaded_for_anothers_engine() -> None:
    models = [on_gpu("a", ASLEEP), on_gpu("b", UNLOADED)]
    assert changes(decided(models, "b", host=3.9)) == {"a": UNLOADED}
    assert changes(decided(models, "b", host=4.0)) == {"b": READY}


def test_waking_gives_the_host_its_memory_back() -> None:
    assert changes(decided([on_gpu("a", ASLEEP)], "a", host=3.5)) == {"a": READY}


def test_victims_take_the_room_that_is_there() -> None:
    models = [on_gpu("a"), on_gpu("b")]
    assert chosen_victims(models, {"d": 6.0, "d" + HOST: -6.0}) == {"a": ASLEEP, "b": ASLEEP}
    tight = chosen_victims(models, {"d": 6.0, "d" + HOST: -3.0})
    assert tight is not None
    assert sorted(tight.values()) == [ASLEEP, UNLOADED]


@pytest.mark.parametrize(("host", "goes"), [(9.0, ASLEEP), (1.5, UNLOADED)])
def test_a_further_replica_has_others_sleep_only_where_the_host_has_room(
    host: float, goes: Presence
) -> None:
    busy = on_gpu("busy", devices=("e",), idle_s=0.0)
    snapshot = ElasticSnapshot([busy, on_gpu("idle")], [], {"d": 6.0, "d" + HOST: host})
    (change,) = grow(snapshot, RULES, "busy", "d").changes
    assert (change.model, change.presence) == ("idle", goes)


def test_there_is_no_further_replica_for_which_the_host_has_no_memory() -> None:
    busy = on_gpu("busy", devices=("e",), idle_s=0.0)
    growth = grow(ElasticSnapshot([busy], [], {"d": 6.0, "d" + HOST: 0.4}), RULES, "busy", "d")
    assert not growth.fits
    assert not growth.changes
