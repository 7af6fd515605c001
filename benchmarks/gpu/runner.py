"""Steps, each in a process of its own with a limit, within a budget of seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MOST_PRINTED = 20_000
"""Characters that a result keeps of what a failed step printed."""


@dataclass(frozen=True)
class Step:
    """A module of this package that measures one thing and writes it as JSON.

    Attributes:
        name: ``python -m PACKAGE.NAME FILE`` runs it.
        seconds: After so many it is ended.
        needs: Modules that must be there; without one the step is skipped.
    """

    name: str
    seconds: float
    needs: tuple[str, ...] = ("torch", "triton")
    package: str = "benchmarks.gpu"


@dataclass(frozen=True)
class Outcome:
    """How a step ended.

    Attributes:
        state: ``done``, ``skipped`` or ``failed``.
        detail: Why it was skipped or failed, or what it found in one line.
        printed: The end of what a step printed that failed.
    """

    name: str
    state: str
    seconds: float
    detail: str
    printed: str = ""

    def line(self) -> str:
        return f"{self.name:<8} {self.state:<7} {self.seconds:6.1f} s  {self.detail}"


def run(steps: Sequence[Step], out: Path, budget_s: float) -> list[Outcome]:
    """Run the steps in turn, and print a line for each as it ends.

    A step whose limit does not fit into what is left of the budget is not started. One that fails
    stops none of the others.

    Args:
        out: a folder, which gets ``NAME.json`` of each step: its outcome, and what it found.
    """
    out.mkdir(parents=True, exist_ok=True)
    begin, outcomes = time.monotonic(), []
    for step in steps:
        left = budget_s - (time.monotonic() - begin)
        outcome, found = _run(step, out, left)
        report = {"outcome": asdict(outcome), "found": found}
        (out / f"{step.name}.json").write_text(json.dumps(report, indent=2) + "\n")
        print(outcome.line(), flush=True)
        outcomes.append(outcome)
    return outcomes


def _run(step: Step, out: Path, left_s: float) -> tuple[Outcome, dict[str, Any] | None]:
    missing = [name for name in step.needs if not _there(name)]
    if missing:
        return Outcome(step.name, "skipped", 0.0, f"there is no {', '.join(missing)}"), None
    if step.seconds > left_s:
        reason = f"may take {step.seconds:.0f} s, and {max(0.0, left_s):.0f} are left"
        return Outcome(step.name, "skipped", 0.0, reason), None
    file = out / f"{step.name}.part"
    file.unlink(missing_ok=True)
    begin = time.monotonic()
    failure, printed = _failure(step, file)
    seconds = time.monotonic() - begin
    found: dict[str, Any] | None = None
    # What a step wrote before it failed is still worth having.
    if file.exists():
        found = json.loads(file.read_text())
        file.unlink()
    if failure is None and found is None:
        failure = "wrote nothing"
    if failure is not None:
        return Outcome(step.name, "failed", seconds, failure, printed[-MOST_PRINTED:]), found
    assert found is not None
    return Outcome(step.name, "done", seconds, str(found.get("summary", ""))), found


def _failure(step: Step, file: Path) -> tuple[str | None, str]:
    """Run the step's process; None if it ended well, else why not, and what it printed."""
    command = [sys.executable, "-m", f"{step.package}.{step.name}", str(file)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=step.seconds)
        except subprocess.TimeoutExpired:
            # A process that it began holds its output, too.
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
            return f"took longer than {step.seconds:.0f} s", printed
    if process.returncode == 0:
        return None, printed
    lines = printed.strip().splitlines()
    last = lines[-1] if lines else "it printed nothing"
    return f"ended with {process.returncode}: {last}", printed


def _there(module: str) -> bool:
    # find_spec() of a package imports it, and torch takes long.
    return any((Path(folder) / module).is_dir() for folder in sys.path)
