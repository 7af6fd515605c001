"""Where a model that is asked for is loaded."""

from __future__ import annotations

import pytest

from loomserve.platform.placement.policy.sites import Site, best_site, why_there


def site(device: str, heat: float = 0.0, loss: float | None = 0.0, free: float = 1.0) -> Site:
    return Site(device, heat, loss, free)


@pytest.mark.parametrize(
    ("sites", "device"),
    [
        ([site("a", heat=0.9), site("b", heat=0.1)], "b"),  # hot models spread
        ([site("a", free=1.0), site("b", free=2.0)], "b"),  # the emptiest
        ([site("a", heat=0.01), site("b", heat=0.03)], "a"),  # which says little
        ([site("a", heat=0.3), site("b", loss=0.5)], "a"),  # better busy than waited for
        ([site("a", heat=0.9), site("b", loss=0.1)], "b"),  # and the other way round
        ([site("a", heat=1.0), site("b", loss=None)], "a"),  # nobody can go there
    ],
)
def test_least_time_is_lost(sites: list[Site], device: str) -> None:
    assert best_site(sites).device == device


def test_it_says_why() -> None:
    sites = [site("a", heat=0.5), site("b", loss=0.2), site("c", loss=None)]
    assert why_there(sites[1], sites) == (
        "b has least to do (a: busy 50 %, room; b: busy 0 %, room once others go; "
        "c: busy 0 %, no room)"
    )
    assert why_there(sites[0], sites[:1]) == "a is the only device that can hold it"
