"""Two lanes with one folder, the earlier of which has lost its lock and goes on, slowly."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loomserve.platform.base.errors import TakenOver
from loomserve.platform.batch import ending
from loomserve.platform.batch.policy.objects import BatchStatus
from loomserve.platform.batch.store.lines import StoredAnswer
from loomserve.platform.batch.store.store import BatchStore
from tests.unit.platform.batch.test_lane import (
    ALICE,
    Bench,
    Engines,
    hurry,
    request,
    requests,
    until,
)
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


async def run_until_taken_over(bench: Bench) -> None:
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.timeout(PATIENCE_S):
            await bench.make().run()
    assert ended.group_contains(TakenOver)


async def test_an_earlier_lane_ends_and_its_successor_loses_nothing(tmp_path: Path) -> None:
    old = Bench(tmp_path / "b", Engines(delay_s=0.05), concurrency=2)
    batch_id = old.submit(requests(20))
    running = asyncio.create_task(run_until_taken_over(old))
    await until(lambda: old.store.batches.get(None, batch_id).completed >= 4)
    old.folder.release()
    new = Bench(tmp_path / "b", Engines())
    async with new.running():
        batch = await new.ended(batch_id)
    await running
    assert (batch.status, batch.completed, batch.failed) == (BatchStatus.COMPLETED, 20, 0)
    output = new.lines_of(batch.output_file_id)
    assert [line["custom_id"] for line in output] == [f"c{n}" for n in range(20)]


async def test_an_earlier_lane_without_work_ends_too(tmp_path: Path) -> None:
    old = Bench(tmp_path / "b", Engines())
    running = asyncio.create_task(run_until_taken_over(old))
    await asyncio.sleep(0.05)
    assert not running.done()
    BatchStore(old.folder.database).close()
    await running


@pytest.mark.parametrize("after", ["it has written the files", "its successor has ended it"])
async def test_an_ending_that_comes_late_leaves_the_output_of_the_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    old = Bench(tmp_path / "b", Engines())
    batch_id = old.submit(requests(3))
    old.store.batches.begin(batch_id, _lines(old, batch_id), 1)
    old.store.lines.answer([StoredAnswer(batch_id, 1, True, b'{"custom_id": "c0"}')])
    old.store.batches.begin_to_end(batch_id, BatchStatus.EXPIRED, 2)
    record = old.store.batches.get(None, batch_id)
    successor = BatchStore(old.folder.database)
    write, ended = ending._write, []

    def write_slowly(store: BatchStore, *given: object) -> object:
        wrote = write(store, *given) if after == "it has written the files" else None  # type: ignore[arg-type]
        if store is old.store:
            ended.append(ending.end(successor, old.folder, record, 60, 3))
        return wrote or write(store, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(ending, "_write", write_slowly)
    with pytest.raises(TakenOver):
        ending.end(old.store, old.folder, record, 60, 4)
    (batch,) = ended
    assert successor.batches.get(None, batch_id) == batch
    assert old.folder.blob(batch.output_file_id).read_bytes() == b'{"custom_id": "c0"}\n'
    assert len(old.folder.blob(batch.error_file_id).read_bytes().splitlines()) == 2
    left = {path.name for path in old.folder.blob("x").parent.iterdir()}
    assert left == {record.input_file_id, batch.output_file_id, batch.error_file_id}
    assert not [*old.folder.incoming("x").parent.iterdir()]


async def test_nothing_that_an_earlier_lane_does_late_is_kept(tmp_path: Path) -> None:
    old = Bench(tmp_path / "b", Engines())
    batch_id = old.submit(requests(3))
    old.store.batches.begin(batch_id, _lines(old, batch_id), 1)
    new = BatchStore(old.folder.database)
    before = new.batches.get(None, batch_id)
    late = [
        lambda: old.store.lines.answer([StoredAnswer(batch_id, 1, True, b"{}")]),
        lambda: old.store.lines.failed_attempt(batch_id, 1),
        lambda: old.store.batches.cancel(ALICE, batch_id, 5),
        lambda: old.store.batches.give_up(batch_id, (), 5),
        lambda: old.store.batches.forget(1e12),
        lambda: old.store.files.expire(1e12),
        lambda: old.store.files.delete(ALICE, before.input_file_id),
        lambda: old.submit(request("c9")),
    ]
    for act in late:
        with pytest.raises(TakenOver):
            act()
    assert new.batches.get(None, batch_id) == before
    assert len(new.lines.unanswered(batch_id)) == 3
    with pytest.raises(TakenOver), old.store.owned():
        pytest.fail("it may remove nothing")


def _lines(bench: Bench, batch_id: str) -> list:  # type: ignore[type-arg]
    from loomserve.platform.batch.policy import lines

    record = bench.store.batches.get(None, batch_id)
    with bench.folder.blob(record.input_file_id).open("rb") as stream:
        return lines.check(stream, record.endpoint, max_lines=100, max_body=10_000).lines
