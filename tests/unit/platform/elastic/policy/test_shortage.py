"""Which replica gives its memory back."""

from __future__ import annotations

import random

import pytest

from loomserve.platform.config import Model
from loomserve.platform.elastic.policy.shortage import Holder, gives_back
from loomserve.platform.fleet.snapshot import Drains, FleetModel, ModelRecord, ReplicaRecord
from tests.unit.platform.fleet.heartbeats import footprint, report

DEVICES = ("core0", "core1", "core2")


def holder(
    name: str, size: int = 1, requests: int = 0, others: int = 0, *, may_go: bool = False
) -> Holder:
    """A replica beside idle ones of its model, which comes again when it is asked for, or not."""
    start = "on_demand" if may_go else "now"
    of = Model(name=name.replace(" ", "-"), source="demo", devices=DEVICES, start=start)
    replicas = [
        ReplicaRecord(told, 0.0, Drains())
        for told in (
            report(name, model=of, footprint=footprint(memory_bytes=size), in_flight=requests),
            *(report(f"{name} {n}", f"core{n + 1}", model=of) for n in range(others)),
        )
    ]
    return FleetModel(ModelRecord(of, len(replicas)), tuple(replicas)), replicas[0]


# The cheaper one first.
TABLE = [
    (holder("idle on demand", may_go=True), holder("spare", 9, others=1)),
    (holder("spare", others=1), holder("busy spare", 9, requests=3, others=1)),
    (holder("small spare", 1, others=2), holder("last idle", 9)),
    (holder("busy spare", requests=3, others=1), holder("last idle", 9)),
    (holder("busy on demand", requests=1, others=1, may_go=True), holder("last idle", 9)),
    (holder("last idle"), holder("last busy", 9, requests=1)),
    (holder("last idle"), holder("last busy on demand", 9, requests=1, may_go=True)),
    (holder("large", 9, others=1), holder("small", 8, others=1)),
    (holder("large", 9, 5), holder("small", 8, 1)),
    (holder("a"), holder("b")),
]


@pytest.mark.parametrize(("first", "second"), TABLE)
def test_the_one_whose_end_costs_least_goes(first: Holder, second: Holder) -> None:
    assert gives_back([first, second]) == gives_back([second, first]) == first


def test_the_last_one_with_requests_goes_if_nothing_else_is_left() -> None:
    last = holder("last", requests=9)
    assert gives_back([last]) == last
    assert gives_back([]) is None


def test_the_order_in_which_they_are_given_is_of_no_matter() -> None:
    chance = random.Random(1)
    some = [
        holder(str(n), chance.randrange(3), chance.randrange(2), chance.randrange(2))
        for n in range(40)
    ]
    chosen = gives_back(some)
    for _ in range(20):
        chance.shuffle(some)
        assert gives_back(some) == chosen
