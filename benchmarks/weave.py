"""What does a hot model gain, and a cold one lose, when the cold one computes its attention?

How, and what was found: ``benchmarks/weave.md``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine import BLOCK_BYTES
from benchmarks.harness import parser_of, percentile, percentiles, ratios, run, spread
from benchmarks.weave_engines import CONTEXT, Engine, Served, loan, plain, stock, woven
from benchmarks.workload import Arrival, PrefixRequest, brief_conversations, window

COLD_REQUESTS = 100
"""A p99 of fewer is hardly more than the slowest of them."""
LONGEST_ANSWER_S = 60.0
"""Of the cold model, at most: hot requests go on so long after the last cold one has come."""
WOVEN = "slices"
ARMS = ("stock", "dedicated", WOVEN, "local", "multiplexed")


@dataclass(frozen=True)
class Division:
    """What there is.

    Attributes:
        own: blocks of the hot engine.
        lent: those that the cold engine lends, its own where nothing is lent.
        cold: what the cold engine has beside them.
    """

    own: int
    lent: int
    cold: int

    @property
    def total(self) -> int:
        return self.own + self.lent + self.cold

    def with_ratio(self, lent_over_own: float) -> Division:
        """The same blocks in all, with so many times as many lent as own."""
        both = self.own + self.lent
        own = round(both / (1 + lent_over_own))
        return replace(self, own=own, lent=both - own)


class Shares(NamedTuple):
    """Blocks of the engines of an arm."""

    hot: int
    cold: int


def divisions(of: Division) -> Mapping[str, Shares]:
    """By arm; each has all of the memory."""
    apart = Shares(of.own, of.cold + of.lent)
    joined = Shares(of.own + of.lent, of.cold)
    return {
        **dict.fromkeys(("stock", "dedicated", WOVEN), apart),
        "local": joined,
        # Halves of the layers of both on either core: the two have all memory at once.
        "multiplexed": joined,
    }


class Load(NamedTuple):
    """A trace of which each run takes another window.

    Attributes:
        arrivals: of the trace.
        cold_requests: of the cold model, a run.
        cold_share: of the hot model's rate.
    """

    arrivals: list[Arrival]
    cold_requests: int
    cold_share: float

    def cold(self, rate: float, seed: str) -> list[PrefixRequest]:
        """So many, beside so many hot ones a second."""
        return window(
            self.arrivals,
            requests=self.cold_requests,
            rate=rate * self.cold_share,
            seed=f"{seed}/cold",
        )

    def hot(self, rate: float, until_s: float, seed: str) -> list[PrefixRequest]:
        """More than come until the last cold one is answered."""
        count = math.ceil(rate * (until_s + LONGEST_ANSWER_S))
        return window(self.arrivals, requests=count, rate=rate, seed=seed)


@dataclass(frozen=True)
class Run:
    """Both models' requests in one arm at one rate."""

    hot: Served
    cold: Served
    figures: Mapping[str, float]
    """Of the loan: microseconds a task, and the share of steps' context that was lent."""


async def served(hot: Engine, cold: Engine, rate: float, load: Load, seed: str) -> Run:
    """Both models' requests at once, from empty prefix caches."""
    await asyncio.gather(hot.forget(), cold.forget())
    theirs = load.cold(rate, seed)
    ours = load.hot(rate, theirs[-1].at_s, seed)
    ended = asyncio.Event()

    async def serve_cold() -> Served:
        try:
            return await cold.serve(theirs, f"{seed}/cold")
        finally:
            ended.set()

    return Run(*await asyncio.gather(hot.serve(ours, seed, ended), serve_cold()), figures={})


async def served_woven(hot: Engine, cold: Engine, rate: float, load: Load, seed: str) -> Run:
    await cold.call("look_for_tasks", WOVEN)
    async with loan(hot, cold) as side:
        run = await served(hot, cold, rate, load, seed)
        state = await hot.call("loan_state")
    of_loan = next((each for each in state["loans"] if each["partition"] == side), None)
    if of_loan is None:
        # Its requests were computed without the lender, which counts; its figures are gone.
        print(f"the loan broke; broken so far: {state['broken']}")
        return run
    tasks = max(1, of_loan["tasks"])
    return replace(
        run,
        figures={
            "tasks": of_loan["tasks"],
            "post_us": of_loan["post_ns"] / tasks / 1e3,
            "wait_us": of_loan["wait_ns"] / tasks / 1e3,
            "pickup_us": of_loan["pickup_ns"] / tasks / 1e3,
            "service_us": of_loan["service_ns"] / tasks / 1e3,
            "longest_wait_us": of_loan["wait_max_ns"] / 1e3,
        },
    )


