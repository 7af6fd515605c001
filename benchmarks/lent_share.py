"""What share of a hot model's attention should a cold one compute?

The engines and loads of :mod:`benchmarks.weave`, with so much memory of the hot engine's own that
no request needs the lender's. At one rate, of both models, the share of the hot one's requests that
is placed there grows (Weaver, figure 5b): the hot model's and the cold one's time per output token
over those of share 0 in the same run. ``--plot FILE`` draws them. The last line of the output is
one JSON object.

Run it as ``python -m benchmarks.lent_share`` or ``make bench-lent-share``.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engine import BLOCK_BYTES
from benchmarks.report import Spread, percentiles
from benchmarks.result_files import machine, publish, said_by
from benchmarks.weave import Load, Run, served_woven
from benchmarks.weave import arrivals as scaled_arrivals
from benchmarks.weave_engines import woven

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    load = Load(scaled_arrivals(args.trace), args.cold_requests, args.cold_share)
    blocks = args.blocks
    hot = woven(
        0, blocks + 1, args.places, borrow_bytes=blocks * BLOCK_BYTES, patience_ms=5000,
        placement="ratio", move=False,
    )  # fmt: skip
    cold = woven(1, 2 * blocks + 1, args.places, lend_bytes=blocks * BLOCK_BYTES)
    runs: list[dict[float, Run]] = []
    try:
        for number in range(args.runs):
            runs.append({})
            for share in SHARES:
                await hot.call("place", "ratio", share)
                one = await served_woven(hot, cold, "slices", args.rate, load, str(number))
                runs[-1][share] = one
                tpot_ms = [statistics.fmean(of.tpot_ms) for of in (one.hot, one.cold)]
                print(f"run {number + 1}, share {share}: hot and cold TPOT, ms: {tpot_ms}")
    finally:
        hot.close()
        cold.close()
    return {
        "hot_tpot": {str(share): ratios(runs, share, "hot") for share in SHARES},
        "cold_tpot": {str(share): ratios(runs, share, "cold") for share in SHARES},
        "by_share": {str(share): absolute(runs, share) for share in SHARES},
        "runs": args.runs,
    }


def ratios(runs: list[dict[float, Run]], share: float, of: str) -> dict[str, float]:
    """Mean times per output token over those of the same run with share 0."""
    means = [
        [statistics.fmean(getattr(run[each], of).tpot_ms) for each in (share, 0.0)] for run in runs
    ]
    return asdict(Spread.of([with_it / without for with_it, without in means]))


def absolute(runs: list[dict[float, Run]], share: float) -> dict[str, Any]:
    """Of both models, over the requests of all runs."""
    return {
        name: value
        for of in ("hot", "cold")
        for name, value in percentiles(
            f"{of}_tpot_ms", [each for run in runs for each in getattr(run[share], of).tpot_ms]
        ).items()
    }


def plot(figures: Mapping[str, Any], file: Path) -> None:
    import matplotlib as mpl

    # The same figures give the same file.
    mpl.rcParams["svg.hashsalt"] = "lent_share"
    mpl.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, label in (("hot_tpot", "hot, which borrows"), ("cold_tpot", "cold, which lends")):
        points = list(figures[name].values())
        median = [point["median"] for point in points]
        low = [point["median"] - point["min"] for point in points]
        high = [point["max"] - point["median"] for point in points]
        axes.errorbar(
            [100 * share for share in SHARES], median, (low, high), capsize=3, label=label
        )
    axes.set_xlabel("requests placed with the lender (%)")
    axes.set_ylabel("time per output token over that of 0 %")
    axes.axhline(1, color="gray", linewidth=0.5)
    axes.legend()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=0.35)
    parser.add_argument("--cold-requests", type=int, default=34, help="a run, which they end")
    parser.add_argument("--cold-share", type=float, default=1.0, help="of the hot model's rate")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=96, help="of the hot engine's own")
    parser.add_argument("--places", type=int, default=32, help="requests in a step at most")
    parser.add_argument("--trace", type=Path, help="an Azure conversation trace, .csv.gz")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the points (SVG)")
    args = parser.parse_args()
    facts = machine()
    figures = asyncio.run(measure(args))
    if args.plot:
        plot(figures, args.plot)
    publish("lent_share", figures, setup=said_by(args, "plot"), facts=facts)


if __name__ == "__main__":
    main()
