"""What does one KV store for all replicas gain on shared prefixes?

Two replicas of one model serve conversations whose turns share prefixes. Arms have the store (any
replica reuses what any other computed) or not, and a router: by load, in turn, by prefixes, or the
less loaded of two; and there are two of vLLM's own servers, which get requests in turn. All have
the same memory (:mod:`benchmarks.prefix_arms`). Arms run in pairs, in turn and with the same
requests; a run's requests are new to both. Requests arrive as an open loop.

``--trace`` takes a Mooncake trace (gzipped JSON lines), else conversations are generated in its
likeness. The last line of the output is one JSON object, also written to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.load import Outcome, Target, completion_body, new_session, post
from benchmarks.overhead import RequestsFailedError, in_turn
from benchmarks.prefix_arms import CONTEXT, KINDS, MEMORY_BYTES, PAIRS, arm, targets
from benchmarks.report import Spread, percentile, percentiles
from benchmarks.result_files import machine, publish
from benchmarks.servers import Arm, ServerFailedError, running
from benchmarks.workload import (
    BLOCK_TOKENS,
    PrefixRequest,
    conversations,
    mooncake,
    reuse,
    spread_over,
)
from loomserve.platform.models import catalog

_SERVED = re.compile(r"^vllm:prompt_tokens_total\{([^}]*)\} ([0-9.e+]+)$", re.MULTILINE)
_REPLICA = re.compile(r'replica="([^"]+)"')


@dataclass(frozen=True)
class Replay:
    """One arm's answers to one run's requests."""

    ttft_ms: list[float]
    hit_rate: float
    load_cv: float

    @property
    def p50(self) -> float:
        return percentile(self.ttft_ms, 50)

    @property
    def p99(self) -> float:
        return percentile(self.ttft_ms, 99)

    def figures(self) -> dict[str, Any]:
        return {
            **percentiles("ttft_ms", self.ttft_ms),
            "hit_rate": self.hit_rate,
            "load_cv": self.load_cv,
        }


def served_tokens(of: Sequence[Target]) -> dict[str, float]:
    """Prompt tokens that each replica, or server, has taken so far."""
    found: dict[str, float] = {}
    for target in of:
        with urllib.request.urlopen(f"{target.url}/metrics", timeout=10) as response:
            page = response.read().decode()
        for labels, value in _SERVED.findall(page):
            replica = _REPLICA.search(labels)
            if replica or len(of) > 1:
                found[replica[1] if replica else target.url] = float(value)
    return found


async def send(of: Sequence[Target], requests: Sequence[PrefixRequest], seed: str) -> list[Outcome]:
    """Each to the next target when it is due."""
    prompts = [request.prompt(seed) for request in requests]
    begin = time.perf_counter()
    async with new_session() as session:

        async def one(place: int, request: PrefixRequest, prompt: list[int]) -> Outcome:
            target = of[place % len(of)]
            due = begin + request.at_s
            await asyncio.sleep(due - time.perf_counter())
            data = completion_body(target.model, prompt, request.output_tokens)
            return await post(
                session, f"{target.url}/v1/completions", data, request.output_tokens, due
            )

        return await asyncio.gather(*map(one, itertools.count(), requests, prompts))


def replay(arm: Arm, requests: Sequence[PrefixRequest], seed: str) -> Replay:
    """Thaw an arm, send it the requests, freeze it.

    Raises:
        RequestsFailedError: a request failed.
    """
    arm.thaw()
    before = served_tokens(targets(arm))
    outcomes = uvloop.run(send(targets(arm), requests, seed))
    time.sleep(2.5)  # replicas report their metrics every two seconds
    after = served_tokens(targets(arm))
    arm.freeze()
    if errors := {outcome.error for outcome in outcomes if outcome.error}:
        raise RequestsFailedError(f"{arm.name}: {sorted(errors)[:3]}\n{arm.servers[0].tail()}")
    prompt_tokens = sum(outcome.prompt_tokens for outcome in outcomes)
    return Replay(
        ttft_ms=[1000 * outcome.ttft for outcome in outcomes],
        hit_rate=sum(outcome.cached_tokens for outcome in outcomes) / prompt_tokens,
        load_cv=spread_over([int(after[name] - before.get(name, 0)) for name in after]),
    )


def pairing(
    model: str, names: tuple[str, str], options: argparse.Namespace, folder: Path
) -> list[tuple[Replay, Replay]]:
    """Replays of two arms, run by run."""
    pair = "_vs_".join(names)
    arms = [arm(name, model, place, folder / pair) for place, name in enumerate(names)]
    pairs = []
    with running(arms, options.start_timeout, bind=False):
        for one in arms:
            replay(one, workload(options, "warm")[:6], f"warm-up/{pair}")
        for run in range(options.runs):
            requests = workload(options, f"run {run}")
            seed = f"{pair}/{run}"
            found = {side: replay(arms[side], requests, seed) for side in in_turn(run)}
            pairs.append((found[0], found[1]))
            print(describe(f"run {run + 1}/{options.runs}", requests, names, pairs[-1]), flush=True)
    return pairs


def workload(options: argparse.Namespace, seed: str) -> list[PrefixRequest]:
    most = (CONTEXT - 128) // BLOCK_TOKENS
    if options.trace:
        return mooncake(options.trace, requests=options.requests, rate=options.rate,
                        max_blocks=most, seed=seed)  # fmt: skip
    return conversations(requests=options.requests, rate=options.rate, max_blocks=most, seed=seed)


def describe(
    what: str,
    requests: Sequence[PrefixRequest],
    names: tuple[str, str],
    pair: tuple[Replay, Replay],
) -> str:
    one, base = pair
    return (
        f"{what}: {' and '.join(names)} TTFT p50 {one.p50:.0f} and {base.p50:.0f} ms, p99 "
        f"{one.p99:.0f} and {base.p99:.0f} ms, hit rate {one.hit_rate:.2f} and "
        f"{base.hit_rate:.2f} of {reuse(requests):.2f}, load CV {one.load_cv:.2f} and "
        f"{base.load_cv:.2f}"
    )


def ratio(pairs: Sequence[tuple[Replay, Replay]], rank: str) -> dict[str, float]:
    return asdict(Spread.of([getattr(s, rank) / getattr(b, rank) for s, b in pairs]))


def report(found: Mapping[tuple[str, str], Sequence[tuple[Replay, Replay]]]) -> dict[str, Any]:
    """Of each pair, the first arm over the second, a run; then each run's own figures."""
    return {
        "pairs": {
            "_vs_".join(names): {
                "ttft_p50_ratio": ratio(pairs, "p50"),
                "ttft_p99_ratio": ratio(pairs, "p99"),
                "hit_rate": {
                    name: statistics.median(one.hit_rate for one in side)
                    for name, side in zip(names, zip(*pairs, strict=True), strict=True)
                },
                "by_run": [
                    {name: one.figures() for name, one in zip(names, pair, strict=True)}
                    for pair in pairs
                ],
            }
            for names, pairs in found.items()
        }
    }


