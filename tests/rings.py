"""The rings of tests: what ``make test``, ``make test-engines`` and ``make test-all`` run.

``python -m tests.rings test engines`` runs each part of these rings in a run of pytest, whatever
came of those before, and tells how long each took. What parts say that run side by side is shown
once each has ended, and meanwhile how far it is.

A few tests that fail are run once more, alone: a machine that others share may stall anything for
minutes. Which passed only then is told, for such a test has a limit that it should not have.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.failures import FAILED_VARIABLE, failed_in
from tests.forks import collected, forks, processes

ROOT = Path(__file__).parents[1]
COMPILED = ("platform", "deployments", "routers", "kvstore", "benchmarks", "dashboards")
_CORES = os.cpu_count() or 1
_TELL_S = 30.0
_PLUGIN = ("-p", "tests.failures")
_MOST_AGAIN = 3
"""Tests of a part: where more fail, it is not for a neighbour."""


@dataclass(frozen=True)
class Outcome:
    passed: bool
    took_s: float
    failed: tuple[str, ...] = ()
    """Names of tests."""


@dataclass(frozen=True)
class Part:
    name: str
    select: str
    """Pytest's expression of markers."""
    folders: tuple[str, ...]
    processes: int = 0
    """That run its tests side by side."""
    options: tuple[str, ...] = ()
    imports_tests: bool = False
    """Whether these processes are forked from one that has imported the tests."""
    marker: str = ""
    """One of pytest that stands in each file of its tests; the others are not even imported."""

    def run(self, output: Path | None = None) -> Outcome:
        """Run its tests.

        Args:
            output: a file for what pytest says; None: the terminal's.
        """
        began = time.monotonic()
        with (
            collected(self.folders) if self.imports_tests else nullcontext() as environment,
            output.open("w") if output else nullcontext() as out,
            tempfile.TemporaryDirectory() as folder,
        ):
            file = Path(folder) / "failed"
            given = (environment or dict(os.environ)) | {FAILED_VARIABLE: str(file)}
            ended = subprocess.run(self.command, stdout=out, env=given, check=False)
            failed = failed_in(file)
        return Outcome(ended.returncode == 0, time.monotonic() - began, (*failed,))

    def again(self, tests: Sequence[str]) -> bool:
        """Whether these of its tests pass one after the other, while nothing else runs."""
        print(f"== {self.name}, alone once more: {', '.join(tests)}", flush=True)
        command = [sys.executable, "-m", "pytest", *tests]
        return subprocess.run(command, check=False).returncode == 0

    @property
    def command(self) -> list[str]:
        pytest = [sys.executable, "-m", "pytest", *_PLUGIN, "-m", self.select, *self.options]
        several = processes(self.processes) if self.processes else []
        return [*pytest, *several, *self.files]

    @property
    def files(self) -> list[str]:
        """Where its tests are: folders, or the files there that have its marker."""
        if not self.marker:
            return [*self.folders]
        found = (
            file for folder in self.folders for file in sorted((ROOT / folder).rglob("test_*.py"))
        )
        return [str(file.relative_to(ROOT)) for file in found if self.marker in file.read_text()]


UNIT_PROCESSES = min(2 * _CORES, 16)
"""Many of them wait for something, and memory has room for no more."""
# tests/groups.py says which tests stay together.
GROUPS = ("--dist", "loadgroup", "--no-loadscope-reorder")
_UNIT = (UNIT_PROCESSES, GROUPS, True)
# In two processes, of which each has a core for integration tests' engines.
_TWO = (2, (*GROUPS, "--durations=20"))
_ENGINES = "not slow and not claim and not simulated"

_SIMULATED, _CLAIM = "mark.simulated", "mark.claim("
_INTEGRATION, _E2E, _CLUSTER = "tests/integration", "tests/e2e", "tests/cluster"

Lane = tuple[Part, ...]
"""Parts of which one follows the other."""

