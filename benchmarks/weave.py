"""What does a hot model gain, and a cold one lose, when the cold one computes its attention?

Two real engines, the hot one on core 0 and the cold one on core 1. The hot model's requests come
at rates up to saturation, with lengths of the Azure conversation trace scaled down, prompts more
than outputs: a core computes a prompt's token in an eighth of a decode step, a GPU in a hundredth,
and prefill would hide what decode gains. The cold model's requests come at ``--cold-share`` of the
rate, for as long as a run lasts: it ends with the ``--cold-requests``-th of them, and what the hot
model has not answered by then is given up and counted. The hot engine's own KV memory is too small
for its batch (``--own-blocks``), and the cold engine lends ``--lent-blocks`` blocks of its own.
All arms have the same memory in all (:func:`benchmarks.weave_memory.divisions`):

* ``stock``: vLLM's own worker, scheduler and executor, nothing is lent.
* ``dedicated``: nothing is lent.
* ``steps``, ``operators``, ``slices``: woven; the lender looks for tasks between its steps only,
  between operators too, and between the slices of sliced operators too (Weaver, figure 7).
* ``local``: what is lent is the hot engine's own instead, the ideal.
* ``multiplexed``: both models on both cores, half of the layers on each, in each other's idle time.
  (Tensor parallelism cannot divide the model's 9 query heads.)

``--lent-over-own 0.5 1 2 5`` divides ``--own-blocks`` plus ``--lent-blocks`` anew for each of these
ratios: the curve of what is gained by how much is lent. ``--tpot-budgets 1.05 1.02`` adds arms
``slices@1.05`` and so on, whose lender takes part with that budget (of :class:`LendingOptions`):
what less disturbance of the cold model costs the hot one. ``--disturb`` has another process take a
share of the lender's core. Each run serves the same requests in all arms, one after the other.

Run it as ``python -m benchmarks.weave`` or ``make bench-weave``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import Process
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine import BLOCK_BYTES
from benchmarks.report import Spread, percentile, percentiles
from benchmarks.result_files import machine, publish, said_by
from benchmarks.weave_engines import CONTEXT, Engine, Served, loan, plain, stock, woven
from benchmarks.weave_memory import Division, divisions
from benchmarks.workload import (
    Arrival,
    PrefixRequest,
    brief_conversations,
    window,
)

COLD_REQUESTS = 100
"""A p99 of fewer is hardly more than the slowest of them."""
LONGEST_ANSWER_S = 60.0
"""Of the cold model, at most: hot requests go on so long after the last cold one has come."""
WOVEN = ("steps", "operators", "slices")
ARMS = ("stock", "dedicated", *WOVEN, "local", "multiplexed")
USUAL_ARMS = ("stock", "dedicated", "slices", "local", "multiplexed")


@contextmanager
def disturbed(core: int, share: float) -> Iterator[None]:
    """Another process computes on this core for so much of the time."""
    if not share:
        yield
        return
    other = Process(target=_compute, args=(core, share), daemon=True)
    other.start()
    try:
        yield
    finally:
        other.kill()
        other.join()


def _compute(core: int, share: float) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        until = time.monotonic() + 0.02 * share
        while time.monotonic() < until:
            pass
        time.sleep(0.02 * (1 - share))


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


async def served_woven(
    hot: Engine, cold: Engine, polling: str, rate: float, load: Load, seed: str
) -> Run:
    await cold.call("look_for_tasks", polling)
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
        # Without polling within steps, a task may wait for a whole one of the lender.
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
        if kind in WOVEN:
            return await served_woven(hot, cold, kind, rate, load, seed)
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
        f"hot_peak_vs_{arm}": _ratios(peaks(runs, best), peaks(runs, arm))
        for arm in ("stock", "dedicated", "multiplexed")
        if arm in runs
    }
    if "local" in runs:
        result["share_of_all_local"] = _ratios(peaks(runs, best), peaks(runs, "local"))
    result |= {
        "hot_tpot_vs_dedicated_at_peak": _ratios(
            [statistics.fmean(one.hot.tpot_ms) for one in woven],
            [statistics.fmean(one.hot.tpot_ms) for one in apart],
        ),
        "cold_tpot_ratio_mean": _ratios(
            [statistics.fmean(one.cold.tpot_ms) for one in woven],
            [statistics.fmean(one.cold.tpot_ms) for one in apart],
        ),
        "cold_tpot_ratio_p99": _ratios(
            [percentile(one.cold.tpot_ms, 99) for one in woven],
            [percentile(one.cold.tpot_ms, 99) for one in apart],
        ),
        "cold_tpot_ratio_p99_n": [len(one.cold.tpot_ms) for one in woven],
    }
    for arm, name in zip(WOVEN, ("cpu_control", "polling", "splitting"), strict=True):
        if taken := _of_tasks(runs.get(arm, {}), "pickup_us"):
            result[f"wait_us_{name}"] = asdict(Spread.of(taken))
    overheads = (_of_tasks(runs[best], name) for name in ("post_us", "pickup_us"))
    if added := list(map(sum, zip(*overheads, strict=True))):
        result["per_layer_overhead_us"] = asdict(Spread.of(added))
    return result


def _of_tasks(of_arm: Mapping[float, list[Run]], name: str) -> list[float]:
    """A figure of the loans that did not break."""
    every = (one.figures.get(name) for of_rate in of_arm.values() for one in of_rate)
    return [each for each in every if each is not None]


def _ratios(values: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    return asdict(Spread.of_ratios(values, base))


def arrivals(trace: Path | None) -> list[Arrival]:
    return brief_conversations(trace, CONTEXT, requests=4000)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    load = Load(arrivals(args.trace), args.cold_requests, args.cold_share)
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
        with disturbed(1, args.disturb):
            for number, rate, arm in itertools.product(range(args.runs), args.rates, args.arms):
                one = await fleet.run(arm, rate, load, f"{number}/{rate}")
                runs[arm][rate].append(one)
                print(_line(number, args.runs, rate, arm, one), flush=True)
    finally:
        fleet.close()
    return {
        **compared(runs, next(arm for arm in reversed(WOVEN) if arm in runs)),
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


def _line(number: int, count: int, rate: float, arm: str, one: Run) -> str:
    figures = " ".join(f"{name} {value:.0f}" for name, value in one.figures.items())
    return (
        f"run {number + 1}/{count} rate {rate} {arm}: hot {one.hot.throughput:.0f} tok/s, TPOT "
        f"{statistics.fmean(one.hot.tpot_ms):.0f} ms; cold {one.cold.throughput:.0f} tok/s, TPOT "
        f"{statistics.fmean(one.cold.tpot_ms):.0f} ms, p99 {percentile(one.cold.tpot_ms, 99):.0f} "
        f"{figures}"
    )


def figures(of: Sequence[Run]) -> dict[str, Any]:
    """Percentiles are over the requests of all runs."""
    names = set[str]().union(*(one.figures for one in of))
    return {
        "hot_tokens_per_second": statistics.median(one.hot.throughput for one in of),
        "hot_tpot_ms_mean": statistics.fmean(t for one in of for t in one.hot.tpot_ms),
        "cold_tpot_ms_mean": statistics.fmean(t for one in of for t in one.cold.tpot_ms),
        **percentiles("hot_tpot_ms", [t for one in of for t in one.hot.tpot_ms]),
        # Of those that had a token; the others waited for longer.
        **percentiles("hot_ttft_ms", [t for one in of for t in one.hot.ttft_ms]),
        **percentiles("cold_tpot_ms", [t for one in of for t in one.cold.tpot_ms]),
        **percentiles("cold_ttft_ms", [t for one in of for t in one.cold.ttft_ms]),
        "hot_given_up": sum(one.hot.given_up for one in of),
        "hot_tokens_per_second_by_run": [one.hot.throughput for one in of],
        "cold_requests_by_run": [len(one.cold.ttft_ms) for one in of],
        **{
            name: statistics.median(one.figures[name] for one in of if name in one.figures)
            for name in sorted(names)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(USUAL_ARMS))
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
    parser.add_argument("--disturb", type=float, default=0.0, help="share of the lender's core")
    parser.add_argument("--trace", type=Path, help="an Azure conversation trace, .csv.gz")
    args = parser.parse_args()
    if "dedicated" not in args.arms or not set(WOVEN) & set(args.arms):
        parser.error("--arms needs dedicated and one of " + ", ".join(WOVEN))
    args.arms += [f"slices@{budget:g}" for budget in args.tpot_budgets]
    facts = machine()
    publish("weave", asyncio.run(measure(args)), setup=said_by(args), facts=facts)


if __name__ == "__main__":
    main()
