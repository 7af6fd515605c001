"""What does a client see when an engine ends in the midst of its stream?

A platform with two replicas of the demo model in float32, each on a core, and the KV store. Streams
of all kinds of :data:`benchmarks.continuation_requests.KINDS` run at once: undisturbed, undisturbed
again, and then while an engine's process is

``kill``     killed (SIGKILL) once half of the streams have 1, 10 or 100 of 200 tokens,
``prefill``  killed while it computes prompts of 1,500 tokens,
``both``     killed, and the other replica's too once the first is back, under longer streams,
``stop``     stopped (SIGSTOP) for 5, 20 and 120 s, after which it goes on,
``drain``    emptied by the admin API.

Each time requests have another cache salt, so that no run finds blocks of the one before it. What
streams then hold (text, arguments of tools, finish reasons, usage, log probabilities to 1e-3) is
compared with the undisturbed ones. A pause is the time between a stream's last token before and the
first after. A client is not told which streams were on the engine: the platform counts how many
went on with tokens, and the longest gaps about the engine's end are taken to be theirs, which
exaggerates if others stood still for longer. A stream that moves again later pauses beyond what is
looked at: see ``continued`` and ``pause_ms_mean_by_platform``, which have all moves. A stream that
had no token yet counts by how much later its first came than undisturbed.

Any stream that is lost, or that differs while the undisturbed pair does not, fails the command. The
last line of the output is one JSON object. Run it as ``python -m benchmarks.continuation`` or
``make bench-continue``.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.continuation_platform import DisturbedPlatform, configuration, engine_process
from benchmarks.continuation_requests import (
    Answer,
    Asked,
    difference,
    mixture,
    new_session,
    stream,
    with_stop_strings,
)
from benchmarks.report import percentile, percentiles
from benchmarks.result_files import machine, publish, said_by

PREFILL_CONTEXT = 1500
BOTH_AT, DRAIN_AT, STOP_AT = 10, 50, 20
MAX_MODEL_LEN = 4096
_LOOK_S = 0.005
# Prompts of so many tokens take several times as long.
_PREFILL_S = 1.5
# A pause begins with what was on its way when the engine ended.
_ON_ITS_WAY_S = 1.0
PAUSES = "loomserve_continuation_pause_seconds"
CONTINUED = "loomserve_continued_requests_total"


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
        seconds: for how long an engine is stopped.
    """

    kind: str
    streams: Streams
    at: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        more = {"kill": f"_at_{self.at}", "stop": f"_{self.seconds:g}s"}.get(self.kind, "")
        return f"{self.kind}{more}, {self.streams.count} streams, context {self.streams.context}"


@dataclass
class Load:
    """Requests that run at once."""

    answers: list[Answer] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, url: str, asked: Sequence[Asked], key: str = "-") -> None:
        """Send them all, and return when all have ended, however they did.

        Args:
            url: of the platform.
            asked: gets a cache salt of this run.
            key: of the platform's API.
        """
        salt = uuid.uuid4().hex
        async with new_session(key) as session:
            now = time.perf_counter()
            self.answers = [Answer(one.salted(salt), now) for one in asked]
            await asyncio.gather(*(stream(session, url, one) for one in self.answers))
        self.ended.set()

    async def reached(self, tokens: int) -> None:
        """Return once half of the streams have so many pieces, or all have ended."""
        while not self.ended.is_set():
            if self.half_have(tokens):
                return
            await asyncio.sleep(_LOOK_S)

    def half_have(self, tokens: int) -> bool:
        """Whether half of the streams have so many pieces."""
        return 2 * sum(one.pieces >= tokens for one in self.answers) > len(self.answers)


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
    first_tokens_later: list[float]
    continued: dict[str, int]
    """Moves of requests, by the platform's reason."""
    drain_s: float | None = None
    platforms_mean_ms: float | None = None
    """Mean of the pauses, as the platform's own metric has it."""


@dataclass
class Disturbance:
    """When engines ended, on ``time.perf_counter``'s clock, and what else became of it."""

    at: list[float] = field(default_factory=list)
    gone: str | None = None
    drain_s: float | None = None


# What is done to engines


async def kill(platform: DisturbedPlatform, load: Load, scenario: Scenario) -> Disturbance:
    await load.reached(scenario.at)
    victim = await platform.busiest()
    engine_process(victim).kill()
    return Disturbance([time.perf_counter()], victim["id"])


async def kill_in_prefill(
    platform: DisturbedPlatform, load: Load, scenario: Scenario
) -> Disturbance:
    await asyncio.sleep(_PREFILL_S)
    victim = await platform.busiest()
    engine_process(victim).kill()
    return Disturbance([time.perf_counter()], victim["id"])


async def kill_both(platform: DisturbedPlatform, load: Load, scenario: Scenario) -> Disturbance:
    first = await kill(platform, load, scenario)
    await platform.whole(without=first.gone)
    if load.ended.is_set():
        raise RuntimeError("streams ended before the replica was back: ask for more --both-tokens")
    second = await kill(platform, load, scenario)
    return Disturbance(first.at + second.at, second.gone)


