"""The lane's store: its state machine, and that each line is answered once, whatever dies when."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loomserve.platform.base.errors import BadRequest, Conflict, NotFound, StartError
from loomserve.platform.batch.policy.lines import BatchLine
from loomserve.platform.batch.policy.objects import (
    CANCELLABLE,
    ENDED,
    INPUT,
    TRANSITIONS,
    BatchRecord,
    BatchStatus,
    FileRecord,
    LineError,
)
from loomserve.platform.batch.store.lines import StoredAnswer
from loomserve.platform.batch.store.store import BatchStore

ALICE, BOB = "alice", "bob"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    store = BatchStore(tmp_path / "lane.sqlite")
    yield store
    store.close()


def a_file(name: str = "file-1", owner: str = ALICE, **changes: object) -> FileRecord:
    given = {"id": name, "owner": owner, "filename": "in.jsonl", "purpose": INPUT, "bytes": 3}
    return FileRecord.model_validate({**given, "created_at": 1, **changes})


def a_batch(name: str = "batch_1", owner: str = ALICE, **changes: object) -> BatchRecord:
    given = {"id": name, "owner": owner, "endpoint": "/v1/completions", "created_at": 1}
    given |= {"input_file_id": "file-1", "completion_window": "24h", "expires_at": 86_401}
    return BatchRecord.model_validate({**given, **changes})


def some_lines(count: int) -> list[BatchLine]:
    return [BatchLine(n, f"c{n}", "m", 10 * n, 10, None, 1) for n in range(1, count + 1)]


def an_answer(number: int, ok: bool = True, text: bytes = b"{}") -> StoredAnswer:
    return StoredAnswer("batch_1", number, ok, text, 3, 1, 2)


def begun(store: BatchStore, lines: int = 3) -> None:
    store.files.add(a_file())
    store.batches.add(a_batch())
    assert store.batches.begin("batch_1", some_lines(lines), 2)


def test_a_batch_goes_from_validating_to_completed_and_counts_its_answers(
    store: BatchStore,
) -> None:
    begun(store)
    assert store.lines.answer([an_answer(1), an_answer(2, ok=False)]) == [True, True]
    assert [line.number for line in store.lines.unanswered("batch_1")] == [3]
    assert store.lines.answer([an_answer(3)]) == [True]
    assert store.batches.begin_to_end("batch_1", BatchStatus.COMPLETED, 5)
    batch = store.batches.finish("batch_1", a_file("file-2", purpose="batch_output"), None, 6)
    assert (batch.status, batch.completed_at, batch.output_file_id) == ("completed", 6, "file-2")
    shown = batch.to_openai()
    assert shown["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert shown["usage"]["total_tokens"] == 15
    assert store.files.get(ALICE, "file-2").purpose == "batch_output"
    assert list(store.lines.answers("batch_1")) == []


def test_a_line_is_answered_once_even_within_one_transaction(store: BatchStore) -> None:
    begun(store)
    first, second = an_answer(1, text=b"first"), an_answer(1, ok=False, text=b"second")
    assert store.lines.answer([first, second]) == [True, False]
    assert store.lines.answer([second]) == [False]
    assert next(store.lines.answers("batch_1")) == ("c1", True, b"first")
    assert store.batches.get(None, "batch_1").completed == 1


def test_a_line_that_does_not_exist_has_no_answer(store: BatchStore) -> None:
    begun(store)
    assert store.lines.answer([an_answer(99)]) == [False]
    assert store.lines.failed_attempt("batch_1", 99) == 0


def test_a_batch_that_ends_takes_no_answers_and_counts_the_rest_as_failed(
    store: BatchStore,
) -> None:
    begun(store)
    store.lines.answer([an_answer(1)])
    assert store.batches.cancel(ALICE, "batch_1", 3).status is BatchStatus.CANCELLING
    assert store.lines.answer([an_answer(2)]) == [False]
    batch = store.batches.finish("batch_1", None, None, 4)
    assert (batch.status, batch.completed, batch.failed) == (BatchStatus.CANCELLED, 1, 2)


def test_what_was_cancelled_is_neither_begun_nor_failed_nor_ended_otherwise(
    store: BatchStore,
) -> None:
    store.files.add(a_file())
    store.batches.add(a_batch())
    store.batches.cancel(ALICE, "batch_1", 2)
    assert store.batches.cancel(ALICE, "batch_1", 3).cancelling_at == 2
    assert not store.batches.begin("batch_1", some_lines(1), 4)
    assert not store.batches.fail("batch_1", [LineError(code="x", message="y")], 4)
    assert not store.batches.begin_to_end("batch_1", BatchStatus.EXPIRED, 4)
    assert store.lines.unanswered("batch_1") == []


def test_what_has_ended_cannot_be_cancelled(store: BatchStore) -> None:
    store.files.add(a_file())
    store.batches.add(a_batch())
    store.batches.fail("batch_1", [LineError(code="x", message="y", line=1)], 2)
    with pytest.raises(Conflict, match="status 'failed'"):
        store.batches.cancel(ALICE, "batch_1", 3)
    (error,) = store.batches.get(ALICE, "batch_1").to_openai()["errors"]["data"]
    assert error == {"code": "x", "message": "y", "param": None, "line": 1}


def test_a_key_sees_its_own_files_and_batches_only(store: BatchStore) -> None:
    begun(store)
    store.files.add(a_file("file-9", BOB))
    for ask in (
        lambda: store.files.get(BOB, "file-1"),
        lambda: store.files.delete(BOB, "file-1"),
        lambda: store.batches.get(BOB, "batch_1"),
        lambda: store.batches.cancel(BOB, "batch_1", 3),
        lambda: store.batches.page(BOB, after="batch_1", limit=5),
    ):
        with pytest.raises(NotFound):
            ask()
    with pytest.raises(BadRequest, match="No such File"):
        store.batches.add(a_batch("batch_2", BOB))
    assert store.batches.page(BOB, after=None, limit=5) == ([], False)
    files, _ = store.files.page(BOB, purpose=None, after=None, limit=5, newest_first=True)
    assert [file.id for file in files] == ["file-9"]
    assert store.batches.page(None, after=None, limit=5)[0][0].owner == ALICE


def test_only_input_files_make_batches(store: BatchStore) -> None:
    store.files.add(a_file(purpose="batch_output"))
    with pytest.raises(BadRequest, match="upload it with purpose=batch"):
        store.batches.add(a_batch())


def test_a_file_that_a_batch_reads_stays(store: BatchStore) -> None:
    store.files.add(a_file(expires_at=10))
    store.batches.add(a_batch())
    with pytest.raises(Conflict, match="cancel the batch"):
        store.files.delete(ALICE, "file-1")
    assert store.files.expire(11) == []
    store.batches.fail("batch_1", [], 11)
    assert store.files.expire(11) == ["file-1"]
    assert store.files.ids() == []


@given(count=st.integers(0, 12), limit=st.integers(1, 5), newest_first=st.booleans())
@settings(max_examples=6, deadline=None)
def test_pages_show_everything_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, count: int, limit: int, newest_first: bool
) -> None:
    store = BatchStore(tmp_path_factory.mktemp("pages") / "db")
    ids = [f"file-{n}" for n in range(count)]
    for file_id in ids:
        store.files.add(a_file(file_id))
        store.files.add(a_file(f"{file_id}-of-bob", BOB))
    seen: list[str] = []
    more = True
    while more:
        page, more = store.files.page(
            ALICE,
            purpose=INPUT,
            after=seen[-1] if seen else None,
            limit=limit,
            newest_first=newest_first,
        )
        seen += [file.id for file in page]
    assert seen == (ids[::-1] if newest_first else ids)
    store.close()


def test_old_batches_are_forgotten_once_they_have_ended(store: BatchStore) -> None:
    begun(store)
    store.batches.forget(before=10)
    store.batches.get(ALICE, "batch_1")
    store.batches.cancel(ALICE, "batch_1", 3)
    store.batches.finish("batch_1", None, None, 4)
    store.batches.forget(before=1)
    store.batches.get(ALICE, "batch_1")
    store.batches.forget(before=10)
    with pytest.raises(NotFound):
        store.batches.get(ALICE, "batch_1")


def test_what_is_no_database_or_a_newer_one_is_refused_with_a_way_out(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"not a database at all" * 100)
    with pytest.raises(StartError, match=r"batch\.folder"):
        BatchStore(broken)
    BatchStore(tmp_path / "newer").close()
    with closing(sqlite3.connect(tmp_path / "newer")) as newer:
        newer.execute("PRAGMA user_version = 99")
    with pytest.raises(StartError, match="newer Loomserve"):
        BatchStore(tmp_path / "newer")


class StoreModel(RuleBasedStateMachine):
    """The store against a model of one batch in a few variables, through restarts."""

    LINES = 4

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = BatchStore(Path(self.folder.name) / "db")
        self.store.files.add(a_file())
        self.store.batches.add(a_batch())
        self.status = BatchStatus.VALIDATING
        self.ending: BatchStatus | None = None
        self.answered: dict[int, bool] = {}
        self.now = 1

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = BatchStore(Path(self.folder.name) / "db")

    @rule()
    def begin(self) -> None:
        if self.status is BatchStatus.VALIDATING:
            assert self.store.batches.begin("batch_1", some_lines(self.LINES), self.now)
            self.status = BatchStatus.IN_PROGRESS
        else:
            assert not self.store.batches.begin("batch_1", some_lines(self.LINES), self.now)

    @rule(number=st.integers(1, LINES), ok=st.booleans())
    def answer(self, number: int, ok: bool) -> None:
        counts = self.status is BatchStatus.IN_PROGRESS and number not in self.answered
        assert self.store.lines.answer([an_answer(number, ok)]) == [counts]
        if counts:
            self.answered[number] = ok

    @rule()
    def cancel(self) -> None:
        if self.status in CANCELLABLE:
            self.status = BatchStatus.CANCELLING
        if self.status is BatchStatus.CANCELLING:
            assert self.store.batches.cancel(ALICE, "batch_1", self.now).status is self.status
        else:
            with pytest.raises(Conflict):
                self.store.batches.cancel(ALICE, "batch_1", self.now)

    @rule(ending=st.sampled_from([BatchStatus.COMPLETED, BatchStatus.EXPIRED]))
    def begin_to_end(self, ending: BatchStatus) -> None:
        may = BatchStatus.FINALIZING in TRANSITIONS[self.status]
        assert self.store.batches.begin_to_end("batch_1", ending, self.now) is may
        if may:
            self.status, self.ending = BatchStatus.FINALIZING, ending

    @precondition(lambda self: self.status in (BatchStatus.FINALIZING, BatchStatus.CANCELLING))
    @rule()
    def finish(self) -> None:
        self.ended_with = list(self.store.lines.answers("batch_1"))
        self.store.batches.finish("batch_1", None, None, self.now)
        assert {i for i, (_, _, text) in enumerate(self.ended_with, 1) if text} == set(
            self.answered
        )
        self.status = self.ending or BatchStatus.CANCELLED

    @invariant()
    def the_store_says_what_the_model_says(self) -> None:
        batch = self.store.batches.get(ALICE, "batch_1")
        assert batch.status is self.status
        good = sum(self.answered.values())
        assert batch.completed == good
        if self.status not in ENDED:
            assert batch.failed == len(self.answered) - good
            unanswered = {line.number for line in self.store.lines.unanswered("batch_1")}
            assert len(unanswered) == batch.unanswered
            assert not unanswered & set(self.answered)
        else:
            assert batch.completed + batch.failed == batch.total

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


TestStoreModel = StoreModel.TestCase
TestStoreModel.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)


WRITER = """
import sys
from pathlib import Path
from loomserve.platform.batch.store.lines import StoredAnswer
from loomserve.platform.batch.store.store import BatchStore