def kind_and_budget(arm: str) -> tuple[str, float | None]:
    """Of ``slices@1.05``; None: the budget that a lender has by itself."""
    kind, _, budget = arm.partition("@")
    return kind, float(budget) if budget else None


class Fleet:
    """All engines, of which two compute at a time; blocks as :func:`divisions` has them."""

    def __init__(self, arms: Sequence[str], division: Division, places: int) -> None:
        lent = division.lent * BLOCK_BYTES
        shares = divisions(division)
        self._pairs: dict[str, tuple[Engine, Engine]] = {}
        # Engines that lend and borrow also serve the arm in which nothing is lent.
        apart = shares["dedicated"]
        borrower = woven(0, apart.hot + 1, places, borrow_bytes=lent, patience_ms=5000)
        lender = woven(1, apart.cold + 1, places, lend_bytes=lent)
        for arm in arms:
            kind, budget = kind_and_budget(arm)
            hot, cold = (blocks + 1 for blocks in shares[kind])
            if arm == "stock":
                self._pairs[arm] = stock(0, hot, places), stock(1, cold, places)
            elif arm == "local":
                self._pairs[arm] = plain([0], hot, places), plain([1], cold, places)
            elif arm == "multiplexed":
                self._pairs[arm] = plain([0, 1], hot, places), plain([0, 1], cold, places)
            elif budget is not None:
                careful = woven(1, cold, places, lend_bytes=lent, tpot_budget=budget)
                self._pairs[arm] = borrower, careful
            else:
                self._pairs[arm] = borrower, lender

    async def run(self, arm: str, rate: float, load: Load, seed: str) -> Run:
        hot, cold = self._pairs[arm]
        kind, _ = kind_and_budget(arm)
        if kind == WOVEN:
            return await served_woven(hot, cold, rate, load, seed)
        return await served(hot, cold, rate, load, seed)

    def close(self) -> None:
        for engine in {id(each): each for pair in self._pairs.values() for each in pair}.values():
            engine.close()


Runs = dict[str, dict[float, list[Run]]]
"""By arm and rate."""


def peaks(runs: Runs, arm: str) -> list[float]:
    """Of each run, the hot model's throughput at the rate where it is highest."""
    return [
        max(each.hot.throughput for each in of_run)
        for of_run in zip(*runs[arm].values(), strict=True)
    ]


def compared(runs: Runs, best: str) -> dict[str, Any]:
    """Ratios within runs, of this woven arm over the others."""
    busiest = max(runs[best])
    woven, apart = runs[best][busiest], runs["dedicated"][busiest]
    result: dict[str, Any] = {
        f"hot_peak_vs_{arm}": ratios(peaks(runs, best), peaks(runs, arm))
        for arm in ("stock", "dedicated", "multiplexed")
        if arm in runs
    }
    if "local" in runs:
        result["share_of_all_local"] = ratios(peaks(runs, best), peaks(runs, "local"))
    result |= {
        name: ratios(map(figure, woven), map(figure, apart))
        for name, figure in (
            ("hot_tpot_vs_dedicated_at_peak", lambda one: statistics.fmean(one.hot.tpot_ms)),
            ("cold_tpot_ratio_mean", lambda one: statistics.fmean(one.cold.tpot_ms)),
            ("cold_tpot_ratio_p99", lambda one: percentile(one.cold.tpot_ms, 99)),
        )
    }
    result["cold_tpot_ratio_p99_n"] = [len(one.cold.tpot_ms) for one in woven]
    if taken := _of_tasks(runs[best], "pickup_us"):
        result["wait_us_splitting"] = spread(taken)
    overheads = (_of_tasks(runs[best], name) for name in ("post_us", "pickup_us"))
    if added := list(map(sum, zip(*overheads, strict=True))):
        result["per_layer_overhead_us"] = spread(added)
    return result