async def stop(platform: DisturbedPlatform, load: Load, scenario: Scenario) -> Disturbance:
    await load.reached(scenario.at)
    engine = engine_process(await platform.busiest())
    engine.send_signal(signal.SIGSTOP)
    at = time.perf_counter()
    try:
        await asyncio.sleep(scenario.seconds)
    finally:
        engine.send_signal(signal.SIGCONT)
    return Disturbance([at])


async def drain(platform: DisturbedPlatform, load: Load, scenario: Scenario) -> Disturbance:
    await load.reached(scenario.at)
    replica = (await platform.busiest())["id"]
    at = time.perf_counter()
    await platform.set_draining(replica, True)
    await platform.until_left(replica)
    took_s = time.perf_counter() - at
    await load.ended.wait()
    await platform.set_draining(replica, False)
    return Disturbance([at], drain_s=took_s)


Act = Callable[[DisturbedPlatform, Load, Scenario], Awaitable[Disturbance]]
ACTS: dict[str, Act] = {
    "kill": kill,
    "prefill": kill_in_prefill,
    "both": kill_both,
    "stop": stop,
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
            raise RuntimeError(f"{len(lost)} undisturbed streams were lost: {lost[0]}")
        if number == 0:  # it only tells what to stop at
            asked = with_stop_strings(asked, load.answers)
        else:
            runs.append(load.answers)
    return Undisturbed(asked, runs[0], differences(*runs))


def differences(one: Sequence[Answer], other: Sequence[Answer]) -> dict[int, str]:
    """By the request's number, of those that are whole."""
    pairs = enumerate(zip(one, other, strict=True))
    return {
        number: f"{a.asked.kind}: {found}"
        for number, (a, b) in pairs
        if not b.lost and (found := difference(a, b))
    }


async def disturbed(
    platform: DisturbedPlatform, scenario: Scenario, base: Undisturbed
) -> Disturbed:
    names = (f"{PAUSES}_count", f"{PAUSES}_sum")
    moved_before = await platform.metrics(CONTINUED, "reason")
    before = [await platform.metric(name) for name in names]
    load = Load()
    running = asyncio.create_task(load.run(platform.url, base.asked))
    try:
        done = await ACTS[scenario.kind](platform, load, scenario)
        print(f"{scenario.name}: {time.time() - time.perf_counter() + done.at[0]:.3f}", flush=True)
    finally:
        await running
    after = [await platform.metric(name) for name in names]
    moved = await platform.metrics(CONTINUED, "reason")
    paused, paused_s = (b - a for a, b in zip(before, after, strict=True))
    await platform.whole(without=done.gone)
    gaps = sorted((gap for at in done.at for gap in gaps_around(load.answers, at)), reverse=True)
    return Disturbed(
        load.answers,
        gaps[: round(paused)],
        gaps[round(paused) :],
        later(load.answers, base.answers, done.at[0]),
        {why: round(count - moved_before[why]) for why, count in moved.items()},
        done.drain_s,
        1000 * paused_s / paused if paused else None,
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


def later(answers: Sequence[Answer], base: Sequence[Answer], at: float) -> list[float]:
    """How much later than undisturbed first tokens came that came after a time, ms."""
    found = []
    for one, other in zip(answers, base, strict=True):
        for index, choice in one.choices.items():
            if choice.times and choice.times[0] > at and other.choice(index).times:
                undisturbed_s = other.choices[index].times[0] - other.sent
                found.append(1000 * (choice.times[0] - one.sent - undisturbed_s))
    return found


# Figures


def figures(scenario: Scenario, base: Undisturbed, runs: Sequence[Disturbed]) -> dict[str, Any]:
    lost = [f"{one.asked.kind}: {one.lost}" for run in runs for one in run.answers if one.lost]
    wrong = [differences(base.answers, run.answers) for run in runs]
    drains = [run.drain_s for run in runs if run.drain_s is not None]
    paused = [run.pauses for run in runs if run.pauses]
    return {
        "scenario": scenario.name,
        "kind": scenario.kind,
        "streams": scenario.streams.count,
        "context": scenario.streams.context,
        "tokens": scenario.streams.tokens,
        "lost_streams": len(lost),
        "wrong_tokens": sum(map(len, wrong)),
        "wrong_though_undisturbed_alike": sum(
            number not in base.differences for run in wrong for number in run
        ),
        "undisturbed_differences": len(base.differences),
        **percentiles("pause_ms", [gap for run in runs for gap in run.pauses]),
        "pause_ms_p50_by_run": [percentile(each, 50) for each in paused],
        "pause_ms_p99_by_run": [percentile(each, 99) for each in paused],
        "pause_ms_n_by_run": [len(each) for each in paused],
        "pause_ms_mean_by_platform": [run.platforms_mean_ms for run in runs],
        "paused_streams": sum(len(run.pauses) for run in runs),
        "continued": [run.continued for run in runs],
        **percentiles("others_gap_ms", [gap for run in runs for gap in run.others]),
        **percentiles(
            "first_token_later_ms", [gap for run in runs for gap in run.first_tokens_later]
        ),
        **percentiles(
            "undisturbed_gap_ms",
            [
                1000 * (b - a)
                for one in base.answers
                for choice in one.choices.values()
                for a, b in choice.gaps
            ],
        ),
        "undisturbed_longest_gap_ms_by_kind": longest_gaps(base.answers),
        "drain_s": drains,
        "runs": len(runs),
        "lost": lost,
        "wrong": [text for run in wrong for text in run.values()],
        "undisturbed": list(base.differences.values()),
    }


def longest_gaps(answers: Sequence[Answer]) -> dict[str, float]:
    """By kind of request: parsers hold some back."""
    found: dict[str, float] = {}
    for one in answers:
        gaps = [1000 * (b - a) for choice in one.choices.values() for a, b in choice.gaps]
        found[one.asked.kind] = max([*gaps, found.get(one.asked.kind, 0.0)])
    return found


def overall(scenarios: Sequence[dict[str, Any]], pauses: dict[int, list[float]]) -> dict[str, Any]:
    """Over all scenarios but those that stop an engine, whose pauses are the wait for its beats."""
    totals = ("lost_streams", "wrong_tokens", "wrong_though_undisturbed_alike")
    # One pair stands for all scenarios with its requests.
    pairs = {(one["streams"], one["context"], one["tokens"]): one for one in scenarios}
    return {
        **{name: sum(one[name] for one in scenarios) for name in totals},
        "undisturbed_differences": sum(one["undisturbed_differences"] for one in pairs.values()),
        **percentiles("pause_ms", [gap for of in pauses.values() for gap in of]),
        "by_context": {
            str(context): {**percentiles("pause_ms", of), "paused_streams": len(of)}
            for context, of in pauses.items()
        },
        "drain_s": [took for one in scenarios for took in one["drain_s"]],
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
    few = min(args.streams)
    for context in args.context if "stop" in args.scenarios else ():
        streams = Streams(few, context, args.tokens)
        found += [Scenario("stop", streams, STOP_AT, seconds) for seconds in args.stop]
    if "prefill" in args.scenarios:
        found.append(Scenario("prefill", Streams(few, PREFILL_CONTEXT, args.tokens)))
    if "both" in args.scenarios:
        found.append(Scenario("both", Streams(few, 0, args.both_tokens), BOTH_AT))
    return found


def tokens_at_once(args: argparse.Namespace) -> int:
    """The most that any scenario's streams have, with what prompts and second answers add."""
    return max(
        (one.streams.count + 4) * (one.streams.context + one.streams.tokens + 100)
        for one in scenarios_of(args)
    )


def measure(args: argparse.Namespace, platform: DisturbedPlatform) -> dict[str, Any]:
    bases: dict[Streams, Undisturbed] = {}
    measured: list[dict[str, Any]] = []
    pauses: dict[int, list[float]] = {}
    for scenario in scenarios_of(args):
        if scenario.streams not in bases:
            bases[scenario.streams] = asyncio.run(
                undisturbed(platform, scenario.streams, args.seed)
            )
        base = bases[scenario.streams]
        runs = [asyncio.run(disturbed(platform, scenario, base)) for _ in range(args.runs)]
        measured.append(figures(scenario, base, runs))
        if scenario.kind != "stop":
            of = pauses.setdefault(scenario.streams.context, [])
            of += [gap for run in runs for gap in run.pauses]
        print(measured[-1], flush=True)
    return {**overall(measured, pauses), "runs": args.runs, "scenarios": measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenarios", nargs="+", choices=ACTS, default=list(ACTS))
    parser.add_argument("--kill-at", type=int, nargs="+", default=[1, 10, 100], metavar="TOKEN")
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[0, 1000], metavar="TOKENS")
    parser.add_argument("--stop", type=float, nargs="+", default=[5, 20, 120], metavar="SECONDS")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer")
    parser.add_argument(
        "--both-tokens", type=int, default=1500, help="of an answer that outlives two engines"
    )
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
    facts = machine()
    config = configuration(args.port, MAX_MODEL_LEN, tokens_at_once(args), args.batched_tokens)
    with tempfile.TemporaryDirectory() as passing:
        platform = DisturbedPlatform(config, args.folder or Path(passing))
        with platform.running(args.start_timeout):
            result = measure(args, platform)
    setup = {**said_by(args, "folder", "port"), "config": config}
    publish("continuation", result, setup=setup, facts=facts)
    if result["lost_streams"] or result["wrong_though_undisturbed_alike"]:
        sys.exit("streams were lost or differ from undisturbed ones")


if __name__ == "__main__":
    main()
