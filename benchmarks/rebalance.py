"""What does a controller gain that moves work while the popularity of models shifts?

How, and what was found: ``benchmarks/rebalance.md``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.harness import over, parser_of, percentiles, run
from benchmarks.load import Outcome, Request, send_in_streams, send_when_due
from benchmarks.shifting import (
    CONTEXT,
    DEVICES,
    KINDS,
    LENT_BLOCKS,
    Fleet,
    Phase,
    configured,
    load,
)
from benchmarks.workload import Arrival, brief_conversations
from loomserve.platform.devices.machine import cpu_dtype
from loomserve.platform.models import catalog


@dataclass(frozen=True)
class ArmOptions:
    """
    Attributes:
        fleet: one of :data:`benchmarks.shifting.KINDS`.
        lent: whether one model borrows from the other.
        mode: of the controller.
    """

    fleet: str
    lent: bool = False
    mode: str = "advise"


ARMS = {
    "lending": {
        "static": ArmOptions("lending"),
        "lent": ArmOptions("lending", lent=True),
        "auto": ArmOptions("lending", lent=True, mode="auto"),
        "unified": ArmOptions("unified"),
        "unified_even": ArmOptions("unified_even"),
        "separated": ArmOptions("separated"),
        "separated_even": ArmOptions("separated_even"),
    },
    "replicas": {
        "static": ArmOptions("alone"),
        "auto": ArmOptions("by_controller", mode="auto"),
        "unified": ArmOptions("ample_unified"),
    },
}
STEADY = ("static", "auto")
"""Arms that get the steady load, too."""
NAMES = {
    "throughput": "throughput",
    "goodput": "goodput",
    "p99_ttft": "ttft_s_p99",
    "p99_tpot": "tpot_ms_p99",
}
"""What arms are compared by, and the figures of a run with it."""
SLO = 5.0
"""Times the idle medians of first token and of time per token."""
PROBES = 6
SETTLE_S = 10.0
"""After loans were opened or have ended."""


@dataclass(frozen=True)
class Slo:
    """Seconds."""

    ttft_s: float
    tpot_s: float

    @classmethod
    def over(cls, idle: Sequence[Outcome]) -> Slo:
        return cls(
            SLO * statistics.median(one.ttft for one in idle),
            SLO * statistics.median(one.tpot for one in idle),
        )

    def met(self, one: Outcome) -> bool:
        return one.ttft <= self.ttft_s and one.tpot <= self.tpot_s


@dataclass(frozen=True)
class Run:
    """One arm's answers, and what the controller did meanwhile."""

    answers: list[Outcome]
    bursts: list[tuple[float, float]]
    """Begin and end of each, or of all that counts, on the clock of the answers."""
    actions: list[dict[str, Any]]
    """That were done, ``at_s`` after the load's begin."""
    failed: int = 0
    """Requests without an answer."""

    @property
    def begin(self) -> float:
        return self.bursts[0][0]

    @property
    def seconds(self) -> float:
        return max(one.times[-1] for one in self.answers) - self.begin

    @property
    def throughput(self) -> float:
        seconds = sum(end - begin for begin, end in self.bursts)
        return sum(self._tokens(*burst) for burst in self.bursts) / seconds

    def _tokens(self, begin: float, end: float) -> int:
        return sum(sum(begin <= at < end for at in one.times) for one in self.answers)

    def goodput(self, slo: Slo) -> float:
        return sum(slo.met(one) for one in self.answers if one.due >= self.begin) / self.seconds

    def figures(self, slo: Slo) -> dict[str, Any]:
        return {
            "throughput": self.throughput,
            "goodput": self.goodput(slo),
            **percentiles("ttft_s", [one.ttft for one in self.answers]),
            **percentiles("tpot_ms", [1000 * one.tpot for one in self.answers]),
            "moves": float(len(self.actions)),
            "failed": float(self.failed),
        }


def phases(args: argparse.Namespace) -> list[Phase]:
    """A rest, a burst of one model, a rest, a burst of the other, a rest."""
    base = dict.fromkeys(DEVICES, args.rate)
    high = args.burst_times * args.rate
    first, second = (Phase(args.burst_s, {**base, popular: high}) for popular in DEVICES)
    rest = Phase(args.rest_s, base)
    return [rest, first, rest, second, rest]


def bursts(of: Sequence[Phase]) -> list[tuple[float, float]]:
    """Begin and end of every other phase, seconds after the load's begin."""
    ends = list(itertools.accumulate(phase.seconds for phase in of))
    return [(ends[at] - of[at].seconds, ends[at]) for at in range(1, len(of), 2)]


def oscillations(actions: Sequence[Mapping[str, Any]], edges: Sequence[float]) -> int:
    """Actions that undo one of the same phase; ``edges`` are the phases' ends, seconds."""
    ways: Counter[tuple[Any, ...]] = Counter()
    what: tuple[str, ...]
    for each in actions:
        phase = sum(each["at_s"] >= edge for edge in edges)
        match each["action"]:
            case "move":
                what, back = (each["kind"], each["engine"], each["lender"]), each["back"]
            case "add_replica" | "remove_replica" as way:
                what, back = (each["model"],), way == "remove_replica"
            case _:
                continue
        ways[phase, what, bool(back)] += 1
    there = [(key, count) for key, count in ways.items() if not key[2]]
    return sum(min(count, ways[phase, what, True]) for (phase, what, _), count in there)


