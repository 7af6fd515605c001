"""``loomserve batch``: what operators read."""

from __future__ import annotations

import time

from loomserve.platform.cli.batch import render
from loomserve.platform.state import BatchLaneState, BatchState, OfflineModelState
from tests.unit.shown_tables import printed


def test_a_row_says_whose_batch_it_is_how_far_and_when_it_is_ready() -> None:
    batch = BatchState(
        id="batch_" + "a" * 32,
        api_key="nightly",
        status="in_progress",
        endpoint="/v1/completions",
        created_at=1,
        expires_at=int(time.time()) + 7300,
        total=100,
        completed=40,
        failed=3,
        in_flight=8,
        eta_s=90,
        late=True,
    )
    state = BatchLaneState(
        batches=(batch,),
        by_status={"in_progress": 1, "completed": 12, "failed": 0},
        answered_lines=40,
        failed_lines=3,
        retries=2,
    )
    text = printed(render(state))
    for expected in (batch.id, "nightly", "100", "40", "1 min 30 s (late)", "2 h 1 min"):
        assert expected in text
    assert "1 in_progress, 12 completed;" in text
    assert "2 attempts failed" in text


def test_an_offline_model_that_is_not_ready_says_why() -> None:
    def model(name: str, problem: str | None, *, ready: bool = False) -> OfflineModelState:
        return OfflineModelState(name=name, ready=ready, problem=problem, batches=0, splits=0)

    state = BatchLaneState(
        batches=(),
        by_status={},
        answered_lines=0,
        failed_lines=0,
        retries=0,
        offline_models=(
            model("fine", None, ready=True),
            model("new", None),
            model("old", "it was killed"),
        ),
    )
    text = printed(render(state))
    assert "fine" not in text
    assert "offline model new is not ready: it is being loaded" in text
    assert "offline model old is not ready: it was killed" in text
