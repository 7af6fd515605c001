"""The lane with engines that are a table: its batches end right whatever its engines do."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.batch import lane as lane_module
from loomserve.platform.batch import lifecycle, line_runner
from loomserve.platform.batch.executor import (
    LineAnswer,
    LineCall,
    LineOutcome,
    QueuedModel,
)
from loomserve.platform.batch.folder import BatchFolder
from loomserve.platform.batch.lane import BatchLane
from loomserve.platform.batch.length_estimation import LengthEstimator
from loomserve.platform.batch.line_runner import MOST_ATTEMPTS
from loomserve.platform.batch.live import LiveBatch
from loomserve.platform.batch.policy.objects import (
    ENDED,
    INPUT,
    BatchRecord,
    BatchStatus,
    FileRecord,
    new_id,
)
from loomserve.platform.batch.store.store import BatchStore
from loomserve.platform.config import Batch
from loomserve.platform.fleet.messages import ServedModel
from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.snapshot import RoutingStats
from tests.waiting import PATIENCE_S

ALICE = "alice"
Behave = Callable[[LineCall], LineAnswer]


def good(call: LineCall) -> LineAnswer:
    body = {"echo": call.body["prompt"], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}
    return LineAnswer(LineOutcome.ANSWERED, 200, json.dumps(body).encode())


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Engines:
    """An executor whose one engine always has room, and answers as it is told."""

    def __init__(self, behave: Behave = good, delay_s: float = 0.0) -> None:
        self.behave, self.delay_s = behave, delay_s
        self.calls: Counter[object] = Counter()
        self.most = self.now = 0
        self.there = True

    async def models(self) -> Mapping[str, ServedModel] | None:
        if not self.there:
            return None
        load = ReplicaLoad(
            running=0,
            waiting=0,
            kv_cache_usage=0,
            step_time_s=0.01,
            measured_at=time.monotonic(),
        )
        stats = RoutingStats(
            load=load,
            max_running=64,
            kv_capacity_tokens=1_000_000,
            draining=False,
            role=Role.UNIFIED,
            told_at=0.0,
        )
        return {"m": ServedModel(max_model_len=1024, engines={"e": stats})}

    async def execute(self, call: LineCall) -> LineAnswer:
        self.calls[call.body["prompt"]] += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.delay_s)
            return self.behave(call)
        finally:
            self.now -= 1


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten all pauses of lanes."""
    for name in ("_TICK_S", "_GATHER_S", "_AWAY_S", "_FAILED_S"):
        monkeypatch.setattr(line_runner, name, 0.01)
    monkeypatch.setattr(lifecycle, "_TICK_S", 0.01)
    monkeypatch.setattr(lane_module, "_FAILED_S", 0.01)


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


class Bench:
    """A lane's folder, its store and what a client would do."""

    def __init__(self, path: Path, engines: Engines, **options: Any) -> None:
        self.folder = BatchFolder(path)
        self.folder.claim(0)
        self.store = BatchStore(self.folder.database)
        self.engines = engines
        self.options = Batch(**options)

    def make(self) -> BatchLane:
        return BatchLane(self.store, self.folder, self.engines, self.options, max_body=10_000)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[BatchLane]:
        lane = self.make()
        task = asyncio.create_task(lane.run())
        try:
            yield lane
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def submit(self, text: str, window_s: int = 3600, now: float | None = None) -> str:
        now = time.time() if now is None else now
        file_id, batch_id = new_id("file-"), new_id("batch_")
        self.folder.blob(file_id).write_text(text)
        self.store.files.add(
            FileRecord(
                id=file_id, owner=ALICE, filename="x", purpose=INPUT, bytes=len(text), created_at=1
            )
        )
        self.store.batches.add(
            BatchRecord(
                id=batch_id,
                owner=ALICE,
                endpoint="/v1/completions",
                input_file_id=file_id,
                completion_window=f"{window_s}s",
                created_at=int(now),
                expires_at=int(now) + window_s,
            )
        )
        return batch_id

    async def ended(self, batch_id: str) -> BatchRecord:
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: self.store.batches.get(None, batch_id).status in ENDED)
        return self.store.batches.get(None, batch_id)

    def lines_of(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        text = self.folder.blob(file_id).read_text()
        assert self.store.files.get(ALICE, file_id).bytes == len(text.encode())
        return [json.loads(line) for line in text.splitlines()]


def request(custom_id: str, model: str = "m", **body: Any) -> str:
    body = {"model": model, "prompt": f"p-{custom_id}", "max_tokens": 8, **body}
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    )


