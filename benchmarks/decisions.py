"""How long do decisions of routing, rebalancing and placement take over many of a kind?

Nothing of it starts an engine. A routing decision is timed as a front end makes it, from a request
with its tokens to its booking: prompts of 1,024 tokens, of which the first half is one of 64
beginnings; replicas report once a second, and each has four requests. Each case runs in a process
of its own, in turn with the same case of another checkout, if one is given.

The last line of the output is one JSON object, also written to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.report import Spread, percentile
from benchmarks.result_files import machine, publish
from loomserve.platform.config import router

HERE = Path(__file__).parents[1]
POLICIES = tuple(router.POLICIES)
REPLICAS = (10, 100, 1_000)
PROPOSE = {
    "64": {"devices": 64, "a_node": 64, "least_gain": 0.05},
    "1000": {"devices": 1_000, "a_node": 8, "least_gain": 0.05},
    "1000_nothing_passes": {"devices": 1_000, "a_node": 8, "least_gain": 2.0},
}
HELR = {
    "64": {"devices": 64, "alike": False},
    "1000": {"devices": 1_000, "alike": False},
    "1000_alike": {"devices": 1_000, "alike": True},
}
_CASE_S = 500.0


class Tree:
    """A checkout whose code is timed."""

    def __init__(self, folder: Path) -> None:
        self._environment = {**os.environ, "PYTHONPATH": str(folder / "scripts/typing")}

    def run(self, case: str, **given: Any) -> Any:
        """What a case gives; None: it takes too long."""
        command = (sys.executable, "-m", "benchmarks.decision_cases", case, json.dumps(given))
        try:
            done = subprocess.run(
                command,
                cwd=HERE,
                env=self._environment,
                stdout=subprocess.PIPE,
                timeout=_CASE_S,
                check=True,
            )
        except subprocess.TimeoutExpired:
            return None
        return json.loads(done.stdout)


def decided(trees: Sequence[Tree], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each tree, percentiles of decisions by policy and replicas, over the runs."""
    runs: list[dict[str, list[list[float]]]] = [{} for _ in trees]
    for run in range(options.runs):
        for replicas in REPLICAS:
            for policy in POLICIES:
                for place in _in_turn(trees, run):
                    took = trees[place].run(
                        "decisions",
                        replicas=replicas,
                        policy=policy,
                        most=options.decisions,
                        most_s=options.seconds,
                    )
                    runs[place].setdefault(f"{policy}_{replicas}", []).append(took)
        print(f"run {run + 1}/{options.runs} of decisions", flush=True)
    return [
        {
            # Of each run; a policy that takes too long has fewer.
            "decisions_n": {name: min(map(len, of)) for name, of in found.items()},
        }
        | {
            f"decision_us_p{rank}": {
                name: asdict(Spread.of([percentile(took, rank) for took in of]))
                for name, of in found.items()
            }
            for rank in (50, 99)
        }
        for found in runs
    ]


def timed(trees: Sequence[Tree], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each tree, the pick at 1,000 replicas, and seconds of plans and maps."""
    found: list[dict[str, Any]] = []
    for place, tree in enumerate(trees):
        took = [
            percentile(tree.run("picks", replicas=1_000, most=options.decisions), 50)
            for _ in range(options.runs)
        ]
        found.append({"pick_us_1000": asdict(Spread.of(took))})
        for case, cases in (("propose", PROPOSE), ("helr", HELR)):
            for name, given in cases.items():
                if place == 0 or options.whole or name == "64":
                    runs = [tree.run(case, **given) for _ in range(options.runs)]
                    found[-1][f"{case}_s_{name}"] = _seconds(runs)
        print(f"timed {'this tree' if place == 0 else 'the other'}", flush=True)
    return found


def _in_turn(trees: Sequence[Tree], run: int) -> Sequence[int]:
    return range(len(trees)) if run % 2 == 0 else range(len(trees))[::-1]


def _seconds(runs: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    known = [run for run in runs if run is not None]
    if len(known) < len(runs):
        return {"more_than_s": _CASE_S}
    modes = known[0]["s"]
    took = (
        {mode: asdict(Spread.of([run["s"][mode] for run in known])) for mode in modes}
        if isinstance(modes, dict)
        else asdict(Spread.of([run["s"] for run in known]))
    )
    rest = {name: value for name, value in known[0].items() if name != "s"}
    return {"s": took, **rest}


def _same(this: dict[str, Any], other: dict[str, Any]) -> dict[str, bool]:
    """Whether both trees came to the same plans and maps."""
    return {
        name: this[name]["digest"] == other[name]["digest"]
        for name in other
        if "digest" in other[name]
    }


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decisions", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--against", type=Path, help="another checkout, timed in turn with this")
    parser.add_argument(
        "--whole", action="store_true", help="plans and maps of 1,000 devices of the other, too"
    )
    parser.add_argument("--runs", type=int, default=3, help="processes of each case")
    parser.add_argument("--decisions", type=int, default=3_000, help="decisions a run, at most")
    parser.add_argument("--seconds", type=float, default=10, help="of a run, at most, or 400 more")
    parsed = parser.parse_args(words)
    if parsed.runs < 1 or parsed.decisions < 1 or parsed.seconds <= 0:
        parser.error("--runs, --decisions and --seconds must be positive")
    if parsed.against is not None and not (parsed.against / "scripts/typing/loomserve").is_dir():
        parser.error(f"--against: {parsed.against} is no checkout of Loomserve")
    return parsed


def main() -> int:
    options = arguments()
    trees = [Tree(HERE)]
    if options.against is not None:
        trees.append(Tree(options.against.resolve()))
    facts = machine()
    found = [
        {**decisions, **times}
        for decisions, times in zip(decided(trees, options), timed(trees, options), strict=True)
    ]
    result: dict[str, Any] = {**found[0]}
    result |= {
        f"decision_us_p99_{replicas}": max(
            found[0]["decision_us_p99"][f"{policy}_{replicas}"]["median"] for policy in POLICIES
        )
        for replicas in REPLICAS
    }
    if len(found) > 1:
        result |= {"other": found[1], "same_plans_and_maps": _same(*found)}
    setup = {"runs": options.runs, "decisions": options.decisions}
    publish("decisions", result, setup=setup, facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
