"""What does a client see when an engine ends in the midst of its stream?

How, and what was found: ``benchmarks/continuation.md``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import NotMeasuredError, parser_of, percentile, percentiles, run
from benchmarks.platforms import CORES, Platform, configuration, engine_process, served
from tests.streams import Answer, Asked, Load, differences, mixture, with_stop_strings

MODEL = "demo"
DRAIN_AT = 50
MAX_MODEL_LEN = 4096
_BYTES_A_TOKEN = 46_080
"""Of the demo model's KV in float32."""
_WHOLE_S = 600.0
_CONNECTED_S = 2.0
_ON_ITS_WAY_S = 1.0
"""A pause begins with what was on its way when the engine ended."""
PAUSES = "loomserve_continuation_pause_seconds"
CONTINUED = "loomserve_continued_requests_total"


def configured(
    port: int, max_model_len: int, tokens_at_once: int, batched_tokens: int | None
) -> dict[str, Any]:
    """Two replicas, each on its core, with the KV store between them.

    Args:
        port: that it listens on.
        max_model_len: of a request.
        tokens_at_once: of all requests that run; each replica, and the store, can hold them alone.
        batched_tokens: of a step; None: vLLM's default.
    """
    kv_bytes = max(tokens_at_once * _BYTES_A_TOKEN, 256 * 2**20)
    engine: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_num_seqs": 64,
        "block_size": 32,
        "enforce_eager": True,
        # Answers do not depend on who is computed with whom.
        "dtype": "float32",
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
        **({} if batched_tokens is None else {"max_num_batched_tokens": batched_tokens}),
    }
    of = served(MODEL, "demo", kv_bytes, engine)
    return configuration(port, of, kvstore={"memory": kv_bytes})


class DisturbedPlatform(Platform):
    """Whose engines end while its clients, in this thread's event loop, read their streams."""

    async def busiest(self) -> dict[str, Any]:
        """The replica that has most requests."""
        replicas = await asyncio.to_thread(self.replicas, MODEL)
        return max(replicas, key=lambda one: int(one["in_flight"]))

    async def whole(self, without: str | None = None) -> None:
        """Return once all replicas take requests, ``without`` being none of them.

        Raises:
            TimeoutError: they do not.
        """

        def is_whole() -> bool:
            model = self.models()[MODEL]
            ids = [one["id"] for one in model["replicas"]]
            return model["status"] == "ready" and len(ids) == len(CORES) and without not in ids

        await asyncio.to_thread(self.wait, is_whole, _WHOLE_S, "all replicas are back", 0.5)
        # Gateways connect to what the controller knows of.
        await asyncio.sleep(_CONNECTED_S)

    async def drain(self, replica: str, draining: bool) -> None:
        body = {"draining": draining}
        await asyncio.to_thread(self.put, f"replicas/{replica}/draining", body)

    async def until_left(self, replica: str) -> None:
        """Return once the state shows no request on a replica.

        Raises:
            TimeoutError: it goes on showing some.
        """

        def is_empty() -> bool:
            there = self.replicas(MODEL)
            return not sum(one["in_flight"] for one in there if one["id"] == replica)

        await asyncio.to_thread(self.wait, is_empty, _WHOLE_S, f"{replica} is empty", 0.05)


@dataclass(frozen=True)
class Streams:
    """A set of requests that run at once."""

    count: int
    context: int
    tokens: int


@dataclass(frozen=True)
class Scenario:
    """
    Attributes:
        at: tokens of half of the streams at which it happens.
    """

    kind: str
    streams: Streams
    at: int

    @property
    def name(self) -> str:
        kind = f"kill_at_{self.at}" if self.kind == "kill" else self.kind
        return f"{kind}, {self.streams.count} streams, context {self.streams.context}"


@dataclass
class Undisturbed:
    """Two runs of the same requests."""

    asked: list[Asked]
    answers: list[Answer]
    differences: dict[int, str]
    """Of the second run, by the request's number."""


