"""Lengths that are predicted from lines' texts: what the lane does with them, and without them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.batch.folder import BatchFolder
from loomserve.platform.batch.length_estimation import LengthEstimator
from loomserve.platform.batch.live import LiveBatch
from loomserve.platform.batch.policy.lengths import LineLength, LineLengths
from loomserve.platform.batch.policy.lines import check
from loomserve.platform.batch.policy.objects import BatchRecord
from loomserve.platform.lengths.predict.prediction import LengthQuery, Prediction

COMPLETIONS = "/v1/completions"


class Predictor:
    """Answers are as long as the prompt says."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.threads: set[int] = set()
        self.closed = False

    def count(self, text: str) -> int:
        return len(text.split())

    def predict(self, query: LengthQuery) -> Prediction:
        self.threads.add(threading.get_ident())
        tokens = int(query.user_input.split()[-1])
        self.asked.append(tokens)
        if tokens < 0:
            raise ZeroDivisionError
        return Prediction(tokens, tokens / 2, tokens * 2, tokens)

    def close(self) -> None:
        self.closed = True


def batch(path: Path, *bodies: dict[str, Any]) -> tuple[BatchFolder, LiveBatch]:
    folder = BatchFolder(path / "batch")
    folder.claim(0)
    given = [
        {"custom_id": f"{n}", "method": "POST", "url": COMPLETIONS, "body": {"model": "m", **body}}
        for n, body in enumerate(bodies)
    ]
    file = folder.blob("file-1")
    file.write_text("\n".join(map(json.dumps, given)))
    with file.open("rb") as stream:
        checked = check(stream, COMPLETIONS, max_lines=1000, max_body=1000)
    assert not checked.errors
    record = BatchRecord(
        id="batch_1",
        owner="",
        endpoint=COMPLETIONS,
        input_file_id="file-1",
        completion_window="1h",
        created_at=0,
        expires_at=3600,
    )
    return folder, LiveBatch(record, checked.lines, 0.0)


def estimate(folder: BatchFolder, live: LiveBatch, open_one: Callable[[str], Any]) -> None:
    estimator = LengthEstimator(folder, open_one)
    asyncio.run(estimator.estimate(live, "m", "its-predictor"))
    estimator.close()


def say(*tokens: int) -> list[dict[str, Any]]:
    return [{"prompt": f"say {count}", "max_tokens": 500} for count in tokens]


def test_lines_start_in_the_order_of_their_predicted_lengths(tmp_path: Path) -> None:
    folder, live = batch(tmp_path, *say(*range(100, 0, -1)))
    predictor = Predictor()
    estimate(folder, live, lambda name: predictor)
    found = [live.length(line) for line in live.lines("m")]
    assert found == [LineLength(2, n, n * 2) for n in range(1, 101)]
    assert predictor.threads.isdisjoint({threading.get_ident()})
    assert predictor.closed


def test_a_line_whose_length_cannot_be_predicted_counts_as_without_a_predictor(
    tmp_path: Path,
) -> None:
    ids = {"prompt": [1, 2, 3], "max_tokens": 7}
    folder, live = batch(tmp_path, *say(3), ids)
    (unpredicted,) = [line for line in live.lines("m") if line.max_tokens == 7]
    before = live.length(unpredicted)
    estimate(folder, live, lambda name: Predictor())
    assert live.length(unpredicted) == before
    assert before.tokens == before.high == 7


def test_a_predictor_that_fails_on_a_line_or_is_gone_takes_nothing_from_the_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, live = batch(tmp_path, *say(*range(1, 33), -1))
    predictor = Predictor()
    estimate(folder, live, lambda name: predictor)
    lines = live.lines("m")
    assert len(lines) == 33
    assert sorted(live.length(line).tokens for line in lines) == [*range(1, 33), 500]
    assert "no length for line 33 of batch_1" in caplog.text
    assert predictor.closed

    def gone(name: str) -> Any:
        raise ConfigError(f"there is no length predictor {name!r}")

    estimate(folder, live, gone)
    assert "'its-predictor'" in caplog.text


def test_what_a_line_allows_bounds_its_prediction_and_finished_lines_do_not_change_it() -> None:
    def line(number: int, max_tokens: int) -> Any:
        return SimpleNamespace(number=number, size=30, max_tokens=max_tokens)

    lengths = LineLengths()
    lengths.set_estimates({1: LineLength(10, 40, 80), 2: LineLength(10, 40, 80)})
    assert lengths.predict(line(1, 60), 1000) == LineLength(10, 40, 60)
    assert lengths.predict(line(2, 500), 1000) == LineLength(10, 40, 80)
    for number in range(10, 20):
        lengths.finished(line(number, 500), 6, 100)
    assert lengths.predict(line(2, 500), 1000) == LineLength(10, 40, 80)
    assert lengths.predict(line(3, 500), 1000) == LineLength(6, 100, 100)