store = BatchStore(Path(sys.argv[1]))
print("open", flush=True)
for line in store.lines.unanswered("batch_1"):
    text = f"{line.custom_id} of {sys.argv[2]}".encode()
    store.lines.answer([StoredAnswer("batch_1", line.number, line.number % 3 > 0, text, 1, 0, 1)])
    print(line.number, flush=True)
"""


def test_a_writer_killed_at_random_times_loses_nothing_it_has_told_of(tmp_path: Path) -> None:
    path, lines = tmp_path / "db", 400
    store = BatchStore(path)
    begun(store, lines)
    store.close()
    random_times = random.Random(7)
    told: dict[int, str] = {}
    runs = 0
    while len(told) < lines and runs < 10:
        name = f"run {runs}"
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), name],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "open\n"
            if runs < 3:
                time.sleep(random_times.uniform(0.0, 0.03))
                writer.send_signal(signal.SIGKILL)
            told |= {int(number): name for number in writer.stdout.read().split("\n")[:-1]}
        runs += 1
        store = BatchStore(path)
        answers = list(store.lines.answers("batch_1"))
        batch = store.batches.get(None, "batch_1")
        store.close()
        kept = {n: text.decode() for n, (_, _, text) in enumerate(answers, 1) if text}
        assert all(kept[number].endswith(name) for number, name in told.items())
        assert batch.completed + batch.failed == len(kept) == batch.input_tokens
        assert batch.completed == sum(number % 3 > 0 for number in kept)
        told = {number: text.partition(" of ")[2] for number, text in kept.items()}
    assert len(told) == lines
    assert runs > 3
