"""Devices of a machine's cores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.placement.own_devices import cores_a_device, divided


@pytest.mark.parametrize(
    ("cores", "size"), [(1, 1), (2, 1), (7, 1), (8, 2), (16, 4), (31, 4), (32, 8), (128, 8)]
)
def test_few_cores_are_a_device_each_and_many_are_not(cores: int, size: int) -> None:
    assert cores_a_device(cores) == size


def test_two_cores_are_two_devices() -> None:
    assert divided([(0, 1)]) == [(0,), (1,)]


def test_no_device_is_next_to_two_memories() -> None:
    assert divided([(0, 1, 4, 5), (2, 3, 6, 7)]) == [(0, 1), (4, 5), (2, 3), (6, 7)]


@given(st.lists(st.integers(1, 70), min_size=1, max_size=4))
def test_each_core_is_of_one_device_and_devices_are_alike(sizes: list[int]) -> None:
    groups, first = [], 0
    for size in sizes:
        groups.append(tuple(range(first, first + size)))
        first += size
    found = divided(groups)
    assert sorted(core for device in found for core in device) == list(range(first))
    for group in groups:
        lengths = {len(device) for device in found if device[0] in group}
        assert max(lengths) - min(lengths) <= 1
        assert all(set(device) <= set(group) for device in found if device[0] in group)