@dataclass
class Disturbed:
    """One run of a scenario; times in ms."""

    answers: list[Answer]
    pauses: list[float]
    others: list[float]
    """Longest gaps meanwhile of the streams that stayed where they were."""
    continued: dict[str, int]
    """Moves of requests, by the platform's reason."""
    drain_s: float | None = None
    platforms_mean_ms: float | None = None
    """Mean of the pauses, as the platform's own metric has it."""


@dataclass
class Disturbance:
    """When an engine ended, on ``time.perf_counter``'s clock, and what else became of it."""

    at: float
    gone: str | None = None
    drain_s: float | None = None


# What is done to engines


async def kill(platform: DisturbedPlatform, load: Load) -> Disturbance:
    victim = await platform.busiest()
    engine_process(victim).kill()
    return Disturbance(time.perf_counter(), victim["id"])


async def drain(platform: DisturbedPlatform, load: Load) -> Disturbance:
    replica = (await platform.busiest())["id"]
    at = time.perf_counter()
    await platform.drain(replica, True)
    await platform.until_left(replica)
    took_s = time.perf_counter() - at
    await load.ended.wait()
    await platform.drain(replica, False)
    return Disturbance(at, drain_s=took_s)


ACTS: dict[str, Callable[[DisturbedPlatform, Load], Awaitable[Disturbance]]] = {
    "kill": kill,
    "drain": drain,
}


# Runs


async def undisturbed(platform: DisturbedPlatform, streams: Streams, seed: int) -> Undisturbed:
    asked = mixture("demo", streams.count, streams.tokens, streams.context, seed)
    runs = []
    for number in range(3):
        load = Load()
        await load.run(platform.url, asked)
        if lost := [one.lost for one in load.answers if one.lost]:
            raise NotMeasuredError(f"{len(lost)} undisturbed streams were lost: {lost[0]}")
        if number == 0:  # it only tells what to stop at
            asked = with_stop_strings(asked, load.answers)
        else:
            runs.append(load.answers)
    return Undisturbed(asked, runs[0], differences(*runs))


async def disturbed(
    platform: DisturbedPlatform, scenario: Scenario, base: Undisturbed
) -> Disturbed:
    def counts() -> tuple[float, float, dict[str, float]]:
        paused, seconds = (platform.metrics(f"{PAUSES}_{end}")[""] for end in ("count", "sum"))
        return paused, seconds, platform.metrics(CONTINUED, "reason")

    paused_before, seconds_before, moved_before = await asyncio.to_thread(counts)
    load = Load()
    running = asyncio.create_task(load.run(platform.url, base.asked))
    try:
        await load.reached(scenario.at)
        done = await ACTS[scenario.kind](platform, load)
        print(f"{scenario.name}: {time.time() - time.perf_counter() + done.at:.3f}", flush=True)
    finally:
        await running
    paused, seconds, moved = await asyncio.to_thread(counts)
    count = round(paused - paused_before)
    await platform.whole(without=done.gone)
    gaps = sorted(gaps_around(load.answers, done.at), reverse=True)
    return Disturbed(
        load.answers,
        gaps[:count],
        gaps[count:],
        {why: round(each - moved_before[why]) for why, each in moved.items()},
        done.drain_s,
        1000 * (seconds - seconds_before) / count if count else None,
    )


def gaps_around(answers: Sequence[Answer], at: float) -> list[float]:
    """The longest gap of each stream that begins before or about a time and ends after it, ms."""
    found = []
    for one in answers:
        for choice in one.choices.values():
            around = [b - a for a, b in choice.gaps if b > at > a - _ON_ITS_WAY_S]
            if around and choice.times[0] <= at:
                found.append(1000 * max(around))
    return found


# Figures