def _of_tasks(of_arm: Mapping[float, list[Run]], name: str) -> list[float]:
    """A figure of the loans that did not break."""
    every = (one.figures.get(name) for of_rate in of_arm.values() for one in of_rate)
    return [each for each in every if each is not None]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    trace = brief_conversations(args.trace, CONTEXT, requests=4000)
    load = Load(trace, args.cold_requests, args.cold_share)
    given = Division(args.own_blocks, args.lent_blocks, args.cold_blocks)
    if not args.lent_over_own:
        return await measure_division(args, load, given)
    curve = {
        str(ratio): await measure_division(args, load, given.with_ratio(ratio))
        for ratio in args.lent_over_own
    }
    return {"by_lent_over_own": curve, "runs": args.runs}


async def measure_division(
    args: argparse.Namespace, load: Load, division: Division
) -> dict[str, Any]:
    """All arms with one division of the memory."""
    fleet = Fleet(args.arms, division, args.places)
    runs: Runs = {arm: {rate: [] for rate in args.rates} for arm in args.arms}
    try:
        few = load._replace(cold_requests=2, cold_share=1.0)
        for arm in args.arms:
            await fleet.run(arm, max(args.rates), few, "warm-up")
        for number, rate, arm in itertools.product(range(args.runs), args.rates, args.arms):
            one = await fleet.run(arm, rate, load, f"{number}/{rate}")
            runs[arm][rate].append(one)
            print(f"run {number + 1}/{args.runs} {rate} {arm}: {figures([one])}", flush=True)
    finally:
        fleet.close()
    return {
        **compared(runs, WOVEN),
        "by_tpot_budget": {
            f"{budget:g}": compared(runs, arm)
            for arm in runs
            if (budget := kind_and_budget(arm)[1]) is not None
        },
        "blocks": asdict(division),
        "by_arm": {
            arm: {str(rate): figures(of) for rate, of in by_rate.items()}
            for arm, by_rate in runs.items()
        },
        "runs": args.runs,
    }


def figures(of: Sequence[Run]) -> dict[str, Any]:
    """Percentiles are over the requests of all runs."""
    names = set[str]().union(*(one.figures for one in of))
    return {
        "hot_tokens_per_second": statistics.median(one.hot.throughput for one in of),
        "hot_tpot_ms_mean": statistics.fmean(t for one in of for t in one.hot.tpot_ms),
        "cold_tpot_ms_mean": statistics.fmean(t for one in of for t in one.cold.tpot_ms),
        **percentiles("hot_tpot_ms", [t for one in of for t in one.hot.tpot_ms]),
        **percentiles("cold_tpot_ms", [t for one in of for t in one.cold.tpot_ms]),
        "hot_given_up": sum(one.hot.given_up for one in of),
        "hot_tokens_per_second_by_run": [one.hot.throughput for one in of],
        **{
            name: statistics.median(one.figures[name] for one in of if name in one.figures)
            for name in sorted(names)
        },
    }


def measured(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return asyncio.run(measure(args))


def main() -> int:
    parser = parser_of("weave", __doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rates", type=float, nargs="+", default=[6.0], help="of the hot model")
    parser.add_argument(
        "--cold-requests", type=int, default=COLD_REQUESTS, help="a run, which they end"
    )
    parser.add_argument("--cold-share", type=float, default=0.1, help="of the hot model's rate")
    parser.add_argument(
        "--lent-over-own", type=float, nargs="+", default=[], metavar="RATIO",
        help="divide own and lent blocks anew, such as 0.5 1 2 5",
    )  # fmt: skip
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--own-blocks", type=int, default=16)
    parser.add_argument("--cold-blocks", type=int, default=48, help="beside those that it lends")
    parser.add_argument("--lent-blocks", type=int, default=80)
    parser.add_argument("--places", type=int, default=32, help="requests in a step at most")
    parser.add_argument(
        "--tpot-budgets", type=float, nargs="+", default=[], metavar="RATIO",
        help="slices once more with each of these budgets of the lender",
    )  # fmt: skip
    parser.add_argument("--trace", type=Path, help="an Azure conversation trace, .csv.gz")
    args = parser.parse_args()
    if not {"dedicated", WOVEN} <= set(args.arms):
        parser.error(f"--arms needs dedicated and {WOVEN}")
    args.arms += [f"slices@{budget:g}" for budget in args.tpot_budgets]
    return run("weave", args, measured)


if __name__ == "__main__":
    sys.exit(main())