def requests(count: int) -> str:
    return "".join(request(f"c{n}") + "\n" for n in range(count))


def test_every_line_is_answered_in_the_order_of_the_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        bench = Bench(tmp_path / "b", Engines())
        batch_id = bench.submit(requests(100))
        async with bench.running():
            batch = await bench.ended(batch_id)
        assert batch.status is BatchStatus.COMPLETED
        assert (batch.total, batch.completed, batch.failed) == (100, 100, 0)
        assert batch.error_file_id is None
        output = bench.lines_of(batch.output_file_id)
        assert [line["custom_id"] for line in output] == [f"c{n}" for n in range(100)]
        assert all(line["response"]["body"]["echo"] == f"p-{line['custom_id']}" for line in output)
        assert all(line["error"] is None for line in output)
        assert (batch.input_tokens, batch.output_tokens) == (400, 200)
        assert set(bench.engines.calls.values()) == {1}

    asyncio.run(scenario())


def test_bad_answers_go_to_the_error_file_and_good_ones_do_not(tmp_path: Path) -> None:
    def behave(call: LineCall) -> LineAnswer:
        if call.body["prompt"] == "p-c1":
            return LineAnswer(LineOutcome.ANSWERED, 400, b'{"error": {"message": "no"}}')
        return good(call)

    async def scenario() -> None:
        bench = Bench(tmp_path / "b", Engines(behave))
        batch_id = bench.submit(requests(3))
        async with bench.running():
            batch = await bench.ended(batch_id)
        assert (batch.completed, batch.failed) == (2, 1)
        (wrong,) = bench.lines_of(batch.error_file_id)
        assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("c1", 400)
        assert wrong["response"]["body"]["error"]["message"] == "no"
        assert {line["custom_id"] for line in bench.lines_of(batch.output_file_id)} == {"c0", "c2"}

    asyncio.run(scenario())


def test_an_engine_that_fails_is_asked_again_and_only_so_often(tmp_path: Path) -> None:
    failures: Counter[object] = Counter()

    def behave(call: LineCall) -> LineAnswer:
        prompt = call.body["prompt"]
        failures[prompt] += 1
        if prompt == "p-c0" or (prompt == "p-c1" and failures[prompt] < MOST_ATTEMPTS):
            return LineAnswer(LineOutcome.ENGINE_FAILED, 502, b'{"error": {"message": "gone"}}')
        return good(call)

    async def scenario() -> None:
        bench = Bench(tmp_path / "b", Engines(behave))
        batch_id = bench.submit(requests(3))
        async with bench.running() as lane:
            batch = await bench.ended(batch_id)
            assert (await lane.state()).retries == 2 * MOST_ATTEMPTS - 1
        assert (batch.completed, batch.failed) == (2, 1)
        assert failures == {"p-c0": MOST_ATTEMPTS, "p-c1": MOST_ATTEMPTS, "p-c2": 1}

    asyncio.run(scenario())


def test_lines_wait_while_nobody_takes_them(tmp_path: Path) -> None:
    away = True

    def behave(call: LineCall) -> LineAnswer:
        return LineAnswer(LineOutcome.AWAY, 503, b"{}") if away else good(call)

    async def scenario() -> None:
        nonlocal away
        bench = Bench(tmp_path / "b", Engines(behave))
        bench.engines.there = False
        batch_id = bench.submit(requests(2))
        async with bench.running():
            await asyncio.sleep(0.1)
            assert not bench.engines.calls
            bench.engines.there = True
            await until(lambda: min(bench.engines.calls.values(), default=0) > MOST_ATTEMPTS)
            away = False
            batch = await bench.ended(batch_id)
        assert batch.completed == 2

    asyncio.run(scenario())


def test_lines_for_a_model_that_is_not_there_are_answered_at_once(tmp_path: Path) -> None:
    def behave(call: LineCall) -> LineAnswer:
        if call.engine is None:
            return LineAnswer(LineOutcome.ANSWERED, 404, b'{"error": {"code": "model_not_found"}}')
        return good(call)

    async def scenario() -> None:
        bench = Bench(tmp_path / "b", Engines(behave))
        batch_id = bench.submit(request("a") + "\n" + request("b", model="gpt-9"))
        async with bench.running():
            batch = await bench.ended(batch_id)
        (line,) = bench.lines_of(batch.error_file_id)
        assert (line["custom_id"], line["response"]["status_code"]) == ("b", 404)
        assert batch.completed == 1

    asyncio.run(scenario())


