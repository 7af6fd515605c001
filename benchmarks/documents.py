"""What does the KV store gain on long documents that are asked about again?

Thirty documents, whose KV is about twice the memory of two engines of one model, are asked
about in three rounds of another order each, so that most are asked about again when others
have pushed them out; then all engines are killed and started anew, and each document is asked
about once more. Two streams at a time, one an engine. All arms have the same memory, of which the
arm with the store gives half to it; its disk comes on top, as no engine can use one by itself
(:mod:`benchmarks.prefix_arms`). A run has documents of its own, which all arms get.

The last line of the output is one JSON object, also written to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.load import Outcome, completion_body, new_session, post
from benchmarks.overhead import RequestsFailedError
from benchmarks.prefix_arms import CONTEXT, KINDS, MEMORY_BYTES, MODEL, arm, targets
from benchmarks.report import Spread, percentile, percentiles
from benchmarks.result_files import machine, publish, said_by
from benchmarks.servers import Arm, ServerFailedError, running
from benchmarks.start import replicas
from benchmarks.workload import PrefixRequest, documents
from loomserve.platform.models import catalog

ENGINES = 2
ARMS = ("store_and_disk", "no_store", "prefix_router", "stock")
"""The first is compared with each of the others."""
_BACK_S = 120.0


@dataclass(frozen=True)
class Round:
    """One arm's answers to questions about all documents."""

    ttft_ms: list[float]
    prompt_tokens: int
    cached_tokens: int
    seconds: float

    def figures(self) -> dict[str, Any]:
        return {
            **percentiles("ttft_ms", self.ttft_ms),
            "hit_rate": self.cached_tokens / self.prompt_tokens,
            "seconds": self.seconds,
        }


def together(rounds: Sequence[Round]) -> Round:
    return Round(
        [each for one in rounds for each in one.ttft_ms],
        sum(one.prompt_tokens for one in rounds),
        sum(one.cached_tokens for one in rounds),
        sum(one.seconds for one in rounds),
    )


async def asked(of: Arm, requests: Sequence[PrefixRequest], seed: str) -> Round:
    """All requests in their order, by as many streams as there are engines.

    Raises:
        RequestsFailedError: a request failed.
    """
    waiting = iter([(each, each.prompt(seed)) for each in requests])
    to = targets(of)
    begin = time.perf_counter()
    async with new_session() as session:

        async def stream(number: int) -> list[Outcome]:
            target = to[number % len(to)]
            found = []
            for request, prompt in waiting:
                data = completion_body(target.model, prompt, request.output_tokens)
                url, now = f"{target.url}/v1/completions", time.perf_counter()
                found.append(await post(session, url, data, request.output_tokens, now))
            return found

        streams = await asyncio.gather(*map(stream, range(ENGINES)))
    outcomes = [one for each in streams for one in each]
    if errors := {one.error for one in outcomes if one.error}:
        raise RequestsFailedError(f"{of.name}: {sorted(errors)[:3]}\n{of.servers[0].tail()}")
    return Round(
        [1000 * one.ttft for one in outcomes],
        sum(one.prompt_tokens for one in outcomes),
        sum(one.cached_tokens for one in outcomes),
        time.perf_counter() - begin,
    )


def restart_engines(of: Arm, timeout_s: float) -> None:
    """Kill all engines of an arm, and return once it has as many others that answer.

    Raises:
        ServerFailedError: vLLM's own servers do not start again.
        TimeoutError: the platform has no others in two minutes.
    """
    if KINDS[of.name].policy is None:
        for server in of.servers:
            server.stop()
            server.start()
        for server in of.servers:
            server.wait_ready(timeout_s)
        return
    (port,) = (server.port for server in of.servers)
    gone = {each["id"]: each["engine_pid"] for each in replicas(MODEL, port)}
    for process in gone.values():
        psutil.Process(process).kill()
    until = time.monotonic() + _BACK_S
    while time.monotonic() < until:
        ids = {each["id"] for each in replicas(MODEL, port)}
        if len(ids) == ENGINES and not ids & gone.keys():
            return
        time.sleep(0.5)
    raise TimeoutError(f"{of.name} has no {ENGINES} other engines after {_BACK_S:.0f} s")


def run_of(
    of: Arm, rounds: Sequence[Sequence[PrefixRequest]], seed: str, timeout_s: float
) -> dict[str, Round]:
    """Thaw an arm, ask all rounds but the last, restart its engines, ask the last, freeze it."""
    of.thaw()
    *first, last = rounds
    found = [uvloop.run(asked(of, each, seed)) for each in first]
    restart_engines(of, timeout_s)
    after = uvloop.run(asked(of, last, seed))
    of.freeze()
    return {
        "first": found[0],
        "again": together(found[1:]),
        "all": together(found),
        "after_restart": after,
    }


def report(runs: Sequence[Mapping[str, Mapping[str, Round]]]) -> dict[str, Any]:
    """Of each other arm, the first arm over it, a run; then each run's own figures."""
    ours, *others = runs[0]

    def ratio(other: str, part: str, figure: str) -> dict[str, float]:
        def of(run: Mapping[str, Mapping[str, Round]], name: str) -> float:
            one = run[name][part]
            return one.seconds if figure == "seconds" else percentile(one.ttft_ms, 50)

        return asdict(Spread.of([of(run, ours) / of(run, other) for run in runs]))

    return {
        "over": {
            other: {
                part: {figure: ratio(other, part, figure) for figure in ("ttft_p50", "seconds")}
                for part in runs[0][other]
            }
            for other in others
        },
        "by_run": [
            {
                name: {part: one.figures() for part, one in parts.items()}
                for name, parts in run.items()
            }
            for run in runs
        ],
        "runs": len(runs),
    }


def measured(options: argparse.Namespace, folder: Path) -> list[dict[str, dict[str, Round]]]:
    model = str(catalog.resolve("demo", Path.cwd()))
    print(f"serving {model}; logs in {folder}", flush=True)
    arms = [arm(name, model, place, folder) for place, name in enumerate(options.arms)]
    found = []
    with running(arms, options.start_timeout, bind=False):
        for run in range(options.runs):
            rounds = documents(
                documents=options.documents, rounds=options.rounds + 1,
                tokens=tuple(options.tokens), output_tokens=options.output_tokens,
                seed=f"run {run}",
            )  # fmt: skip
            turn = run % len(arms)
            by_arm = {}
            for each in [*arms[turn:], *arms[:turn]]:
                by_arm[each.name] = run_of(each, rounds, f"run {run}", options.start_timeout)
                print(
                    f"run {run + 1}/{options.runs}: {describe(each.name, by_arm[each.name])}",
                    flush=True,
                )
            found.append({name: by_arm[name] for name in options.arms})
    return found


def describe(name: str, parts: Mapping[str, Round]) -> str:
    return f"{name}: TTFT p50 and hit rate " + ", ".join(
        f"{part} {percentile(one.ttft_ms, 50):.0f} ms "
        f"{one.cached_tokens / one.prompt_tokens:.2f} in {one.seconds:.0f} s"
        for part, one in parts.items()
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.documents", description=(__doc__ or "").partition("\n")[0]
    )
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
    options = arguments()
    facts = machine()
    try:
        runs = measured(options, Path(tempfile.mkdtemp(prefix="documents-")))
    except (ServerFailedError, RequestsFailedError, TimeoutError) as error:
        print(f"documents: {error}", file=sys.stderr)
        return 1
    setup = {**said_by(options, "start_timeout"), "memory_bytes": MEMORY_BYTES}
    publish("documents", report(runs), setup=setup, facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
