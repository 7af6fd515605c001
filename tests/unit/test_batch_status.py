"""``loomserve batch``: what operators read."""

from __future__ import annotations

import time

from rich.console import Console

from loomserve.platform.batch_status import render
from loomserve.platform.state import BatchLaneState, BatchState


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
    console = Console(width=160, record=True, file=None)
    with console.capture() as shown:
        console.print(render(state))
    text = shown.get()
    for expected in (batch.id, "nightly", "100", "40", "1 min 30 s (late)", "2 h 1 min"):
        assert expected in text
    assert "1 in_progress, 12 completed;" in text
    assert "2 attempts failed" in text