def test_a_wrong_file_fails_the_whole_batch_before_anything_is_computed(tmp_path: Path) -> None:
    async def scenario() -> None:
        bench = Bench(tmp_path / "b", Engines())
        batch_id = bench.submit(requests(2) + "not json\n" + request("c0"))
        async with bench.running():
            batch = await bench.ended(batch_id)
        assert batch.status is BatchStatus.FAILED
        assert [(e.line, e.code) for e in batch.errors or ()] == [
            (3, "invalid_json_line"),
            (4, "duplicate_custom_id"),
        ]
        assert not bench.engines.calls

    asyncio.run(scenario())


def test_a_window_that_ends_leaves_what_was_done_and_says_what_was_not(tmp_path: Path) -> None:
    def behave(call: LineCall) -> LineAnswer:
        if call.body["prompt"] == "p-c1":
            return LineAnswer(LineOutcome.AWAY, 503, b"{}")
        return good(call)

    async def scenario() -> None:
        bench = Bench(tmp_path / "b", Engines(behave))
        batch_id = bench.submit(requests(2), window_s=2)
        async with bench.running():
            batch = await bench.ended(batch_id)
        assert batch.status is BatchStatus.EXPIRED
        assert None not in (batch.expired_at, batch.finalizing_at)
        assert (batch.completed, batch.failed) == (1, 1)
        (line,) = bench.lines_of(batch.error_file_id)
        assert (line["response"], line["error"]["code"]) == (None, "batch_expired")
        assert len(bench.lines_of(batch.output_file_id)) == 1

    asyncio.run(scenario())


def test_a_cancelled_batch_stops_its_lines_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        bench = Bench(tmp_path / "b", Engines(delay_s=60))
        batch_id = bench.submit(requests(5))
        async with bench.running() as lane:
            await until(lambda: bench.engines.now == 5)
            assert (await lane.cancel(ALICE, batch_id)).status is BatchStatus.CANCELLING
            batch = await bench.ended(batch_id)
            assert bench.engines.now == 0
        assert batch.status is BatchStatus.CANCELLED
        assert {line["error"]["code"] for line in bench.lines_of(batch.error_file_id)} == {
            "batch_cancelled"
        }

    asyncio.run(scenario())


def test_no_more_lines_than_allowed_are_with_engines(tmp_path: Path) -> None:
    async def scenario() -> None:
        bench = Bench(tmp_path / "b", Engines(delay_s=0.02), concurrency=3)
        batches = [bench.submit(requests(8)), bench.submit(requests(8))]
        async with bench.running():
            for batch_id in batches:
                await bench.ended(batch_id)
        assert bench.engines.most == 3

    asyncio.run(scenario())


def test_a_lane_that_ends_anywhere_and_starts_again_answers_each_line_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        bench = Bench(tmp_path / "b", Engines(delay_s=0.005), concurrency=4)
        batch_id = bench.submit(requests(60))
        for pause in (0.0, 0.02, 0.05, 0.06, 0.08, 0.1):
            async with bench.running():
                await asyncio.sleep(pause)
        async with bench.running():
            batch = await bench.ended(batch_id)
        assert (batch.completed, batch.failed) == (60, 0)
        output = bench.lines_of(batch.output_file_id)
        assert sorted(line["custom_id"] for line in output) == sorted(f"c{n}" for n in range(60))

    asyncio.run(scenario())


def test_a_full_disk_stops_the_lane_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        bench = Bench(tmp_path / "b", Engines(), concurrency=2)
        batch_id = bench.submit(requests(10))
        store_answers, full = bench.store.lines.answer, True

        def answer(answers: Any) -> list[bool]:
            if full:
                raise sqlite3.OperationalError("database or disk is full")
            return store_answers(answers)

        monkeypatch.setattr(bench.store.lines, "answer", answer)
        async with bench.running():
            await until(lambda: sum(bench.engines.calls.values()) == 2)
            await asyncio.sleep(0.2)
            assert sum(bench.engines.calls.values()) == 2, "no more starts than can be kept"
            full = False
            batch = await bench.ended(batch_id)
        assert batch.completed == 10
        assert set(bench.engines.calls.values()) == {1}

    asyncio.run(scenario())