def serve(
    fleet: Fleet,
    arm: ArmOptions,
    requests: Sequence[Request],
    counted: Sequence[tuple[float, float]],
) -> Run:
    """
    Args:
        counted: begin and end of the time whose throughput counts, after the load's begin.
    """
    if KINDS[arm.fleet].lends:
        fleet.lend(arm.lent)
    if KINDS[arm.fleet].replicas == "auto":
        fleet.one_each()
    fleet.mode(arm.mode)
    time.sleep(SETTLE_S)
    began, begin = time.time(), time.perf_counter()
    outcomes = uvloop.run(send_when_due([fleet.url], requests))
    actions = []
    if arm.mode == "auto":
        fleet.mode("advise")
        fleet.idle()
        actions = fleet.actions_done(began)
        if arm.lent:
            # The next arm begins where this one did.
            fleet.bring_home()
    if errors := [one.error for one in outcomes if one.error]:
        print(f"{len(errors)} requests failed, such as: {errors[0]}", flush=True)
    return Run(
        [one for one in outcomes if not one.error],
        [(begin + start, begin + end) for start, end in counted],
        actions,
        len(errors),
    )


def idle(fleet: Fleet, trace: Sequence[Arrival]) -> Slo:
    """What single requests take of a fleet where nothing is lent."""
    probes = load(trace, [Phase(PROBES, dict.fromkeys(DEVICES, 1.0))], "probes")
    return Slo.over(uvloop.run(send_in_streams([fleet.url], probes, 1)))


def measured(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    trace = brief_conversations(args.trace, CONTEXT, requests=4000)
    model, dtype = str(catalog.resolve("demo", Path.cwd())), cpu_dtype()
    of = phases(args)
    arms = {name: ARMS[args.by][name] for name in args.arms}
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    steady: dict[str, list[Run]] = {name: [] for name in STEADY}
    slo = None
    for number, kind in itertools.product(
        range(args.runs), dict.fromkeys(arm.fleet for arm in arms.values())
    ):
        written = configured(kind, model, args.port, dtype, store=args.by == "lending")
        fleet = Fleet(written, folder / f"{kind}{number}")
        with fleet.running(args.start_timeout):
            if KINDS[kind].lends:
                fleet.lend(False)
            slo = slo or idle(fleet, trace)
            fleet.measured()
            for name, arm in arms.items():
                if arm.fleet != kind:
                    continue
                found = serve(fleet, arm, load(trace, of, str(number)), bursts(of))
                runs[name].append(found)
                print(f"run {number + 1}, {name}: {found.figures(slo)}", flush=True)
                if name in steady:
                    calm = load(trace, [Phase(args.burst_s, of[0].rates)], f"{number}/steady")
                    found = serve(fleet, arm, calm, [(0.0, args.burst_s)])
                    steady[name].append(found)
                    print(f"run {number + 1}, {name}, steady: {found.figures(slo)}", flush=True)
    assert slo is not None
    return figures(runs, steady, slo, of)


def figures(
    runs: Mapping[str, Sequence[Run]],
    steady: Mapping[str, Sequence[Run]],
    slo: Slo,
    of: Sequence[Phase],
) -> dict[str, Any]:
    """``auto`` over other arms, run by run, and the figures of all runs."""
    edges = list(itertools.accumulate(phase.seconds for phase in of))
    by_arm = {arm: [one.figures(slo) for one in some] for arm, some in runs.items()}
    calm = {arm: [one.figures(slo) for one in some] for arm, some in steady.items()}
    by_run = [dict(zip(by_arm, run, strict=True)) for run in zip(*by_arm.values(), strict=True)]
    calm_by_run = [dict(zip(calm, run, strict=True)) for run in zip(*calm.values(), strict=True)]
    return {
        **{
            f"{short}_vs_{base}": over(by_run, "auto", base, name)
            for base in runs
            if base != "auto"
            for short, name in NAMES.items()
        },
        **{
            f"steady_{name}_vs_static": over(calm_by_run, "auto", "static", name)
            for name in ("throughput", "goodput")
        },
        "by_arm": by_arm,
        "steady": calm,
        "slo": asdict(slo),
        "oscillations": [oscillations(one.actions, edges) for one in runs["auto"]],
        "actions": [one.actions for one in runs["auto"]],
        "steady_actions": [one.actions for one in steady["auto"]],
        "runs": len(by_run),
    }


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("rebalance", __doc__)
    parser.add_argument("--by", choices=ARMS, default="lending", help="what the controller can do")
    parser.add_argument("--arms", nargs="+", help="static and auto, and others; by default all")
    parser.add_argument("--rate", type=float, default=0.35, help="of a model outside bursts")
    parser.add_argument("--burst-s", type=float, default=60.0)
    parser.add_argument("--burst-times", type=float, default=10.0, help="the rate within bursts")
    parser.add_argument("--rest-s", type=float, default=20.0)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--trace", type=Path, help="an Azure conversation trace, .csv.gz")
    parser.add_argument("--port", type=int, default=18_671)
    parser.add_argument("--start-timeout", type=float, default=600)
    args = parser.parse_args(words)
    args.arms = args.arms or list(ARMS[args.by])
    if not set(STEADY) <= set(args.arms) <= ARMS[args.by].keys():
        parser.error(f"--arms needs static and auto, of {', '.join(ARMS[args.by])}")
    return args


def main() -> int:
    args = arguments()
    return run(
        "rebalance" if args.by == "lending" else "rebalance_replicas",
        args,
        measured,
        headline_as="rebalance",
        without=("port", "start_timeout"),
        blocks={arm: KINDS[ARMS[args.by][arm].fleet].blocks for arm in args.arms},
        lent_blocks=LENT_BLOCKS,
    )


if __name__ == "__main__":
    sys.exit(main())
