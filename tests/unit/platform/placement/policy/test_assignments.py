"""First assignments: never more than there is, the same each time, and a reason for none."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.placement.policy.assignments import (
    DeviceAssignment,
    Newcomer,
    NotAssigned,
    Spot,
    Taken,
    first_assignments,
    unplaced,
)

TWO_CORES = [Spot("core0", 10.0 * 2**30), Spot("core1", 10.0 * 2**30)]
GIB = float(2**30)


def model(name: str, size: float = 2.0, **rest: object) -> Newcomer:
    return Newcomer(name, size * GIB, **rest)  # type: ignore[arg-type]


def assignments(*models: Newcomer, spots: list[Spot] = TWO_CORES) -> dict[str, DeviceAssignment]:
    found = first_assignments(models, spots, Taken())
    assert not unplaced(found)
    return {
        name: assignment
        for name, assignment in found.items()
        if isinstance(assignment, DeviceAssignment)
    }


def test_the_first_of_each_core_start_and_the_others_are_spread() -> None:
    found = assignments(*(model(f"m{number}") for number in range(20)))
    assert [name for name, assignment in found.items() if assignment.starts] == ["m0", "m1"]
    assert Counter(assignment.devices[0] for assignment in found.values()) == {
        "core0": 10,
        "core1": 10,
    }
    assert {assignment.replicas for assignment in found.values()} == {1}
    # Wherever it begins, it may come to the other one too.
    assert {frozenset(assignment.devices) for assignment in found.values()} == {
        frozenset(("core0", "core1"))
    }


def test_a_larger_model_weighs_as_many_smaller_ones() -> None:
    found = assignments(
        *(model(name, start="on_demand") for name in "ab"),
        model("large", 6, start="on_demand"),
        *(model(name, start="on_demand") for name in "cde"),
    )
    on = {name: assignment.devices[0] for name, assignment in found.items()}
    assert on["large"] == "core0"
    assert [on[name] for name in "cde"] == ["core1"] * 3


def test_on_a_gpu_all_start_that_fit_in_the_order_of_the_file() -> None:
    gpu = [Spot("gpu0", 5 * GIB, cores=None)]
    found = assignments(model("a"), model("b"), model("c"), spots=gpu)
    assert [assignment.starts for assignment in found.values()] == [True, True, False]
    assert "left nowhere" in found["c"].why


def test_where_there_are_gpus_models_are_on_them_if_they_fit() -> None:
    spots = [Spot("core0", 99 * GIB), Spot("gpu0", 5 * GIB, cores=None)]
    found = assignments(model("a"), model("large", 50), spots=spots)
    assert {name: assignment.devices for name, assignment in found.items()} == {
        "a": ("gpu0",), "large": ("core0",),
    }  # fmt: skip


def test_devices_without_a_model_have_further_replicas() -> None:
    assert assignments(model("a"))["a"].replicas == 2
    assert [assignment.replicas for assignment in assignments(model("a"), model("b")).values()] == [
        1,
        1,
    ]
    three = [*TWO_CORES, Spot("core2", 10 * GIB)]
    found = assignments(model("a"), model("b"), spots=three)
    assert (found["a"].replicas, found["a"].devices[:2]) == (2, ("core0", "core2"))
    assert assignments(model("a", replicas=1))["a"].replicas == 1
    assert assignments(model("a", start="on_demand"))["a"].replicas == 1


def test_what_operators_say_wins() -> None:
    found = assignments(
        model("a"), model("b"), model("now", start="now"), model("later", start="on_demand")
    )
    assert {name: assignment.starts for name, assignment in found.items()} == {
        "a": True, "b": True, "now": True, "later": False,
    }  # fmt: skip
    assert assignments(model("two", replicas=2), model("b"))["two"].replicas == 2


@pytest.mark.parametrize(
    ("refused", "field", "why"),
    [
        (model("x", 11), "source", "no device may give models more than 10.0 GiB"),
        (model("x", replicas=3), "replicas", "3 replicas, one a device, and core0, core1"),
        (model("x", 9, start="now"), "start", "so much is left: core0 8.0 GiB, core1 8.0 GiB"),
    ],
)
def test_a_model_without_an_assignment_has_the_reason(
    refused: Newcomer, field: str, why: str
) -> None:
    found = first_assignments([model("a"), model("b"), refused], TWO_CORES, Taken())
    (problem,) = unplaced(found).values()
    assert problem.field == field
    assert why in problem.why


def test_models_with_devices_have_taken_theirs() -> None:
    taken = Taken()
    taken.add("core0", 9 * GIB, starts=True)
    (assignment,) = first_assignments([model("a")], TWO_CORES, taken).values()
    assert isinstance(assignment, DeviceAssignment)
    assert (assignment.devices[0], assignment.starts) == ("core1", True)


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
def test_assignments_keep_what_they_promise(models: list[Newcomer], devices: list[Spot]) -> None:
    taken = Taken()
    found = first_assignments(models, devices, taken)
    assert found == first_assignments(models, devices, Taken())
    assert found.keys() == {each.name for each in models}
    memory = {each.name: each.memory for each in devices}
    gpus = {each.name for each in devices if each.is_gpu}
    used: Counter[str] = Counter()
    for each in models:
        assignment = found[each.name]
        if isinstance(assignment, NotAssigned):
            assert assignment.why
            continue
        assert assignment.why
        assert 1 <= assignment.replicas <= len(assignment.devices) == len(set(assignment.devices))
        assert all(each.size <= memory[name] for name in assignment.devices)
        assert set(assignment.devices) <= gpus or not set(assignment.devices) & gpus
        assert each.start == "auto" or assignment.starts == (each.start == "now")
        for name in assignment.devices[: assignment.replicas] if assignment.starts else ():
            used[name] += each.size
    assert all(used[name] <= memory[name] * (1 + 1e-9) for name in used)
    assert {name: round(size, 6) for name, size in used.items()} == {
        name: round(size, 6) for name, size in taken.memory.items()
    }


@given(newcomers, spots, newcomers)
def test_models_at_the_end_of_the_file_move_nobody_before_them(
    models: list[Newcomer], devices: list[Spot], more: list[Newcomer]
) -> None:
    before = first_assignments(models, devices, Taken())
    after = first_assignments([*models, *more], devices, Taken())
    for name, assignment in before.items():
        now = after[name]
        if isinstance(assignment, NotAssigned) or isinstance(now, NotAssigned):
            assert assignment == now
        else:
            assert (assignment.devices[0], assignment.starts) == (now.devices[0], now.starts)