def test_a_folder_has_one_owner_and_is_nobody_elses(tmp_path: Path) -> None:
    first = BatchFolder(tmp_path / "b")
    first.claim(0)
    with pytest.raises(StartError, match=r"another platform .* set batch\.folder"):
        BatchFolder(tmp_path / "b").claim(0)
    first.release()
    BatchFolder(tmp_path / "b").claim(0)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(StartError, match="chmod 700"):
        BatchFolder(tmp_path / "open").claim(0)


def test_what_a_killed_lane_left_half_done_is_swept(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path / "b")
    folder.claim(0)
    for name in ("kept", "orphan"):
        folder.incoming(name).write_text("x")
        folder.publish(name)
    folder.incoming("half").write_text("x")
    folder.sweep(["kept"])
    assert [p.name for p in folder.blob("x").parent.iterdir()] == ["kept"]
    assert not folder.incoming("half").exists()


def test_lines_of_a_queued_model_are_handed_over_up_to_its_places_and_beside_engines(
    tmp_path: Path,
) -> None:
    class Both(Engines):
        """Beside the engine's model one that queues its lines itself."""

        queued = most_queued = 0

        async def models(self) -> Any:
            served = await super().models()
            assert served is not None
            return {**served, "s": QueuedModel(1024, "offline:s", 5)}

        async def execute(self, call: LineCall) -> LineAnswer:
            if call.body["model"] != "s":
                return await super().execute(call)
            assert (call.engine, call.attempts) == ("offline:s", 0)
            assert 0 < call.expected_tokens() <= 1024
            self.queued += 1
            self.most_queued = max(self.most_queued, self.queued)
            await asyncio.sleep(0.01)
            self.queued -= 1
            return good(call)

    async def scenario() -> None:
        engines = Both(delay_s=0.01)
        bench = Bench(tmp_path / "b", engines, concurrency=3)
        text = "".join(request(f"s{n}", model="s") + "\n" for n in range(12)) + requests(12)
        batch_id = bench.submit(text)
        async with bench.running():
            batch = await bench.ended(batch_id)
        assert (batch.completed, batch.failed) == (24, 0)
        assert (engines.most_queued, engines.most) == (5, 3)

    asyncio.run(scenario())


def test_a_models_predictor_is_asked_once_for_each_batch(tmp_path: Path) -> None:
    class Predicted(Engines):
        async def models(self) -> Any:
            served = await super().models()
            assert served is not None
            return {"m": served["m"].model_copy(update={"predictor": "of-m"})}

    asked: list[tuple[str, str, str]] = []

    class Seen(LengthEstimator):
        async def estimate(self, batch: LiveBatch, model: str, predictor: str) -> None:
            asked.append((batch.record.id, model, predictor))

    async def scenario() -> None:
        bench = Bench(tmp_path / "b", Predicted(), concurrency=2)
        batches = [bench.submit(requests(6)), bench.submit(requests(6))]
        lane = BatchLane(
            *(bench.store, bench.folder, bench.engines, bench.options),
            max_body=10_000,
            estimator=Seen(bench.folder),
        )
        running = asyncio.create_task(lane.run())
        for batch_id in batches:
            await bench.ended(batch_id)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        assert sorted(asked) == sorted((batch_id, "m", "of-m") for batch_id in batches)

    asyncio.run(scenario())


def test_one_line_has_a_model_come_and_the_others_follow_once_it_is_there(tmp_path: Path) -> None:
    class Comes(Engines):
        """Its model has no engine before it is asked for, and is refused at first."""

        refused = 0
        came = False

        async def models(self) -> Any:
            served = await super().models()
            assert served is not None
            if self.came:
                return served
            return {"m": ServedModel(max_model_len=None, engines={}, on_demand=True)}

        async def execute(self, call: LineCall) -> LineAnswer:
            if self.came:
                return await super().execute(call)
            assert call.engine is None
            self.now += 1
            assert self.now == 1
            await asyncio.sleep(0.05)
            self.now -= 1
            self.refused += 1
            self.came = self.refused == 3
            return good(call) if self.came else LineAnswer(LineOutcome.AWAY, 503, b"{}")

    async def scenario() -> None:
        engines = Comes()
        bench = Bench(tmp_path / "b", engines)
        batch_id = bench.submit(requests(12))
        async with bench.running():
            batch = await bench.ended(batch_id)
        assert (batch.completed, batch.failed, engines.refused) == (12, 0, 3)

    asyncio.run(scenario())