def figures(scenario: Scenario, base: Undisturbed, runs: Sequence[Disturbed]) -> dict[str, Any]:
    lost = [f"{one.asked.kind}: {one.lost}" for each in runs for one in each.answers if one.lost]
    wrong = [differences(base.answers, each.answers) for each in runs]
    paused = [each.pauses for each in runs if each.pauses]
    return {
        "scenario": scenario.name,
        "kind": scenario.kind,
        "streams": scenario.streams.count,
        "context": scenario.streams.context,
        "tokens": scenario.streams.tokens,
        "lost_streams": len(lost),
        "wrong_tokens": sum(map(len, wrong)),
        "wrong_though_undisturbed_alike": sum(
            number not in base.differences for each in wrong for number in each
        ),
        "undisturbed_differences": len(base.differences),
        **percentiles("pause_ms", [gap for each in runs for gap in each.pauses]),
        "pause_ms_p50_by_run": [percentile(each, 50) for each in paused],
        "pause_ms_mean_by_platform": [each.platforms_mean_ms for each in runs],
        "continued": [each.continued for each in runs],
        **percentiles("others_gap_ms", [gap for each in runs for gap in each.others]),
        "drain_s": [each.drain_s for each in runs if each.drain_s is not None],
        "runs": len(runs),
        "lost": lost,
        "wrong": [text for each in wrong for text in each.values()],
        "undisturbed": list(base.differences.values()),
    }


def scenarios_of(args: argparse.Namespace) -> list[Scenario]:
    found = []
    for count in args.streams:
        for context in args.context:
            streams = Streams(count, context, args.tokens)
            if "kill" in args.scenarios:
                found += [Scenario("kill", streams, at) for at in args.kill_at]
            if "drain" in args.scenarios:
                found.append(Scenario("drain", streams, DRAIN_AT))
    return found


def tokens_at_once(args: argparse.Namespace) -> int:
    """The most that any scenario's streams have, with what prompts and second answers add."""
    return max(
        (one.streams.count + 4) * (one.streams.context + one.streams.tokens + 100)
        for one in scenarios_of(args)
    )


def measured(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    platform = DisturbedPlatform(platform_config(args), args.folder or folder)
    found: list[dict[str, Any]] = []
    with platform.running(args.start_timeout):
        asyncio.run(platform.whole())
        bases: dict[Streams, Undisturbed] = {}
        for scenario in scenarios_of(args):
            if (streams := scenario.streams) not in bases:
                bases[streams] = asyncio.run(undisturbed(platform, streams, args.seed))
            base = bases[streams]
            runs = [asyncio.run(disturbed(platform, scenario, base)) for _ in range(args.runs)]
            found.append(figures(scenario, base, runs))
            print(found[-1], flush=True)
    totals = ("lost_streams", "wrong_tokens", "wrong_though_undisturbed_alike")
    return {
        **{name: sum(one[name] for one in found) for name in totals},
        "pause_ms": {one["scenario"]: one["pause_ms_p50"] for one in found},
        "runs": args.runs,
        "scenarios": found,
    }


def platform_config(args: argparse.Namespace) -> dict[str, Any]:
    return configured(args.port, MAX_MODEL_LEN, tokens_at_once(args), args.batched_tokens)


def main() -> int:
    parser = parser_of("continuation", __doc__)
    parser.add_argument("--scenarios", nargs="+", choices=ACTS, default=list(ACTS))
    parser.add_argument("--kill-at", type=int, nargs="+", default=[1, 10, 100], metavar="TOKEN")
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[0, 1000], metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer")
    parser.add_argument(
        "--batched-tokens", type=int, help="of a step, vLLM's max_num_batched_tokens"
    )
    parser.add_argument("--runs", type=int, default=3, help="of each scenario")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=18_441)
    parser.add_argument("--start-timeout", type=float, default=900)
    parser.add_argument(
        "--folder", type=Path, help="where configuration and log of the platform stay"
    )
    args = parser.parse_args()
    config = platform_config(args)
    hidden = ("folder", "port", "start_timeout")
    return run("continuation", args, measured, without=hidden, config=config)


if __name__ == "__main__":
    sys.exit(main())
