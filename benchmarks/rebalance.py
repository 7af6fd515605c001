"""What does a controller gain that moves work while the popularity of models shifts?

The fleet of :mod:`benchmarks.popularity`: one model gets ten times its requests for a minute
(``--burst-times``), and after a rest the other does. The same requests go to each arm in turn:

* ``static``: each model has its own core and memory; the controller only advises.
* ``lent``: one borrows from the other by itself (Weaver); the controller only advises.
* ``auto``: it does, and the controller carries out its plans: heads, layers, limits of loans.
* ``unified``: each model has a replica on either core, with half of its memory each.
* ``separated``: likewise, but one replica prefills and one decodes (DistServe).
* ``unified_even``, ``separated_even``: the same, but all memory is divided evenly among the four
  replicas, as whoever puts both models on both cores would.

All arms have the same memory in all, and a KV store, which those with roles need.

Then a steady load, the rate before the burst, goes to ``static`` and ``auto``.

Throughput is output tokens a second within the bursts; ``serving`` from the first one's begin to
the last answer's end, which an open loop sets unless an arm falls behind. Goodput counts requests
by their first token within ``SLO`` times what the idle static fleet takes, and likewise their time
per token; a request that fails meets nothing. An oscillation is an action that undoes one of the
same phase. The last line of the output is one JSON object.

Run it as ``python -m benchmarks.rebalance`` or ``make bench-rebalance``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.popularity import (
    BLOCKS,
    DEVICES,
    LENT_BLOCKS,
    Answer,
    Asked,
    Fleet,
    Phase,
    arrivals,
    load,
    replay,
    serve,
)
from benchmarks.report import Spread, percentiles
from benchmarks.result_files import machine, publish, said_by
from loomserve.platform.devices.precision import cpu_dtype
from loomserve.platform.models import catalog

WATCHED = ("static", "lent", "auto")
"""Arms of the fleet that lends."""
ARMS = (*WATCHED, "unified", "unified_even", "separated", "separated_even")
SLO = 5.0
"""Times the idle medians of first token and of time per token."""
PROBES = 6
SETTLE_S = 10.0
"""After loans were opened or have ended."""
_NAMES = {
    "throughput": "throughput",
    "goodput": "goodput",
    "p99_ttft": "ttft_s_p99",
    "p99_tpot": "tpot_ms_p99",
}
"""What arms are compared by, and the figures of a run with it."""


@dataclass(frozen=True)
class Slo:
    """Seconds."""

    ttft_s: float
    tpot_s: float

    @classmethod
    def over(cls, idle: Sequence[Answer]) -> Slo:
        return cls(
            SLO * statistics.median(one.ttft_s for one in idle),
            SLO * statistics.median(one.tpot_s for one in idle),
        )

    def met(self, one: Answer) -> bool:
        return one.ttft_s <= self.ttft_s and one.tpot_s <= self.tpot_s


@dataclass(frozen=True)
class Run:
    """One arm's answers, and what the controller did meanwhile."""

    answers: list[Answer]
    bursts: list[tuple[float, float]]
    """Begin and end of each, or of all that counts, on the clock of the answers."""
    moves: list[dict[str, Any]]
    """The events of actions that were done, ``at_s`` after the load's begin."""
    failed: int = 0
    """Requests without an answer."""

    @classmethod
    def of(
        cls,
        arm: str,
        answers: Sequence[Answer],
        begin: float,
        counted: Sequence[tuple[float, float]],
        moves: list[dict[str, Any]],
    ) -> Run:
        """
        Args:
            begin: the load's, on the clock of the answers.
            counted: begin and end of the time whose throughput counts, after the load's begin.
        """
        if errors := [one.error for one in answers if one.error]:
            print(f"{arm}: {len(errors)} requests failed, such as: {errors[0]}", flush=True)
        return cls(
            [one for one in answers if not one.error],
            [(begin + start, begin + end) for start, end in counted],
            moves,
            len(errors),
        )

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
        ttft = [one.ttft_s for one in self.answers]
        tpot = [1000 * one.tpot_s for one in self.answers]
        return {
            "throughput": self.throughput,
            "serving": self._tokens(self.begin, math.inf) / self.seconds,
            "goodput": self.goodput(slo),
            **percentiles("ttft_s", ttft),
            **percentiles("tpot_ms", tpot),
            "moves": float(len(self.moves)),
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


def oscillations(moves: Sequence[Mapping[str, Any]], edges: Sequence[float]) -> int:
    """Actions that undo one of the same phase; ``edges`` are the phases' ends, seconds."""
    done: set[tuple[Any, ...]] = set()
    undone = 0
    for move in moves:
        phase = sum(move["at_s"] >= edge for edge in edges)
        action = move["action"]
        if action["action"] != "move":
            continue
        of = (phase, action["kind"], action["engine"], action["lender"])
        undone += (*of, not action["back"]) in done
        done.add((*of, action["back"]))
    return undone


def settled_s(moves: Sequence[Mapping[str, Any]], of: Sequence[Phase]) -> list[float]:
    """From each burst's begin to the end of its last move; none where nothing moved."""
    found: list[float] = []
    for begin, end in bursts(of):
        found += [move["at_s"] - begin for move in moves if begin <= move["at_s"] < end][-1:]
    return found


def run(
    fleet: Fleet, arm: str, all_: Sequence[Asked], seed: str, counted: Sequence[tuple[float, float]]
) -> Run:
    """
    Args:
        counted: begin and end of the time whose throughput counts, after the load's begin.
    """
    if arm in WATCHED:
        fleet.lend(arm != "static")
        fleet.mode("auto" if arm == "auto" else "advise")
        time.sleep(SETTLE_S)
    began, begin = time.time(), time.perf_counter()
    answers = asyncio.run(serve(fleet.url, all_, seed, begin))
    moves = []
    if arm == "auto":
        moves = actions_done(fleet, began)
        fleet.mode("advise")
        # The next arm begins where this one did.
        fleet.bring_home()
    return Run.of(arm, answers, begin, counted, moves)


def actions_done(fleet: Fleet, began: float) -> list[dict[str, Any]]:
    """Events of the controller's actions since a Unix time, with ``at_s`` after it."""
    return [
        {**event, "at_s": event["at"] - began}
        for event in fleet.events(began)
        if event["kind"] == "done"
    ]


def idle(fleet: Fleet, trace: Any) -> Slo:
    """What single requests take of a fleet where nothing is lent."""
    probes = load(trace, [Phase(PROBES, dict.fromkeys(DEVICES, 1.0))], "probes")
    return Slo.over(asyncio.run(replay(fleet.url, probes, "probes", 1)))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    trace, model = arrivals(args.trace), str(catalog.resolve("demo", Path.cwd()))
    of = phases(args)
    runs: dict[str, list[Run]] = {arm: [] for arm in args.arms}
    steady: dict[str, list[Run]] = {"static": [], "auto": []}

    def say(number: int, arm: str, one: Run) -> None:
        figures = {name: round(value, 3) for name, value in one.figures(slo).items()}
        print(f"run {number + 1}, {arm}: {figures}", flush=True)

    def whole(fleet: Fleet, number: int, arm: str) -> None:
        runs[arm].append(run(fleet, arm, load(trace, of, str(number)), str(number), bursts(of)))
        say(number, arm, runs[arm][-1])

    with Fleet("lending", model, args.port, folder / "lending", cpu_dtype(), True).running(
        args.start_timeout
    ) as fleet:
        fleet.lend(False)
        slo = idle(fleet, trace)
        print(f"SLO: {slo}", flush=True)
        fleet.wait(lambda: not fleet.get("rebalancing")["flaws"], 120, "everything is measured")
        for number in range(args.runs):
            for arm in [arm for arm in WATCHED if arm in args.arms]:
                whole(fleet, number, arm)
            calm = load(trace, [Phase(args.burst_s, of[0].rates)], f"{number}/steady")
            for arm, found in steady.items():
                found.append(run(fleet, arm, calm, f"{number}/steady", [(0.0, args.burst_s)]))
                say(number, f"{arm}, steady", found[-1])
    for kind in [arm for arm in args.arms if arm not in WATCHED]:
        with Fleet(kind, model, args.port, folder / kind, cpu_dtype(), True).running(
            args.start_timeout
        ) as fleet:
            for number in range(args.runs):
                whole(fleet, number, kind)
    return figures(args, runs, steady, slo, of)


def figures(
    args: argparse.Namespace,
    runs: Mapping[str, Sequence[Run]],
    steady: Mapping[str, Sequence[Run]],
    slo: Slo,
    of: Sequence[Phase],
) -> dict[str, Any]:
    edges = list(itertools.accumulate(phase.seconds for phase in of))
    return {
        **compared(runs, steady, [arm for arm in args.arms if arm != "auto"], slo),
        "oscillations": [oscillations(one.moves, edges) for one in runs["auto"]],
        "settled_s": [settled_s(one.moves, of) for one in runs["auto"]],
        "moves": [
            [{"at_s": move["at_s"], **move["action"]} for move in one.moves] for one in runs["auto"]
        ],
        "runs": args.runs,
    }


def compared(
    runs: Mapping[str, Sequence[Run]],
    steady: Mapping[str, Sequence[Run]],
    others: Sequence[str],
    slo: Slo,
) -> dict[str, Any]:
    """``auto`` over other arms, run by run, and the figures of all runs."""

    def ratios(name: str, base: str, source: Mapping[str, Sequence[Run]]) -> Any:
        pairs = zip(source["auto"], source[base], strict=True)
        both = [(one.figures(slo)[name], two.figures(slo)[name]) for one, two in pairs]
        # No request of a base that is swamped may meet the SLO.
        return asdict(Spread.of([a / b for a, b in both])) if all(b for _, b in both) else None

    return {
        **{
            f"{short}_vs_{base}": ratios(name, base, runs)
            for base in others
            for short, name in _NAMES.items()
        },
        "steady_throughput_vs_static": ratios("throughput", "static", steady),
        "steady_goodput_vs_static": ratios("goodput", "static", steady),
        "by_arm": {arm: [one.figures(slo) for one in of_arm] for arm, of_arm in runs.items()},
        "steady": {arm: [one.figures(slo) for one in of_arm] for arm, of_arm in steady.items()},
        "slo": asdict(slo),
    }


def parser_of_load(doc: str | None) -> argparse.ArgumentParser:
    """Options of the load and of the platforms, for a benchmark with this docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=0.35, help="of a model outside bursts")
    parser.add_argument("--burst-s", type=float, default=60.0)
    parser.add_argument("--burst-times", type=float, default=10.0, help="the rate within bursts")
    parser.add_argument("--rest-s", type=float, default=20.0)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--trace", type=Path, help="an Azure conversation trace, .csv.gz")
    parser.add_argument("--port", type=int, default=18_671)
    parser.add_argument("--start-timeout", type=float, default=600)
    return parser


def main() -> None:
    parser = parser_of_load(__doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    args = parser.parse_args()
    if not {"static", "auto"} <= set(args.arms):
        parser.error("--arms needs static and auto")
    facts = machine()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    setup = {**said_by(args, "port"), "blocks": BLOCKS, "lent_blocks": LENT_BLOCKS}
    publish("rebalance", found, setup=setup, facts=facts)


if __name__ == "__main__":
    main()
