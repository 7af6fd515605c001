"""What does the KV store gain on long documents that are asked about again?

How, and what was found: ``benchmarks/prefix.md``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.harness import in_turns, over, parser_of, run
from benchmarks.load import Outcome, send_in_streams
from benchmarks.platforms import Platform
from benchmarks.prefix_arms import CONTEXT, KINDS, MEMORY_BYTES, MODEL, arm, figures, urls
from benchmarks.servers import Arm, running
from benchmarks.start import kill_engines
from benchmarks.workload import PrefixRequest, documents
from loomserve.platform.models import catalog

ENGINES = 2
ARMS = ("store_and_disk", "no_store", "prefix_router", "stock")
"""The first is compared with each of the others."""
Round = tuple[list[Outcome], float]
"""Answers to questions about all documents, and the seconds that they took."""


def asked(of: Arm, requests: Sequence[PrefixRequest], seed: str) -> Round:
    """All requests in their order, by as many streams as there are engines.

    Raises:
        NotMeasuredError: a request failed.
    """
    all_ = [one.asked(MODEL, seed) for one in requests]
    begin = time.perf_counter()
    outcomes = uvloop.run(send_in_streams(urls(of), all_, ENGINES))
    seconds = time.perf_counter() - begin
    return list(of.answered(outcomes)), seconds


def together(rounds: Sequence[Round]) -> dict[str, Any]:
    outcomes = [one for of_round, _ in rounds for one in of_round]
    return {**figures(outcomes), "seconds": sum(seconds for _, seconds in rounds)}


def restart_engines(of: Arm, platform: Platform | None, timeout_s: float) -> None:
    """Kill all engines of an arm, and return once it has as many others that answer.

    Raises:
        ServerFailedError: vLLM's own servers do not start again.
        TimeoutError: the platform has no others in two minutes.
    """
    if platform is not None:
        kill_engines(platform, MODEL)
        return
    for server in of.servers:
        server.stop()
        server.start()
    for server in of.servers:
        server.wait_ready(timeout_s)


def run_of(
    of: Arm,
    platform: Platform | None,
    rounds: Sequence[Sequence[PrefixRequest]],
    seed: str,
    timeout_s: float,
) -> dict[str, dict[str, Any]]:
    """Thaw an arm, ask all rounds but the last, restart its engines, ask the last, freeze it."""
    of.thaw()
    *first, last = rounds
    found = [asked(of, each, seed) for each in first]
    restart_engines(of, platform, timeout_s)
    after = asked(of, last, seed)
    of.freeze()
    return {
        "first": together(found[:1]),
        "again": together(found[1:]),
        "all": together(found),
        "after_restart": together([after]),
    }


def report(runs: Sequence[dict[str, dict[str, dict[str, Any]]]]) -> dict[str, Any]:
    """Of each other arm, the first arm over it, a run; then each run's own figures."""
    ours, *others = runs[0]

    def ratios(other: str, part: str) -> dict[str, Any]:
        of_part = [{name: run[name][part] for name in (ours, other)} for run in runs]
        return {
            "ttft_p50": over(of_part, ours, other, "ttft_ms_p50"),
            "seconds": over(of_part, ours, other, "seconds"),
        }

    return {
        "over": {other: {part: ratios(other, part) for part in runs[0][other]} for other in others},
        "by_run": runs,
        "runs": len(runs),
    }


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = str(catalog.resolve("demo", Path.cwd()))
    arms = {name: arm(name, model, n, folder) for n, name in enumerate(options.arms)}

    def measure(name: str, number: int) -> dict[str, Any]:
        rounds = documents(
            documents=options.documents, rounds=options.rounds + 1,
            tokens=tuple(options.tokens), output_tokens=options.output_tokens,
            seed=f"run {number}",
        )  # fmt: skip
        return run_of(*arms[name], rounds, f"run {number}", options.start_timeout)

    with running([one for one, _ in arms.values()], options.start_timeout, bind=False):
        return report(in_turns(options.arms, options.runs, measure))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("documents", __doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=KINDS, default=list(ARMS))
    parser.add_argument("--documents", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3, help="before the restart")
    parser.add_argument(
        "--tokens", nargs=2, type=int, default=(1024, 1792), help="of a document, least and most"
    )
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--start-timeout", type=float, default=600, help="for each server, s")
    parsed = parser.parse_args(words)
    if len(parsed.arms) < 2 or parsed.runs < 1 or parsed.rounds < 2:
        parser.error("give two arms or more, a run or more, and two rounds or more")
    if max(parsed.tokens) + parsed.output_tokens + 64 > CONTEXT:
        parser.error(f"--tokens: a document and its question fit {CONTEXT} tokens")
    return parsed


def main() -> int:
    return run(
        "documents",
        arguments(),
        measured,
        without=("start_timeout",),
        memory_bytes=MEMORY_BYTES,
    )


if __name__ == "__main__":
    sys.exit(main())
