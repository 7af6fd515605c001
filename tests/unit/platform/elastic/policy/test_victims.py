"""Whose absence costs least."""

from __future__ import annotations

from loomserve.platform.elastic.policy.victims import chosen_victims
from loomserve.platform.state import Presence
from tests.unit.platform.elastic.policy.models import model

ASLEEP, UNLOADED = Presence.ASLEEP, Presence.UNLOADED


def test_the_one_that_is_not_asked_for_longest_goes() -> None:
    models = [model("a", idle_s=10.0), model("b", idle_s=500.0), model("c", idle_s=20.0)]
    assert chosen_victims(models, {"d": 2.0}) == {"b": ASLEEP}


def test_one_that_comes_back_rarely_goes_before_one_that_was_used_before_it() -> None:
    models = [
        model("often", idle_s=30.0, returns_s=10.0),
        model("rare", idle_s=5.0, returns_s=900.0),
    ]
    assert chosen_victims(models, {"d": 2.0}) == {"rare": ASLEEP}


def test_one_that_takes_long_to_come_back_stays() -> None:
    models = [model("slow", ASLEEP, load_s=90.0), model("fast", ASLEEP, load_s=3.0)]
    assert chosen_victims(models, {"d": 0.5}) == {"fast": UNLOADED}


def test_only_those_on_the_device_go_and_no_more_than_needed() -> None:
    models = [model("here"), model("there", devices=("e",)), model("both", devices=("d", "e"))]
    assert chosen_victims(models, {"d": 2.0}) in ({"here": ASLEEP}, {"both": ASLEEP})
    assert chosen_victims(models, {"d": 2.0, "e": 2.0}) == {"both": ASLEEP}


def test_two_sleep_before_one_ends_and_one_ends_where_two_sleeping_do_not_do() -> None:
    models = [model("a"), model("b")]
    assert chosen_victims(models, {"d": 6.0}) == {"a": ASLEEP, "b": ASLEEP}
    seven = chosen_victims(models, {"d": 7.0})
    assert seven is not None
    assert sorted(seven.values()) == [ASLEEP, UNLOADED]


def test_there_may_not_be_enough() -> None:
    assert chosen_victims([model("a"), model("b")], {"d": 8.1}) is None
    assert chosen_victims([], {"d": 1.0}) is None
    assert chosen_victims([model("a")], {}) == {}
