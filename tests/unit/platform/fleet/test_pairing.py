"""Pairs that traffic makes: who is hot borrows from who is cold, and for no longer than needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.config import Model
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.lending_pairs import lending_options, paired
from loomserve.platform.fleet.messages import Heartbeat
from loomserve.platform.fleet.snapshot import Drains, FleetModel, ModelRecord, ReplicaRecord
from loomserve.platform.state import BorrowingState, Presence, ReplicaLoad
from tests.unit.platform.fleet.heartbeats import DEVICES, loan, report


def seat(
    name: str,
    usage: float = 0.0,
    idle_s: float = 60.0,
    waiting: int = 0,
    device: str = "",
    node: str = "n",
    model: str = "",
    requests_away: int = 0,
    may_lend: bool = True,
) -> FleetModel:
    """A model with one replica."""
    of = Model(name=model or name, source="demo", devices=("core0", "core1", "core2"))
    load = ReplicaLoad(
        running=0, waiting=waiting, kv_cache_usage=usage, step_time_s=0, measured_at=0,
        idle_s=idle_s,
    )  # fmt: skip
    blocks = {"own_blocks": 100_000, "own_free_blocks": round(100_000 * (1 - usage))}
    loans = [loan("r").model_copy(update={"requests": requests_away})] if requests_away else []
    said = BorrowingState.model_validate(
        {**blocks, "loans": loans, "broken": {}, "problems": {}, "switched_off": ()}
    )
    told = report(
        name, device or ("core0" if name < "m" else "core1"), model=of, address=f"{name}.{node}",
        load=load, borrowing=said,
    )  # fmt: skip
    stays = Presence.READY if may_lend else Presence.ASLEEP
    record = ModelRecord(of, 1, presence=stays)
    return FleetModel(record, (ReplicaRecord(told, 0.0, Drains()),))


HOT = seat("hot", 0.95, 0.0, waiting=4)
WARM = seat("warm", 0.6, 0.0)
COLD = seat("zold")


def test_who_is_hot_borrows_from_who_is_cold() -> None:
    assert paired([HOT, WARM, COLD], {}) == {"hot": "zold"}
    assert paired([WARM, COLD], {}) == {}
    assert paired([HOT, WARM], {}) == {}


def test_a_queue_makes_who_is_half_full_hot() -> None:
    assert paired([seat("half", 0.6, 0.0, waiting=1), COLD], {}) == {"half": "zold"}
    # So much is free that what waits does so for another reason.
    assert paired([seat("half", 0.4, 0.0, waiting=9), COLD], {}) == {}


def test_the_coldest_lends_to_the_hottest() -> None:
    other, colder = seat("i", 0.9, 0.0), seat("x", 0.1)
    assert paired([other, HOT, COLD], {}) == {"hot": "zold"}
    assert paired([HOT, colder, COLD], {}) == {"hot": "zold"}
    assert paired([other, HOT, colder, COLD], {}) == {"hot": "zold", "i": "x"}


def test_nobody_lends_on_the_borrower_s_device_or_to_himself_or_while_he_goes() -> None:
    for unfit in (
        seat("zold", device="core0"),
        seat("zold", node="other"),
        seat("zold", model="hot"),
        seat("zold", may_lend=False),
        seat("zold", idle_s=1.0),
    ):
        assert paired([HOT, unfit], {}) == {}
    assert paired([HOT, COLD], {}, {("hot", "zold")}) == {}


def test_a_pair_stays_until_neither_needs_it() -> None:
    pair = {"hot": "zold"}
    cooler = seat("hot", 0.6, 0.0)
    busier = seat("zold", 0.6, 0.0)
    assert paired([cooler, busier], pair) == pair
    assert paired([seat("hot", 0.2, 0.0), busier], pair) == {}
    assert paired([seat("hot", 0.2, 0.0, requests_away=1), busier], pair) == pair
    assert paired([cooler, seat("zold", 0.8, 0.0)], pair) == {}
    assert paired([cooler], pair) == {}
    assert paired([cooler, busier], pair, {("hot", "zold")}) == {}


seats = st.lists(
    st.builds(
        seat,
        name=st.sampled_from("abcdefgh"),
        model=st.sampled_from("ijklm"),
        device=st.sampled_from(["core0", "core1", "core2"]),
        node=st.sampled_from(["n", "n", "o"]),
        usage=st.floats(0, 1),
        waiting=st.integers(0, 3),
        idle_s=st.floats(0, 60),
        requests_away=st.integers(0, 1),
        may_lend=st.booleans(),
    ),
    unique_by=lambda each: each.replicas[0].id,
)


@given(seats, st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from("abcdefgh")))
def test_each_is_in_one_pair_and_a_second_look_changes_nothing(
    seated: list[FleetModel], before: dict[str, str]
) -> None:
    # Replicas of one model are of one record.
    records = {each.name: each.record for each in seated}
    models = [FleetModel(records[each.name], each.replicas) for each in seated]
    found = paired(models, before)
    assert len({*found, *found.values()}) == 2 * len(found)
    by_id = {model.replicas[0].id: model for model in models}
    for borrower, lender in found.items():
        (one,), (other,) = by_id[borrower].replicas, by_id[lender].replicas
        assert one.device != other.device
        assert one.node == other.node
        assert one.model.name != other.model.name
        assert by_id[lender].record.stays
    assert paired(models, found) == found
    assert paired(models[::-1], before) == found


MODELS = {
    name: Model(name=name, source="demo", devices=(device,), lending={"auto": True})
    for name, device in (("busy", "core0"), ("still", "core1"))
}


def beat(name: str, usage: float, idle_s: float) -> Heartbeat:
    load = ReplicaLoad(
        running=0, waiting=0, kv_cache_usage=usage, step_time_s=0, measured_at=0, idle_s=idle_s
    )
    (device,) = MODELS[name].devices
    return report(name, device, model=MODELS[name], address=f"{name}.127.0.0.1", load=load)


def test_a_fleet_pairs_models_that_leave_it_to_traffic() -> None:
    fleet = Fleet(DEVICES, drain_timeout_s=60)
    for model in MODELS.values():
        fleet.registry.add(model, 1)
    fleet.report(beat("still", 0.0, 60.0), 0)
    assert fleet.report(beat("busy", 0.2, 0.0), 0).lenders == ()
    (lender,) = fleet.report(beat("busy", 0.95, 0.0), 2).lenders
    assert (lender.id, lender.model, lender.address) == ("still", "still", "still.127.0.0.1")
    assert fleet.report(beat("still", 0.0, 60.0), 2).lenders == ()
    (pair,) = fleet.loans.state(2).pairs
    assert (pair.borrower, pair.lender, pair.enabled) == ("busy", "still", True)
    assert {each.lend_memory for each in fleet.loans.state(2).models} == {512 * 2**20}
    # An operator may keep them apart.
    fleet.loans.set_pair("busy/still", False)
    assert fleet.report(beat("busy", 0.95, 0.0), 4).lenders == ()
    assert [each.enabled for each in fleet.loans.state(4).pairs] == [False]
    fleet.loans.set_pair("busy/still", True)
    assert len(fleet.report(beat("busy", 0.95, 0.0), 6).lenders) == 1


def test_their_engines_can_do_both_with_one_other() -> None:
    options = lending_options(MODELS["busy"], MODELS.values())
    assert options is not None
    assert (options.borrow_bytes, options.lend_bytes, options.lenders) == (2**29, 2**29, 1)
    assert options.polling == "operators"
