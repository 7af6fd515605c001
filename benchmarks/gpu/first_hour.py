"""``make gpu-first-hour``: what waits for a GPU, call after call, the most worth knowing first.

A call is some steps of ``make gpu-check`` with variables. Each step's file lies in ``OUT/CALL/``,
and ``OUT/calls.json`` says of each call at which commit it ran, when, on what, and how its steps
ended. One that ended well is not made again at the same commit, so that an hour in parts goes on;
``COMMIT`` names that where git does not. ``BUDGET`` (3,600 seconds) begins no call that may not end
within it, ``CALLS`` chooses some, and ``DRY=1`` only says what would be run. Without a GPU steps
are interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.__main__ import STEPS
from benchmarks.gpu.runner import Outcome, Step, run

Steps = Callable[[Sequence[Step], Path, float], list[Outcome]]


@dataclass(frozen=True)
class Call:
    """``shows``: what is known afterwards."""

    name: str
    steps: tuple[str, ...]
    shows: str
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.chosen)

    @property
    def chosen(self) -> list[Step]:
        there = {step.name: step for step in STEPS}
        return [there[name] for name in self.steps]


CALLS = (
    Call("pages", ("compile", "probe", "flags", "pages"), "what a page costs to map beside a step"),
    Call("loans", ("kernels", "lend", "processes"), "a loan's pickup, service and wait"),
    Call(
        "engines",
        ("engines",),
        "what two engines lose by a loan, and the blocks that heads away leave",
        {"LAYOUT": "LHBNC"},
    ),
    Call("platform", ("platform",), "tokens a second beside vLLM's server", {"MODEL_RUNNER": "1"}),
    Call("runner2", ("platform",), "the same, by vLLM's second runner", {"MODEL_RUNNER": "2"}),
    Call("store", ("store", "serve", "graphs"), "copies, and engines with and without the store"),
)


def made(calls: Sequence[Call], out: Path, budget_s: float, steps: Steps = run) -> int:
    """Make those that have not ended well at this commit; the exit status is 1 if one failed."""
    begin, failed, commit = time.monotonic(), False, _commit()
    for call in calls:
        before, left = records(out), budget_s - (time.monotonic() - begin)
        record = before.get(call.name)
        if (
            record
            and commit
            and record["commit"] == commit
            and set(record["steps"].values()) == {"done"}
        ):
            print(f"{call.name}: ran at this commit, {record['at']}", flush=True)
        elif call.seconds > left:
            print(f"{call.name}: may take {call.seconds:.0f} s, and {left:.0f} are left")
        else:
            print(f"{call.name}: {call.shows}", flush=True)
            at = datetime.now(UTC).isoformat(timespec="seconds")
            with _set(call.variables):
                outcomes = steps(call.chosen, out / call.name, left)
            ended = {each.name: each.state for each in outcomes}
            failed |= "failed" in ended.values()
            record = {"commit": commit, "at": at, "on": _form(out / call.name), "steps": ended}
            (out / "calls.json").write_text(json.dumps({**before, call.name: record}, indent=2))
    return int(failed)


def records(out: Path) -> dict[str, Any]:
    file = out / "calls.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def _ended_well(record: Mapping[str, Any], commit: str) -> bool:
    return record["commit"] == commit != "" and {*record["steps"].values()} == {"done"}


def _commit() -> str:
    """Empty: nobody knows."""
    git = ("git", "rev-parse", "HEAD")
    said = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get("COMMIT") or said


def _form(folder: Path) -> str:
    """What its steps ran on, as they say."""
    found = (json.loads(file.read_text())["found"] for file in sorted(folder.glob("*.json")))
    return next((f"{each['device']}, {each['form']}" for each in found if each), "nothing")


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    yield
    os.environ.clear()
    os.environ.update(before)


def main() -> int:
    out = Path(os.environ.get("OUT") or "benchmarks/results/gpu-first-hour")
    names = [name for name in os.environ.get("CALLS", "").split(",") if name]
    if unknown := set(names) - {call.name for call in CALLS}:
        there = ", ".join(call.name for call in CALLS)
        print(f"CALLS: there is no {', '.join(sorted(unknown))}, but {there}")
        return 2
    calls = [call for call in CALLS if not names or call.name in names]
    if os.environ.get("DRY"):
        for call in calls:
            ran = records(out).get(call.name, {}).get("commit") or "never"
            given = " ".join(f"{name}={value}" for name, value in call.variables.items())
            print(
                f"{call.name:<8} {call.seconds:4.0f} s  {given} {','.join(call.steps)}, ran: {ran}"
            )
        return 0
    out.mkdir(parents=True, exist_ok=True)
    return made(calls, out, float(os.environ.get("BUDGET") or 3600))


if __name__ == "__main__":
    sys.exit(main())
