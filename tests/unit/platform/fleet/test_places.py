"""On which devices a model's replicas are to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.fleet.nodes import places

ABC = ("a", "b", "c")


@pytest.mark.parametrize(
    ("target", "there", "up", "wanted"),
    [
        (2, (), "abc", "ab"),
        (1, ("b",), "abc", "b"),  # not back to the first for nothing
        (2, ("c",), "abc", "ac"),
        (1, ("c", "a"), "abc", "c"),  # the newest ends
        (3, ("a",), "abc", "abc"),
        (1, ("a",), "bc", "b"),  # elsewhere while its node is down
        (2, ("a", "b"), "b", "ab"),  # nowhere else: it comes back with its node
        (3, ("a", "b", "c"), "", "abc"),
        (2, ("a", "b"), "bc", "bc"),
        (1, ("x", "b"), "abc", "b"),  # of a device that the model has no more
    ],
)
def test_replicas_stay_and_leave_nodes_that_are_down(
    target: int, there: tuple[str, ...], up: str, wanted: str
) -> None:
    assert places(ABC, target, there, up) == tuple(wanted)


@given(
    st.integers(0, 3),
    st.permutations(ABC).flatmap(lambda order: st.integers(0, 3).map(lambda n: order[:n])),
    st.sets(st.sampled_from(ABC)),
)
def test_there_are_as_many_as_wished_and_the_choice_stands(
    target: int, there: list[str], up: set[str]
) -> None:
    wanted = places(ABC, target, there, up)
    assert len(wanted) == target
    assert places(ABC, target, wanted, up) == wanted
    assert len(up & set(wanted)) == min(target, len(up)), "no living device is passed over"
