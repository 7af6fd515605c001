"""Retries: further and further apart, and not for ever."""

from __future__ import annotations

from loomserve.platform.batch.policy.retries import MOST_FAILURES, Retries


def test_failures_are_spaced_until_the_last() -> None:
    retries, now, tried = Retries(), 0.0, []
    while True:
        assert retries.may_try("other", now)
        if retries.may_try("b", now):
            tried.append(now)
            if retries.failed("b", now):
                break
        now += 0.5
    assert tried == [0, 1, 3, 7, 15]
    assert len(tried) == MOST_FAILURES


def test_what_went_well_forgets_the_failures_and_waiting_is_none() -> None:
    retries = Retries()
    for _ in range(3 * MOST_FAILURES):
        retries.wait("b", 5.0)
        assert not retries.may_try("b", 4.9)
        assert retries.may_try("b", 5.0)
    for _ in range(MOST_FAILURES - 1):
        assert not retries.failed("b", 0.0)
    retries.went_well("b")
    assert not retries.failed("b", 0.0)
