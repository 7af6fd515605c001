"""Files of results say what they depend on, and only such are cited."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.result_files import (
    CITED,
    FACTS,
    SCHEMA,
    NotCitableError,
    check,
    command,
    machine,
    publish,
)

CITED_FILES = sorted(CITED.glob("*.json"))


def test_a_file_says_what_it_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python", "-m", "benchmarks.x", "--trace", "/a/b"])
    setup = {"trace": Path("/a/b.csv"), "runs": 2}
    figures = {"n": 7, "all": (1.0, 3.0, 2.00004)}
    path = publish("x", figures, setup=setup, facts=machine(), folder=tmp_path)
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


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"dirty": True}, "changes"), ({"commit": None}, "commit"), ({"cpu": None}, "cpu")],
)
def test_what_cannot_be_traced_is_not_cited(changed: dict[str, object], why: str) -> None:
    facts = {"date": "2026-11-26", "commit": "a" * 40, "dirty": False, "cpu": "c", "cores": 2,
             "versions": {}}  # fmt: skip
    check({"machine": facts})
    with pytest.raises(NotCitableError, match=why):
        check({"machine": facts | changed})


@pytest.mark.parametrize("path", CITED_FILES, ids=lambda path: path.stem)
def test_every_cited_file_can_be_traced(path: Path) -> None:
    check(json.loads(path.read_text()))
    assert "/tmp" not in path.read_text()
    assert "/home" not in path.read_text()
