"""One more replica of a model that is ready: where there is room, and who goes for it."""

from __future__ import annotations

from typing import Any

import pytest

from loomserve.platform.elastic.policy.growth import Growth, grow
from loomserve.platform.elastic.policy.snapshot import (
    ElasticModel,
    ElasticSnapshot,
    ModelDemand,
    PresenceChange,
)
from loomserve.platform.state import Presence
from tests.unit.platform.elastic.policy.models import RULES, model

# On another device, where it has a replica.
BUSY = model("busy", devices=("e",), idle_s=0.0)
WHY = "busy needs its memory for one more replica"


def grown(*there: ElasticModel, demands: tuple[str, ...] = (), budget: float = 6.0) -> Growth:
    asked = [ModelDemand(name, 1.0) for name in demands]
    snapshot = ElasticSnapshot([BUSY, *there], asked, {"d": budget, "e": 4.0})
    return grow(snapshot, RULES, "busy", "d")


def test_there_is_room_where_memory_is_free_or_has_no_bound() -> None:
    assert grown() == Growth(fits=True)
    assert grown(model("small", ready=2.0)) == Growth(fits=True)
    assert grow(ElasticSnapshot([BUSY, model("b")], [], {}), RULES, "busy", "d").fits


def test_an_idle_model_goes_for_it_by_what_costs_least() -> None:
    assert grown(model("idle")) == Growth(
        fits=False,
        changes=(PresenceChange("idle", Presence.ASLEEP, WHY),),
        why="idle makes room on d",
    )
    grown_full = grown(model("idle"), budget=4.0)
    assert [each.presence for each in grown_full.changes] == [Presence.UNLOADED]


@pytest.mark.parametrize(
    "changed",
    [
        {"idle_s": 0.0},
        # It merely has no request at this moment.
        {"idle_s": RULES.residence_s - 1},
        {"since_s": RULES.residence_s - 1},
        {"pinned": True},
        {"ready": 9.0, "held_bytes": 4.0, "settled": False},
    ],
    ids=str,
)
def test_no_other_that_is_ready_goes_for_it(changed: dict[str, Any]) -> None:
    found = grown(model("other", **changed))
    assert not found.fits
    assert not found.changes
    assert "other" in found.why


def test_what_requests_wait_for_is_not_taken() -> None:
    found = grown(model("away", Presence.UNLOADED), demands=("away",), budget=100.0)
    assert found == Growth(fits=False, why="requests wait for away on d")


def test_it_waits_for_those_that_are_going_already() -> None:
    going = model("going", Presence.UNLOADED, settled=False, held_bytes=4.0)
    assert grown(going) == Growth(fits=False, why="others are about to leave d")
