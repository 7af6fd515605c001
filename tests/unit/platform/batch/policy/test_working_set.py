"""Which batches have their lines in memory."""

from __future__ import annotations

from loomserve.platform.batch.policy.objects import BatchRecord
from loomserve.platform.batch.policy.working_set import MOST_LINES, may_join


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
