"""Each batch goes its own way: one that cannot go on holds up no other, and has an end."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from loomserve.platform.batch import ending, lifecycle
from loomserve.platform.batch.policy import progress
from loomserve.platform.batch.policy.objects import BatchRecord, BatchStatus
from tests.unit.platform.batch.test_lane import Bench, Engines, hurry, requests, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(progress, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(lifecycle, "_NO_ROOM_S", 0.01)


async def test_a_batch_that_cannot_be_ended_fails_and_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "b", Engines())
    wrong, tries, end = bench.submit(requests(3)), 0, ending.end

    def end_others(store: Any, folder: Any, batch: BatchRecord, *given: Any) -> BatchRecord:
        nonlocal tries
        if batch.id == wrong:
            tries += 1
            raise ZeroDivisionError("a mistake of ours")
        return end(store, folder, batch, *given)

    monkeypatch.setattr(ending, "end", end_others)
    async with bench.running():
        right = [bench.submit(requests(3)) for _ in range(3)]
        for batch_id in right:
            assert (await bench.ended(batch_id)).status is BatchStatus.COMPLETED
        batch = await bench.ended(wrong)
    assert tries == 5
    assert (batch.status, batch.completed) == (BatchStatus.FAILED, 3)
    (error,) = batch.errors or ()
    assert error.code == "internal_error"
    assert "5 failures (ZeroDivisionError)" in error.message


async def test_a_batch_that_cannot_be_checked_fails_and_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "b", Engines())
    wrong = bench.submit(requests(3))
    check = lifecycle.BatchLifecycle._check

    def check_others(self: Any, batch: BatchRecord) -> Any:
        if batch.id == wrong:
            raise PermissionError("not for you")
        return check(self, batch)

    monkeypatch.setattr(lifecycle.BatchLifecycle, "_check", check_others)
    right = bench.submit(requests(3))
    async with bench.running():
        assert (await bench.ended(right)).status is BatchStatus.COMPLETED
        batch = await bench.ended(wrong)
    assert [error.code for error in batch.errors or ()] == ["internal_error"]


async def test_an_outage_of_the_database_fails_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "b", Engines())
    batch_id, tries, finish = bench.submit(requests(3)), 0, bench.store.batches.finish

    def finish_later(*given: Any) -> BatchRecord:
        nonlocal tries
        tries += 1
        if tries < 20:
            raise sqlite3.OperationalError("disk I/O error")
        return finish(*given)

    monkeypatch.setattr(bench.store.batches, "finish", finish_later)
    async with bench.running():
        batch = await bench.ended(batch_id)
    assert (batch.status, batch.completed, tries) == (BatchStatus.COMPLETED, 3, 20)
    # The same files were written again and again.
    assert len([*bench.folder.blob("x").parent.iterdir()]) == 2
    assert not [*bench.folder.incoming("x").parent.iterdir()]


@pytest.mark.parametrize("when", ["before it is checked", "in its midst"])
async def test_a_batch_whose_file_is_gone_fails_at_once_and_says_so(
    tmp_path: Path, when: str
) -> None:
    bench = Bench(tmp_path / "b", Engines(delay_s=0.05), concurrency=2)
    batch_id = bench.submit(requests(20))
    file = bench.folder.blob(bench.store.batches.get(None, batch_id).input_file_id)
    if when == "before it is checked":
        file.unlink()
    other = bench.submit(requests(3))
    async with bench.running():
        if file.exists():
            await until(lambda: bench.store.batches.get(None, batch_id).completed > 0)
            file.unlink()
        batch = await bench.ended(batch_id)
        assert (await bench.ended(other)).status is BatchStatus.COMPLETED
    assert batch.status is BatchStatus.FAILED
    assert [error.code for error in batch.errors or ()] == ["input_file_gone"]
    assert len(bench.lines_of(batch.output_file_id)) == batch.completed
    assert {line["error"]["code"] for line in bench.lines_of(batch.error_file_id)} <= {
        "batch_failed"
    }


async def test_an_error_of_the_lane_itself_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "b", Engines())
    batch_id, tries, unended = bench.submit(requests(3)), 0, bench.store.batches.unended

    def sometimes() -> list[BatchRecord]:
        nonlocal tries
        tries += 1
        if tries % 2:
            raise KeyError("a mistake of ours")
        return unended()

    monkeypatch.setattr(bench.store.batches, "unended", sometimes)
    async with bench.running():
        assert (await bench.ended(batch_id)).completed == 3


async def test_lines_beyond_the_bound_wait_in_the_store_and_are_all_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "MOST_LINES", 20)
    bench = Bench(tmp_path / "b", Engines(delay_s=0.01), concurrency=4)
    batches = [bench.submit(requests(8)) for _ in range(6)]
    most = 0
    async with bench.running() as lane:

        async def watch() -> None:
            nonlocal most
            while True:
                live = lane._runner.live.values()
                most = max(most, sum(each.waiting + len(each.running) for each in live))
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        for batch_id in batches:
            assert (await bench.ended(batch_id)).completed == 8
        watching.cancel()
    # A key has half of the room, and one batch in any case.
    assert 8 <= most <= 10


async def test_a_batch_with_more_lines_than_there_is_room_for_waits_until_there_is(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path / "b", Engines(delay_s=0.02), max_lines=10, max_unended_lines=12)
    first, second = bench.submit(requests(10)), bench.submit(requests(10))
    async with bench.running():
        await until(lambda: bench.store.batches.get(None, first).completed > 0)
        assert bench.store.batches.get(None, second).status is BatchStatus.VALIDATING
        assert (await bench.ended(first)).completed == 10
        assert (await bench.ended(second)).completed == 10


@pytest.mark.parametrize("step_s", [-3600.0, 2 * 86_400.0])
async def test_a_step_of_the_machines_clock_ends_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    real, step = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() + step)
    bench = Bench(tmp_path / "b", Engines(delay_s=0.1), concurrency=1)
    batch_id = bench.submit(requests(3), window_s=1800)
    async with bench.running():
        await until(lambda: bench.engines.now == 1)
        expiring = bench.submit(requests(50), window_s=1)
        step = step_s
        assert (await bench.ended(batch_id)).status is BatchStatus.COMPLETED
        assert (await bench.ended(expiring)).status is BatchStatus.EXPIRED
