"""First berths: never more than there is, the same each time, and a reason for whoever has none."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.placement.policy.berths import (
    Berth,
    Newcomer,
    NoBerth,
    Spot,
    Taken,
    first_berths,
    unplaced,
)

TWO_CORES = [Spot("core0", 10.0 * 2**30), Spot("core1", 10.0 * 2**30)]
GIB = float(2**30)


def model(name: str, size: float = 2.0, **rest: object) -> Newcomer:
    return Newcomer(name, size * GIB, **rest)  # type: ignore[arg-type]


def berths(*models: Newcomer, spots: list[Spot] = TWO_CORES) -> dict[str, Berth]:
    found = first_berths(models, spots, Taken())
    assert not unplaced(found)
    return {name: berth for name, berth in found.items() if isinstance(berth, Berth)}


def test_the_first_of_each_core_start_and_the_others_are_spread() -> None:
    found = berths(*(model(f"m{number}") for number in range(20)))
    assert [name for name, berth in found.items() if berth.starts] == ["m0", "m1"]
    assert Counter(berth.devices[0] for berth in found.values()) == {"core0": 10, "core1": 10}
    assert {berth.replicas for berth in found.values()} == {1}
    # Wherever it begins, it may come to the other one too.
    assert {frozenset(berth.devices) for berth in found.values()} == {frozenset(("core0", "core1"))}


def test_a_larger_model_weighs_as_many_smaller_ones() -> None:
    found = berths(
        *(model(name, start="on_demand") for name in "ab"),
        model("large", 6, start="on_demand"),
        *(model(name, start="on_demand") for name in "cde"),
    )
    on = {name: berth.devices[0] for name, berth in found.items()}
    assert on["large"] == "core0"
    assert [on[name] for name in "cde"] == ["core1"] * 3


def test_on_a_gpu_all_start_that_fit_in_the_order_of_the_file() -> None:
    gpu = [Spot("gpu0", 5 * GIB, cores=None)]
    found = berths(model("a"), model("b"), model("c"), spots=gpu)
    assert [berth.starts for berth in found.values()] == [True, True, False]
    assert "left nowhere" in found["c"].why


def test_where_there_are_gpus_models_are_on_them_if_they_fit() -> None:
    spots = [Spot("core0", 99 * GIB), Spot("gpu0", 5 * GIB, cores=None)]
    found = berths(model("a"), model("large", 50), spots=spots)
    assert {name: berth.devices for name, berth in found.items()} == {
        "a": ("gpu0",), "large": ("core0",),
    }  # fmt: skip


def test_devices_without_a_model_have_further_replicas() -> None:
    assert berths(model("a"))["a"].replicas == 2
    assert [berth.replicas for berth in berths(model("a"), model("b")).values()] == [1, 1]
    three = [*TWO_CORES, Spot("core2", 10 * GIB)]
    found = berths(model("a"), model("b"), spots=three)
    assert (found["a"].replicas, found["a"].devices[:2]) == (2, ("core0", "core2"))
    assert berths(model("a", replicas=1))["a"].replicas == 1
    assert berths(model("a", start="on_demand"))["a"].replicas == 1


def test_what_operators_say_wins() -> None:
    found = berths(
        model("a"), model("b"), model("now", start="now"), model("later", start="on_demand")
    )
    assert {name: berth.starts for name, berth in found.items()} == {
        "a": True, "b": True, "now": True, "later": False,
    }  # fmt: skip
    assert berths(model("two", replicas=2), model("b"))["two"].replicas == 2


@pytest.mark.parametrize(
    ("refused", "field", "why"),
    [
        (model("x", 11), "source", "no device may give models more than 10.0 GiB"),
        (model("x", replicas=3), "replicas", "3 replicas, one a device, and core0, core1"),
        (model("x", 9, start="now"), "start", "so much is left: core0 8.0 GiB, core1 8.0 GiB"),
    ],
)
def test_whoever_has_no_berth_hears_why(refused: Newcomer, field: str, why: str) -> None:
    found = first_berths([model("a"), model("b"), refused], TWO_CORES, Taken())
    (problem,) = unplaced(found).values()
    assert problem.field == field
    assert why in problem.why


def test_models_with_devices_have_taken_theirs() -> None:
    taken = Taken()
    taken.add("core0", 9 * GIB, starts=True)
    (berth,) = first_berths([model("a")], TWO_CORES, taken).values()
    assert isinstance(berth, Berth)
    assert (berth.devices[0], berth.starts) == ("core1", True)


newcomers = st.lists(
    st.builds(
        Newcomer,
        name=st.uuids().map(str),
        size=st.floats(0.1, 12.0),
        start=st.sampled_from(["auto", "now", "on_demand"]),
        replicas=st.sampled_from([None, None, 1, 2, 3]),
    ),
    max_size=12,
)
spots = st.lists(
    st.builds(
        Spot,
        name=st.uuids().map(str),
        memory=st.floats(0.5, 12.0),
        cores=st.sampled_from([None, 1, 2, 8]),
    ),
    min_size=1,
    max_size=5,
)


@given(newcomers, spots)
def test_berths_keep_what_they_promise(models: list[Newcomer], devices: list[Spot]) -> None:
    taken = Taken()
    found = first_berths(models, devices, taken)
    assert found == first_berths(models, devices, Taken())
    assert found.keys() == {each.name for each in models}
    memory = {each.name: each.memory for each in devices}
    gpus = {each.name for each in devices if each.is_gpu}
    used: Counter[str] = Counter()
    for each in models:
        berth = found[each.name]
        if isinstance(berth, NoBerth):
            assert berth.why
            continue
        assert berth.why
        assert 1 <= berth.replicas <= len(berth.devices) == len(set(berth.devices))
        assert all(each.size <= memory[name] for name in berth.devices)
        assert set(berth.devices) <= gpus or not set(berth.devices) & gpus
        assert each.start == "auto" or berth.starts == (each.start == "now")
        for name in berth.devices[: berth.replicas] if berth.starts else ():
            used[name] += each.size
    assert all(used[name] <= memory[name] * (1 + 1e-9) for name in used)
    assert {name: round(size, 6) for name, size in used.items()} == {
        name: round(size, 6) for name, size in taken.memory.items()
    }


@given(newcomers, spots, newcomers)
def test_models_at_the_end_of_the_file_move_nobody_before_them(
    models: list[Newcomer], devices: list[Spot], more: list[Newcomer]
) -> None:
    before = first_berths(models, devices, Taken())
    after = first_berths([*models, *more], devices, Taken())
    for name, berth in before.items():
        now = after[name]
        if isinstance(berth, NoBerth) or isinstance(now, NoBerth):
            assert berth == now
        else:
            assert (berth.devices[0], berth.starts) == (now.devices[0], now.starts)
