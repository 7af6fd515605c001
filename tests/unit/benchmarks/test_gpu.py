"""Steps on a GPU: their limits, the budget, why one is skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import bundle, first_hour
from benchmarks.gpu.first_hour import CALLS, Call, made, records
from benchmarks.gpu.runner import Outcome, Step, run
from tests.waiting import PATIENCE_S

# It takes long, so that it begins first.
pytestmark = pytest.mark.xdist_group("steps on a GPU")

ROOT = Path(__file__).parents[3]
NO_TRITON = "Triton, which interprets and compiles the kernels, is not installed"
GOOD = 'import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(\'{"summary": "fine"}\')'


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of steps, which tests write."""
    package = tmp_path / "steps"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return package


def step(package: Path, name: str, code: str, seconds: float = 100, *needs: str) -> Step:
    (package / f"{name}.py").write_text(code)
    return Step(name, seconds, needs, package="steps")


def report(out: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return found


def test_a_step_that_fails_leaves_what_it_found_and_the_next_one_runs(
    steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [
        step(steps, "broken", f"{GOOD}; print('so far'); sys.exit('no such kernel')"),
        step(steps, "silent", "pass"),
        step(steps, "good", GOOD),
    ]
    outcomes = run(chosen, tmp_path / "out", budget_s=1000)
    assert [outcome.state for outcome in outcomes] == ["failed", "failed", "done"]
    assert outcomes[0].detail == "ended with 1: no such kernel"
    assert outcomes[1].detail == "wrote nothing"
    assert report(tmp_path / "out", "broken")["found"] == {"summary": "fine"}
    assert report(tmp_path / "out", "good")["outcome"]["detail"] == "fine"
    assert len(list((tmp_path / "out").iterdir())) == 3
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_step_that_takes_too_long_is_ended(steps: Path, tmp_path: Path) -> None:
    slow = step(steps, "slow", "import time; time.sleep(600)", 0.5)
    begin = time.monotonic()
    (outcome,) = run([slow], tmp_path / "out", budget_s=1000)
    assert outcome.state == "failed"
    assert "took longer" in outcome.detail
    assert time.monotonic() - begin < PATIENCE_S


def test_what_may_not_end_within_the_budget_does_not_begin(steps: Path, tmp_path: Path) -> None:
    chosen = [step(steps, "long", GOOD, 500), step(steps, "short", GOOD, 100)]
    outcomes = run(chosen, tmp_path / "out", budget_s=400)
    assert [outcome.state for outcome in outcomes] == ["skipped", "done"]
    assert outcomes[0].detail.startswith("may take 500 s, and")
    assert report(tmp_path / "out", "long")["found"] is None


def test_a_step_whose_module_is_missing_says_which(steps: Path, tmp_path: Path) -> None:
    chosen = [step(steps, "lacking", GOOD, 20, "no_such_module", "pytest")]
    (outcome,) = run(chosen, tmp_path / "out", budget_s=1000)
    assert (outcome.state, outcome.detail) == ("skipped", "there is no no_such_module")


def check(out: Path, steps: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"],
        cwd=ROOT,
        env={**os.environ, "OUT": str(out), "STEPS": steps, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_unknown_step_is_named(tmp_path: Path) -> None:
    result = check(tmp_path, "flags,weave")
    assert result.returncode == 2
    assert "there is no weave" in result.stdout


def test_one_step_alone_is_run_and_printed_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    result = check(tmp_path, "probe")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.split()[:2] == ["probe", "done"]
    assert len(result.stdout.splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["probe.json"]


class Ended:
    """Steps that end as tests say, and what was asked of them."""

    def __init__(self, **states: str) -> None:
        self.states = states
        self.asked: list[tuple[str, str, str | None]] = []

    def __call__(self, steps: Sequence[Step], out: Path, budget_s: float) -> list[Outcome]:
        self.asked += [(out.name, step.name, os.environ.get("LAYOUT")) for step in steps]
        states = [(step.name, self.states.get(step.name, "done")) for step in steps]
        return [Outcome(name, state, 1.0, "") for name, state in states]


PAGES = Call("first", ("compile", "pages"), "pages")
ENGINES = Call("second", ("engines",), "engines", {"LAYOUT": "LBHNC"})


def test_calls_are_made_once_at_a_commit_in_order_and_with_their_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMIT", "a")
    steps = Ended(engines="failed")
    assert made([PAGES, ENGINES], tmp_path, 1000, steps) == 1
    first = [("first", "compile", None), ("first", "pages", None)]
    second = [("second", "engines", "LBHNC")]
    assert steps.asked == first + second
    assert records(tmp_path)["second"]["steps"] == {"engines": "failed"}
    # What failed is made again, and all of it where the code is another.
    steps.states.clear()
    assert made([PAGES, ENGINES], tmp_path, 1000, steps) == 0
    assert steps.asked == first + 2 * second
    monkeypatch.setenv("COMMIT", "b")
    assert made([PAGES, ENGINES], tmp_path, 1000, steps) == 0
    assert steps.asked == [*first, *second, *second, *first, *second]
    assert {each["commit"] for each in records(tmp_path).values()} == {"b"}


def test_a_call_that_may_not_end_within_the_budget_does_not_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Ended()
    assert made([ENGINES, PAGES], tmp_path, 200, steps) == 0
    assert {call for call, *_ in steps.asked} == {"first"}
    assert "second: may take 240 s, and 200 are left" in capsys.readouterr().out


def test_the_calls_are_said_without_a_run_and_stand_in_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "none"))
    monkeypatch.setenv("DRY", "1")
    assert first_hour.main() == 0
    said = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs/lending_gpus.md").read_text()
    for call, line in zip(CALLS, said, strict=True):
        assert line.split()[0] == call.name
        assert f"`{','.join(call.steps)}`" in page
        assert line.endswith("never")
    assert sum(call.seconds for call in CALLS) <= 3600
    assert not (tmp_path / "none").exists()


def test_a_part_that_is_too_large_to_send_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "MOST_BYTES", 2**20)
    noise = os.urandom(2**20 * 5 // 4)
    # The second time in place of the first.
    for _ in range(2):
        pieces = bundle.pack("v", [("noise", noise)], tmp_path)
        assert [piece.parent.name for piece in pieces] == ["v0", "v1"]
        assert {file.name for file in tmp_path.iterdir()} == {"v0", "v1"}
    (tmp_path / "whole").write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    with tarfile.open(tmp_path / "whole") as archive:
        found = archive.extractfile("noise")
        assert found is not None
        assert found.read() == noise


def test_all_wheels_of_the_bundle_are_pinned() -> None:
    wheels = (*bundle.WHEELS, *bundle.PLATFORM_WHEELS, "vllm", "ray")
    assert len({*wheels}) == len(wheels)
    assert bundle.pinned(wheels).count("==") == len(wheels)
    text = bundle.pinned(["vllm"])
    assert "--hash=sha256:" in text
    with pytest.raises(ValueError, match=r"hashes\.txt has no no-such"):
        bundle.pinned(["no-such"])
