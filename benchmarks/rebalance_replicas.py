"""What does a controller gain where lending cannot: by replicas on devices that are cold?

The load is that of :mod:`benchmarks.rebalance`: one model gets many times its requests for a
while, and after a rest the other does. No model lends, and each has the memory that it needs, so
what a popular model lacks is a second core. The same requests go to each arm in turn:

* ``static``: a replica of each model on a core of its own, with all of its model's memory.
* ``auto``: begins as ``static`` with half of the memory; the controller gives a popular model a
  second replica, with the other half, on the other model's core, and may end it.
* ``unified``: each model has a replica with half of its memory on either core all the time.

Then a steady load, the rate before the burst, goes to ``static`` and ``auto``.

Figures are those of :mod:`benchmarks.rebalance`; an oscillation is a replica of a model that comes
in a phase in which one goes. The last line of the output is one JSON object. Run
it as ``python -m benchmarks.rebalance_replicas`` or ``make bench-rebalance-replicas``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.popularity import (
    AMPLE_BLOCKS,
    DEVICES,
    Asked,
    Fleet,
    Phase,
    arrivals,
    load,
    serve,
)
from benchmarks.rebalance import (
    Run,
    Slo,
    actions_done,
    bursts,
    compared,
    idle,
    parser_of_load,
    phases,
)
from benchmarks.result_files import machine, publish, said_by
from loomserve.platform.devices.precision import cpu_dtype
from loomserve.platform.models import catalog

KINDS = {"static": "alone", "auto": "by_controller", "unified": "ample_unified"}
"""The fleet of each arm."""


def begin(fleet: Fleet) -> None:
    """One replica of each model, on its own device, and everything measured that plans need."""
    fleet.idle()
    fleet.wait(lambda: not fleet.get("rebalancing")["flaws"], 120, "everything is measured")
    for model, device in DEVICES.items():
        there = places(fleet)[model]
        if device not in there:
            fleet.add(model, device)
        for other in set(there) - {device}:
            fleet.remove(model, other)
    alone = {name: [device] for name, device in DEVICES.items()}
    fleet.wait(lambda: places(fleet) == alone, 120, "one replica of each model, on its own core")
    fleet.wait(lambda: not fleet.get("rebalancing")["flaws"], 120, "everything is measured")


def places(fleet: Fleet) -> dict[str, list[str]]:
    """The devices of each model's replicas."""
    models = fleet.get("state")["models"]
    return {
        each["name"]: sorted(replica["device"] for replica in each["replicas"]) for each in models
    }


def run(
    fleet: Fleet, arm: str, all_: Sequence[Asked], seed: str, counted: Sequence[tuple[float, float]]
) -> Run:
    """
    Args:
        counted: begin and end of the time whose throughput counts, after the load's begin.
    """
    if arm == "auto":
        begin(fleet)
        fleet.mode("auto")
    began, clock = time.time(), time.perf_counter()
    answers = asyncio.run(serve(fleet.url, all_, seed, clock))
    done = []
    if arm == "auto":
        fleet.mode("advise")
        fleet.idle()
        of_replicas = {"add_replica", "remove_replica"}
        done = [
            with_model(fleet, each) if each["action"]["action"] in of_replicas else each
            for each in actions_done(fleet, began)
        ]
    return Run.of(arm, answers, clock, counted, done)


def with_model(fleet: Fleet, done: Mapping[str, Any]) -> dict[str, Any]:
    """The event of an action, which says whose replica it was, too."""
    step = fleet.get(f"plans/{done['plan']}")["steps"][done["step"]]
    return {**done, "action": {**done["action"], "model": step["record"]["model"]}}


def oscillations(moves: Sequence[Mapping[str, Any]], edges: Sequence[float]) -> int:
    """Replicas of a model that came and went in one phase; ``edges`` are the phases' ends."""
    seen: Counter[tuple[int, str, str]] = Counter()
    for each in moves:
        phase = sum(each["at_s"] >= edge for edge in edges)
        seen[phase, each["action"].get("model", ""), each["action"]["action"]] += 1
    return sum(
        min(count, seen[phase, model, "remove_replica"])
        for (phase, model, action), count in list(seen.items())
        if action == "add_replica"
    )


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    trace, model = arrivals(args.trace), str(catalog.resolve("demo", Path.cwd()))
    of, slo = phases(args), None
    runs: dict[str, list[Run]] = {arm: [] for arm in KINDS}
    steady: dict[str, list[Run]] = {"static": [], "auto": []}
    for number, arm in itertools.product(range(args.runs), KINDS):
        of_arm = Fleet(KINDS[arm], model, args.port, folder / f"{arm}{number}", cpu_dtype())
        with of_arm.running(args.start_timeout) as fleet:
            slo = slo or idle(fleet, trace)
            found = run(fleet, arm, load(trace, of, str(number)), str(number), bursts(of))
            runs[arm].append(found)
            print(f"run {number + 1}, {arm}: {found.figures(slo)}", flush=True)
            for action in found.moves:
                print(f"  {action['at_s']:.0f} s: {action['action']}", flush=True)
            if arm in steady:
                calm = load(trace, [Phase(args.burst_s, of[0].rates)], f"{number}/steady")
                found = run(fleet, arm, calm, f"{number}/steady", [(0.0, args.burst_s)])
                steady[arm].append(found)
                print(f"run {number + 1}, {arm}, steady: {found.figures(slo)}", flush=True)
    assert slo is not None
    return figures(runs, steady, slo, of)


def figures(
    runs: Mapping[str, Sequence[Run]],
    steady: Mapping[str, Sequence[Run]],
    slo: Slo,
    of: Sequence[Phase],
) -> dict[str, Any]:
    edges = list(itertools.accumulate(phase.seconds for phase in of))
    return {
        **compared(runs, steady, ("static", "unified"), slo),
        "runs": len(runs["auto"]),
        "oscillations": [oscillations(one.moves, edges) for one in runs["auto"]],
        "actions": [actions(one) for one in runs["auto"]],
        "steady_actions": [actions(one) for one in steady["auto"]],
    }


def actions(one: Run) -> list[dict[str, Any]]:
    """What the controller did, and when after the load's begin."""
    return [{"at_s": each["at_s"], **each["action"]} for each in one.moves]


def main() -> None:
    args = parser_of_load(__doc__).parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    setup = {**said_by(args, "port"), "blocks": AMPLE_BLOCKS}
    publish("rebalance_replicas", found, setup=setup, facts=facts)


if __name__ == "__main__":
    main()
