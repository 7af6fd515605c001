from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import psutil
import pytest

from loomserve.platform.base.heap import give_back_freed, keep_heap, settle_heap


class Ring:
    """Only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    # All tests' modules are left alone, too.
    gc.freeze()


def test_what_is_there_is_left_alone_until_it_is_settled_again() -> None:
    kept = Ring()
    keep_heap()
    assert gc.get_freeze_count() > 1000
    gone = weakref.ref(kept)
    del kept
    gc.collect()
    assert gone() is not None
    settle_heap()
    assert gone() is None


def test_what_comes_later_is_still_collected() -> None:
    keep_heap()
    gone = weakref.ref(Ring())
    gc.collect()
    assert gone() is None


def test_what_a_thread_has_freed_goes_back_to_the_operating_system() -> None:
    def work() -> None:
        # Less than what the allocator maps apart, and kept in between by what is still in use.
        chunks = [bytearray(100_000) for _ in range(1000)]
        kept.extend(chunks[::20])

    kept: list[bytearray] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    before = psutil.Process().memory_info().rss
    give_back_freed()
    assert before - psutil.Process().memory_info().rss > 50e6
    assert len(kept) == 50