def _pair(text: str) -> tuple[str, str]:
    first, _, second = text.partition(":")
    if not {first, second} <= KINDS.keys() or first == second:
        raise argparse.ArgumentTypeError(f"give two of {', '.join(KINDS)} as ONE:OTHER")
    return first, second


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefix", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--trace", type=Path, help="a Mooncake trace, .jsonl.gz")
    parser.add_argument("--runs", type=int, default=5, help="of each pair")
    parser.add_argument("--requests", type=int, default=40, help="a run and arm")
    parser.add_argument("--rate", type=float, default=0.8, help="requests a second")
    parser.add_argument(
        "--pairs", nargs="+", type=_pair, default=list(PAIRS), metavar="ONE:OTHER",
        help=f"of {', '.join(KINDS)}",
    )  # fmt: skip
    parser.add_argument("--start-timeout", type=float, default=600)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="prefix-"))
    facts = machine()
    model = str(catalog.resolve("demo", Path.cwd()))
    print(f"serving {model}; logs in {folder}", flush=True)
    try:
        found = {names: pairing(model, names, options, folder) for names in options.pairs}
    except (ServerFailedError, RequestsFailedError) as error:
        print(f"prefix: {error}", file=sys.stderr)
        return 1
    setup = {
        "runs": options.runs,
        "requests": options.requests,
        "rate": options.rate,
        "trace": options.trace.name if options.trace else "generated",
        "ideal_hit_rate": reuse(workload(options, "run 0")),
        "block_tokens": BLOCK_TOKENS,
        "memory_bytes": MEMORY_BYTES,
        "pairs": options.pairs,
    }
    publish("prefix", {**report(found), "runs": options.runs}, setup=setup, facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
