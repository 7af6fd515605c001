"""Files of results say what they depend on, and only such are cited."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.report import Spread, percentiles
from benchmarks.result_files import (
    CITED,
    FACTS,
    SCHEMA,
    NotCitableError,
    Result,
    command,
    machine,
    publish,
    said_by,
)

CITED_FILES = sorted(CITED.glob("*.json"))


def test_a_file_says_what_it_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python", "-m", "benchmarks.x", "--trace", "/a/b"])
    setup = said_by(Namespace(trace=Path("/a/b.csv"), logs=Path("/tmp/l"), runs=2), "logs")
    figures = {"ratio": Spread.of([1.0, 3.0, 2.00004])}
    path = publish("x", {"n": 7, **vars(figures["ratio"])}, setup=setup, facts=machine(),
                   folder=tmp_path)  # fmt: skip
    written = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == written
    assert (written["schema"], written["benchmark"]) == (SCHEMA, "x")
    assert written["command"] == "python -m benchmarks.x --trace b"
    assert written["setup"] == {"trace": "b.csv", "runs": 2}
    assert written["all"] == [1.0, 3.0, 2.0]
    assert set(FACTS) <= written["machine"].keys()


def test_no_folder_of_a_machine_is_in_a_command() -> None:
    typed = ["/x/python", "-m", "benchmarks.overhead", "--arms", "loomserve:/home/me/old,loomserve",
             "--logs=/tmp/x"]  # fmt: skip
    told = "python -m benchmarks.overhead --arms loomserve:old,loomserve --logs=x"
    assert command(typed) == told


def test_a_percentile_comes_with_how_many_values_it_is_of() -> None:
    assert percentiles("ttft_ms", [1.0, 2.0, 3.0], (50,)) == {"ttft_ms_p50": 2.0, "ttft_ms_n": 3}
    assert percentiles("ttft_ms", []) == {"ttft_ms_p50": None, "ttft_ms_p99": None, "ttft_ms_n": 0}


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"dirty": True}, "changes"), ({"commit": None}, "commit"), ({"cpu": None}, "cpu")],
)
def test_what_cannot_be_traced_is_not_cited(changed: dict[str, object], why: str) -> None:
    facts = {"date": "2026-11-26", "commit": "a" * 40, "dirty": False, "cpu": "c", "cores": 2,
             "versions": {}}  # fmt: skip
    Result({"machine": facts}).check()
    # Older files have the facts among the figures.
    Result(facts).check()
    with pytest.raises(NotCitableError, match=why):
        Result({"machine": facts | changed}).check()


@pytest.mark.parametrize("path", CITED_FILES, ids=lambda path: path.stem)
def test_every_cited_file_can_be_traced(path: Path) -> None:
    Result.read(path).check()
    assert "/tmp" not in path.read_text()
    assert "/home" not in path.read_text()
