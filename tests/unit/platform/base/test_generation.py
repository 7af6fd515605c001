"""Orders that come late, of an owner that another has taken over from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.base.sqlite import LatestGeneration


@given(st.lists(st.integers(0, 5)))
def test_what_is_carried_out_is_never_of_an_earlier_owner(orders: list[int]) -> None:
    latest = LatestGeneration()
    done = [generation for generation in orders if latest.admits(generation)]
    assert done == sorted(done)
    assert max(done, default=0) == max(orders, default=0)
    assert all(order in done for order in orders if order == max(orders))
