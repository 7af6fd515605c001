from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from loomserve.platform.base.heap import settle_heap


class Ring:
    """Only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_what_is_there_is_left_alone_until_it_is_settled_again() -> None:
    kept = Ring()
    settle_heap()
    assert gc.get_freeze_count() > 1000
    gone = weakref.ref(kept)
    del kept
    gc.collect()
    assert gone() is not None
    settle_heap()
    assert gone() is None


def test_what_comes_later_is_still_collected() -> None:
    settle_heap()
    gone = weakref.ref(Ring())
    gc.collect()
    assert gone() is None