RINGS: dict[str, tuple[Lane, ...]] = {
    "test": (
        (Part("unit tests", "not slow and not heavy", ("tests/unit",), *_UNIT),),
        # Platforms wait for much, and leave the cores to unit tests; two at a time would keep each
        # other waiting.
        (
            Part("simulated engines", "simulated and not slow", (_E2E,), *_TWO, marker=_SIMULATED),
            Part(
                "claims on real engines",
                "claim and not slow",
                (_INTEGRATION, _E2E),
                *_TWO,
                marker=_CLAIM,
            ),
        ),
    ),
    "engines": (
        (
            Part("heavy unit tests", "heavy and not slow", ("tests/unit",), *_UNIT),
            Part("engines", _ENGINES, (_INTEGRATION,), *_TWO),
            Part("platforms and clusters", _ENGINES, (_E2E, _CLUSTER), *_TWO),
        ),
    ),
    "slow": (
        (
            Part("slow unit tests", "slow", ("tests/unit",), *_UNIT),
            # One at a time, for some of them count what a machine does.
            Part("slow tests", "slow", (_INTEGRATION, _E2E, _CLUSTER, "tests/image")),
        ),
    ),
}
"""Of each ring, what runs side by side."""


def main(names: list[str]) -> int:
    """Run rings; 0 if all tests passed."""
    told, failed, all_began = [], False, time.monotonic()
    # What many processes import, none of which may keep what it compiles.
    compiled = [sys.executable, "-m", "compileall", "-qq", *COMPILED]
    with subprocess.Popen(compiled, cwd=ROOT) as compiling, forks():
        compiling.wait()
        for name in names:
            for part, ended in run(RINGS[name]).items():
                passed, said = _passed(part, ended)
                told.append(f"{part.name}: {said} in {ended.took_s:.0f} s")
                failed |= not passed
    told.append(
        f"all {'failed' if failed else 'passed'} in {round(time.monotonic() - all_began)} s"
    )
    print("", *(f"== {line}" for line in told), sep="\n", flush=True)
    return int(failed)


def _passed(part: Part, ended: Outcome) -> tuple[bool, str]:
    """Whether it did, and what is to be told of it."""
    if not ended.passed and 0 < len(ended.failed) <= _MOST_AGAIN and part.again(ended.failed):
        return True, f"passed, but only alone {', '.join(ended.failed)},"
    return ended.passed, "passed" if ended.passed else "failed"


def run(lanes: tuple[Lane, ...]) -> dict[Part, Outcome]:
    """Run lanes side by side; returns what came of each part."""
    ended = dict[str, Outcome]()

    def follow(lane: Lane, folder: Path | None = None) -> None:
        for part in lane:
            if folder is None:
                print(f"== {part.name}", flush=True)
            ended[part.name] = part.run(folder and folder / part.name)

    parts = [part for lane in lanes for part in lane]
    if len(lanes) == 1:
        follow(lanes[0])
        return {part: ended[part.name] for part in parts}
    with ThreadPoolExecutor(len(lanes)) as pool, tempfile.TemporaryDirectory() as folder:
        left = {pool.submit(follow, lane, Path(folder)) for lane in lanes}
        while left:
            done, left = wait(left, _TELL_S, "FIRST_COMPLETED")
            _show(Path(folder), ended)
            for each in done:
                each.result()
    return {part: ended[part.name] for part in parts}


def _show(folder: Path, ended: Container[str]) -> None:
    """What the parts have said that have ended, once, and how far the others are."""
    under_way = []
    for output in sorted(folder.iterdir()):
        if output.name in ended:
            print(f"== {output.name}\n{output.read_text()}", flush=True)
            output.unlink()
        else:
            under_way.append(f"{output.name}: {progress(output)}")
    if under_way:
        print(*under_way, sep=", ", flush=True)


def progress(output: Path) -> str:
    """How far pytest is, of which it tells at the end of a line."""
    shares = re.findall(r"\[ *(\d+%)\]$", output.read_text(), re.MULTILINE)
    return shares[-1] if shares else "begun"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
