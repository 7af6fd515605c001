"""How long do decisions of routing, rebalancing and placement take over many of a kind?

Nothing of it starts an engine. A routing decision is timed as a front end makes it, from a request
with its tokens to its booking, in CPU time: prompts of 1,024 tokens, of which the first half is one
of 64 beginnings; replicas report once a second, and each has four requests. So is the taking in of
a load that an engine tells with its outputs. And do loads that are told at every step route as well
as reports, over simulated engines? Each case runs in a process of its own
(:mod:`benchmarks.decision_cases`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import parser_of, percentile, run, spread
from loomserve.platform.config import router
from tests.routed_fleet import SET_UPS

POLICIES = tuple(router.ROUTING_POLICIES.own)
REPLICAS = (10, 100, 1_000, 10_000)
TIMED: dict[str, tuple[str, dict[str, Any]]] = {
    "propose_s_64": ("propose", {"devices": 64, "a_node": 64, "least_gain": 0.05}),
    "propose_s_1000": ("propose", {"devices": 1_000, "a_node": 8, "least_gain": 0.05}),
    "propose_s_1000_nothing_passes": (
        "propose",
        {"devices": 1_000, "a_node": 8, "least_gain": 2.0},
    ),
    "helr_s_64": ("helr", {"devices": 64, "alike": False}),
    "helr_s_1000": ("helr", {"devices": 1_000, "alike": False}),
    "helr_s_1000_alike": ("helr", {"devices": 1_000, "alike": True}),
}
"""Figures in seconds: the case, and what it is given."""
_CASE_S = 500.0


def case(name: str, **given: Any) -> Any:
    """What a case gives, in a process of its own; None: it takes too long."""
    command = (sys.executable, "-m", "benchmarks.decision_cases", name, json.dumps(given))
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=_CASE_S, check=True)
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout)


def decided(options: argparse.Namespace) -> dict[str, Any]:
    """Percentiles of decisions by policy and replicas, over the runs."""
    took: dict[str, list[list[float]]] = {}
    for number in range(options.runs):
        for replicas, policy in itertools.product(REPLICAS, POLICIES):
            given = {"replicas": replicas, "policy": policy}
            of = case("decisions", **given, most=options.decisions, most_s=options.seconds)
            took.setdefault(f"{policy}_{replicas}", []).append(of)
        print(f"run {number + 1}/{options.runs} of decisions", flush=True)
    return {
        # Of each run; a policy that takes too long has fewer.
        "decisions_n": {name: min(map(len, of)) for name, of in took.items()},
        **{
            f"decision_us_p{rank}": {
                name: spread(percentile(each, rank) for each in of) for name, of in took.items()
            }
            for rank in (50, 99)
        },
    }


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    found = decided(options)
    for replicas in REPLICAS:
        p99 = (found["decision_us_p99"][f"{policy}_{replicas}"]["median"] for policy in POLICIES)
        found[f"decision_us_p99_{replicas}"] = max(p99)
    tells = [
        case("tells", replicas=REPLICAS[-1], policy="prefix_aware", most=options.decisions)
        for _ in range(options.runs)
    ]
    found["told_us_p50_10000"] = spread(percentile(took, 50) for took in tells)
    found["told_us_p99_10000"] = spread(percentile(took, 99) for took in tells)
    picks = [case("picks", replicas=1_000, most=options.decisions) for _ in range(options.runs)]
    found["pick_us_1000"] = spread(percentile(took, 50) for took in picks)
    ratios = {name: case("told", set_up=name) for name in SET_UPS}
    found["told_over_reported"] = ratios
    found["told_over_reported_p99"] = max(ratios.values())
    for name, (of, given) in TIMED.items():
        found[name] = _seconds([case(of, **given) for _ in range(options.runs)])
        print(f"{name}: {found[name]}", flush=True)
    return found


def _seconds(runs: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    known = [one for one in runs if one is not None]
    if len(known) < len(runs):
        return {"more_than_s": _CASE_S}
    modes = known[0]["s"]
    took = (
        {mode: spread(one["s"][mode] for one in known) for mode in modes}
        if isinstance(modes, dict)
        else spread(one["s"] for one in known)
    )
    return {**known[0], "s": took}


def main() -> int:
    parser = parser_of("decisions", __doc__)
    parser.add_argument("--runs", type=int, default=3, help="processes of each case")
    parser.add_argument("--decisions", type=int, default=3_000, help="decisions a run, at most")
    parser.add_argument("--seconds", type=float, default=10, help="of a run, at most, or 400 more")
    return run("decisions", parser.parse_args(), measured)


if __name__ == "__main__":
    sys.exit(main())
