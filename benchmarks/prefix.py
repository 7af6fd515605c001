"""What does one KV store for all replicas gain on shared prefixes?

How, and what was found: ``benchmarks/prefix.md``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from operator import truediv
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.harness import in_turns, over, parser_of, percentiles, run
from benchmarks.load import Outcome, send_when_due
from benchmarks.prefix_arms import CONTEXT, KINDS, MEMORY_BYTES, MODEL, arm, figures, urls
from benchmarks.servers import Arm, running
from benchmarks.workload import BLOCK_TOKENS, PrefixRequest, conversations, mooncake, reuse
from loomserve.platform.models import catalog

PAIRS = (
    ("store", "no_store"),
    ("store", "store_round_robin"),
    ("no_store", "round_robin"),
    ("store", "round_robin"),
    ("store", "prefix_router"),
    ("store", "power_of_two"),
    ("store", "stock"),
    ("store_prefix_router", "prefix_router"),
)
"""The first over the second. The first four tell BanaServe's store and its algorithm 4-2 apart: the
store with either router, and the router with and without the store."""


def replay(of: Arm, requests: Sequence[PrefixRequest], seed: str) -> Sequence[Outcome]:
    """Thaw an arm, send it the requests when they are due, freeze it; what came, in their order.

    Raises:
        NotMeasuredError: a request failed.
    """
    asked = [one.asked(MODEL, seed) for one in requests]
    of.thaw()
    outcomes = uvloop.run(send_when_due(urls(of), asked))
    of.freeze()
    return of.answered(outcomes)


def pairing(
    model: str, names: tuple[str, str], options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Two arms run by run, the first over the second."""
    pair = "_vs_".join(names)
    arms = {name: arm(name, model, n, folder / pair)[0] for n, name in enumerate(names)}

    ttft: dict[str, list[float]] = {name: [] for name in names}

    def measure(name: str, number: int) -> dict[str, Any]:
        came = replay(arms[name], workload(options, f"run {number}"), f"{pair}/{number}")
        ttft[name] += [one.ttft for one in came]
        return figures(came)

    with running(list(arms.values()), options.start_timeout, bind=False):
        for one in arms.values():
            replay(one, workload(options, "warm")[:6], f"warm-up/{pair}")
        runs = in_turns(names, options.runs, measure)
    return {
        "ttft_p50_ratio": over(runs, *names, "ttft_ms_p50"),
        "ttft_p99_ratio": over(runs, *names, "ttft_ms_p99"),
        # Both arms are sent the same requests.
        "by_request": percentiles("ttft_ratio", [*map(truediv, *ttft.values())]),
        "hit_rate": {name: statistics.median(one[name]["hit_rate"] for one in runs)
                     for name in names},
        "by_run": runs,
    }  # fmt: skip


def workload(options: argparse.Namespace, seed: str) -> list[PrefixRequest]:
    of = {
        "requests": options.requests,
        "rate": options.rate,
        "max_blocks": (CONTEXT - 128) // BLOCK_TOKENS,
        "seed": seed,
    }
    return mooncake(options.trace, **of) if options.trace else conversations(**of)


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = str(catalog.resolve("demo", Path.cwd()))
    pairs = {"_vs_".join(pair): pairing(model, pair, options, folder) for pair in options.pairs}
    ideal = reuse(workload(options, "run 0"))
    return {"pairs": pairs, "ideal_hit_rate": ideal, "runs": options.runs}


def _pair(text: str) -> tuple[str, str]:
    first, _, second = text.partition(":")
    if not {first, second} <= KINDS.keys() or first == second:
        raise argparse.ArgumentTypeError(f"give two of {', '.join(KINDS)} as ONE:OTHER")
    return first, second


def main() -> int:
    parser = parser_of("prefix", __doc__)
    parser.add_argument("--trace", type=Path, help="a Mooncake trace, .jsonl.gz")
    parser.add_argument("--runs", type=int, default=5, help="of each pair")
    parser.add_argument("--requests", type=int, default=40, help="a run and arm")
    parser.add_argument("--rate", type=float, default=0.8, help="requests a second")
    parser.add_argument(
        "--pairs", nargs="+", type=_pair, default=list(PAIRS), metavar="ONE:OTHER",
        help=f"of {', '.join(KINDS)}",
    )  # fmt: skip
    parser.add_argument("--start-timeout", type=float, default=600)
    return run(
        "prefix",
        parser.parse_args(),
        measured,
        without=("start_timeout",),
        block_tokens=BLOCK_TOKENS,
        memory_bytes=MEMORY_BYTES,
    )


if __name__ == "__main__":
    sys.exit(main())
