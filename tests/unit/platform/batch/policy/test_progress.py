"""Which batches' lines are in memory, and when a batch that failed is tried again."""

from __future__ import annotations

from loomserve.platform.batch.policy.objects import BatchRecord
from loomserve.platform.batch.policy.progress import MOST_FAILURES, MOST_LINES, Retries, may_join


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


def batch(owner: str, lines: int, done: int = 0) -> BatchRecord:
    given = {"endpoint": "/v1/completions", "input_file_id": "f", "completion_window": "24h"}
    given |= {"created_at": 1, "expires_at": 2, "total": lines, "completed": done}
    return BatchRecord.model_validate({"id": f"batch_{owner}", "owner": owner, **given})


def test_one_batch_is_in_memory_however_long_it_is() -> None:
    assert may_join(batch("a", 5 * MOST_LINES), [])
    assert not may_join(batch("a", 1), [batch("a", 5 * MOST_LINES)])


def test_a_key_fills_half_of_the_room_and_leaves_the_rest_to_keys_that_have_nothing_in_it() -> None:
    half = MOST_LINES // 2
    members = [batch("a", half - 10)]
    assert may_join(batch("a", 10), members)
    assert not may_join(batch("a", 11), members)
    assert may_join(batch("b", half + 10), members)
    assert not may_join(batch("b", half + 11), members)


def test_lines_that_are_answered_make_room() -> None:
    full = MOST_LINES // 2
    assert not may_join(batch("a", 100), [batch("a", full, 99)])
    assert may_join(batch("a", 100), [batch("a", full, 100)])
