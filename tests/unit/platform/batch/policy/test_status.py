"""The states of a batch, and its completion window."""

from __future__ import annotations

import pytest

from loomserve.platform.batch.policy.objects import (
    ENDED,
    TRANSITIONS,
    BatchRecord,
    BatchStatus,
    stamp,
    window_seconds,
)


def test_every_state_but_the_first_has_a_stamp_and_every_state_can_end() -> None:
    for status in BatchStatus:
        field = stamp(status)
        assert (field is None) == (status is BatchStatus.VALIDATING)
        assert field is None or field in BatchRecord.model_fields
        reached, todo = set(), [status]
        while todo:
            reached.add(now := todo.pop())
            todo += TRANSITIONS[now] - reached
        assert reached & ENDED


@pytest.mark.parametrize(
    ("window", "seconds"),
    [("24h", 86_400), ("90s", 90), ("7d", 604_800), ("0h", None), ("24", None), (24, None)],
)
def test_windows_are_read(window: object, seconds: int | None) -> None:
    assert window_seconds(window) == seconds
