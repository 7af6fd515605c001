"""What does Loomserve cost over vLLM's own bare server?

Arms go in pairs, a baseline and one that is compared with it, and each pair is started anew. Both
serve the same model folder with the same engine flags, KV memory and pinning
(:mod:`benchmarks.overhead_arms`). On core 0 the measured
engine computes: of vLLM's server its worker alone, of Loomserve the engine's one process but for
its threads for sockets. On core 1 are front ends, vLLM's EngineCore, an idle second engine and this
load generator. Both stay up all the time, so that the two sides of a pair are seconds apart; the
side that is not measured is frozen (SIGSTOP), because idle Ray processes and idle engines take a
measurable share of core 1. But for ``one``, each arm holds two engines, of which one is idle:
several models are what Loomserve is for, and a user without it would run two servers.

The first of ``--arms`` is the baseline of all others. Where it is among them too, that is the noise
floor of the method, and each ratio says whether it lies beyond it.
``--arms loomserve:FOLDER,loomserve`` compares this checkout with another one, installed in FOLDER.

The last line of the output is one JSON object, also written to ``benchmarks/results``. Exit codes:
0 measured; 1 a request failed or a server went away; 2 wrong arguments or machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.load import Target, Window, closed_loop, open_loop
from benchmarks.overhead_arms import (
    DEFAULT_ARMS,
    KINDS,
    comparison_name,
    make_arms,
    pair_options,
    pairs,
    parse_kinds,
)
from benchmarks.report import (
    Pair,
    Sample,
    Spread,
    WindowTooShortError,
    absolute,
    comparison,
    sample,
    throughput_ratio,
)
from benchmarks.result_files import machine, publish
from benchmarks.servers import ENGINE_CORE, OTHER_CORE, Arm, EngineFlags, ServerFailedError, running
from loomserve.platform.base.errors import LoomserveError, StartError
from loomserve.platform.devices.precision import cpu_dtype
from loomserve.platform.models import catalog

LOADS = ("first", "1", "8", "32", "64", "open")
USUAL_LOADS = ("first", "1", "8", "32", "64")
"""Closed loops by their number of streams; ``first`` is one stream of two-token answers, since only
many requests tell a first token's few milliseconds of delay from the machine's noise."""
STREAMS = {"first": 1, "1": 1, "8": 8, "32": 32, "64": 64}
LONGER = {"32": 3, "64": 5}
"""A window must hold requests that begin and end in it; with many streams each takes longer."""
OPEN_SHARE = 0.6
"""The open loop's rate, as a share of what the first arm serves with 8 streams."""
ARM_BYTES = 7 * 2**30
"""Memory of one arm: two engines of a small model and their front ends, rounded up."""


@dataclass(frozen=True)
class Plan:
    """What to measure, how long and how often; seconds."""

    loads: tuple[str, ...]
    runs: int
    seconds: float
    warmup: float
    max_tokens: int


class RequestsFailedError(Exception):
    """At least one request failed, so the numbers mean nothing."""


def load(
    target: Target, name: str, plan: Plan, seed: str, rate: float
) -> Coroutine[Any, Any, Window]:
    if name == "open":
        return open_loop(
            target,
            rate=rate,
            warmup=plan.warmup,
            seconds=plan.seconds,
            max_tokens=plan.max_tokens,
            seed=seed,
        )
    return closed_loop(
        target,
        streams=STREAMS[name],
        warmup=plan.warmup,
        seconds=plan.seconds * LONGER.get(name, 1),
        max_tokens=2 if name == "first" else plan.max_tokens,
        seed=seed,
    )


def drive(arm: Arm, name: str, plan: Plan, seed: str, rate: float = 0.0) -> Window:
    """Thaw an arm, load it, freeze it.

    Raises:
        RequestsFailedError: a request did not yield exactly the tokens asked for.
    """
    arm.thaw()
    window = uvloop.run(load(arm.target, name, plan, seed, rate))
    arm.freeze()
    if window.errors:
        shown = "\n".join(sorted(set(window.errors))[:5])
        tails = "\n".join(server.tail() for server in arm.servers)
        raise RequestsFailedError(
            f"{arm.name}, load {name}: {len(window.errors)} of {len(window.outcomes)} requests "
            f"failed:\n{shown}\n{tails}"
        )
    return window


def measure(arm: Arm, name: str, plan: Plan, seed: str, rate: float) -> Sample:
    return sample(drive(arm, name, plan, seed, rate), closed=name != "open")


def in_turn(run: int) -> tuple[int, int]:
    """Which arm goes first: A B, B A, A B, … so that a steady drift favours neither."""
    return (0, 1) if run % 2 == 0 else (1, 0)


def measure_pairs(arms: Sequence[Arm], plan: Plan, rate: float) -> dict[str, list[Pair]]:
    measured: dict[str, list[Pair]] = {name: [] for name in plan.loads}
    for run in range(plan.runs):
        for name in plan.loads:
            # Both arms get the same prompts, and no two loads share one: prefix caches stay cold.
            samples = {
                index: measure(arms[index], name, plan, f"{run}/{name}", rate)
                for index in in_turn(run)
            }
            pair = (samples[0], samples[1])
            measured[name].append(pair)
            print(describe(f"run {run + 1}/{plan.runs}, load {name}", pair), flush=True)
    return measured


def describe(what: str, pair: Pair) -> str:
    base, arm = pair
    return (
        f"{what}: {base.throughput:.1f} and {arm.throughput:.1f} tok/s "
        f"(ratio {arm.throughput / base.throughput:.3f}), TTFT p50 {base.ttft_p50:.1f} and "
        f"{arm.ttft_p50:.1f} ms, TPOT p50 {base.tpot_p50:.2f} and {arm.tpot_p50:.2f} ms"
    )


def summary(spreads: dict[str, Spread]) -> str:
    return "\n".join(
        f"load {name}: throughput ratio {of.median:.3f} ({of.min:.3f} to {of.max:.3f})"
        for name, of in spreads.items()
    )


def idle(arm: Arm) -> dict[str, float]:
    """What an arm takes while nobody asks: CPU seconds a second on each core, and memory."""
    arm.thaw()
    # Engines poll busily for a while after their last request.
    time.sleep(5)
    found = arm.idle_share(5)
    found["memory_gib"] = sum(server.memory_bytes() for server in arm.servers) / 2**30
    arm.freeze()
    return found


def benchmark(arms: Sequence[Arm], plan: Plan) -> dict[str, Any]:
    """All pairs of all loads; the arms are up and frozen."""
    at_rest = {arm.name: idle(arm) for arm in arms}
    for name, found in at_rest.items():
        print(f"{name} at rest: {found}", flush=True)
    # Before anything counts: engines and front ends allocate on first use.
    warm = replace(plan, seconds=min(plan.seconds, 5))
    for arm in arms:
        drive(arm, "32", warm, "warm-up/32")
    capacity = drive(arms[0], "8", warm, "warm-up/8").tokens_per_second()
    rate = OPEN_SHARE * capacity / plan.max_tokens
    print(f"warm; the open loop sends {rate:.2f} requests/s", flush=True)
    measured = measure_pairs(arms, plan, rate)
    print(summary({name: throughput_ratio(of) for name, of in measured.items()}), flush=True)
    return {
        **comparison(measured),
        **({"open_loop": open_loop_figures(measured["open"], rate)} if "open" in measured else {}),
        "absolute": {
            arm.name: {name: absolute([pair[side] for pair in of]) for name, of in measured.items()}
            for side, arm in enumerate(arms)
        },
        "at_rest": at_rest,
        "by_run": [
            {
                name: {arm.name: absolute([one]) for arm, one in zip(arms, of[run], strict=True)}
                for name, of in measured.items()
            }
            for run in range(plan.runs)
        ],
        "memory_gib": at_rest[arms[1].name]["memory_gib"],
        "idle_cores": sum(at_rest[arms[1].name][core] for core in ("core0", "core1")),
    }


def open_loop_figures(pairs: Sequence[Pair], rate: float) -> dict[str, Any]:
    return {
        "requests_per_second": rate,
        "share_of_8_stream_capacity": OPEN_SHARE,
        "throughput_ratio": asdict(throughput_ratio(pairs)),
    }


def compared(
    kinds: tuple[str, str],
    model: str,
    flags: EngineFlags,
    plan: Plan,
    options: argparse.Namespace,
    logs: Path,
) -> dict[str, Any]:
    """Start a pair of arms, measure it, and end it."""
    here = os.sched_getaffinity(0)
    arms = make_arms(kinds, model, flags, logs)
    with running(arms, options.start_timeout):
        # Servers that start inherit where this process may run, so it is bound only after that.
        os.sched_setaffinity(0, {OTHER_CORE})
        try:
            found = benchmark(arms, plan)
        finally:
            os.sched_setaffinity(0, here)
    return {"baseline": kinds[0], **found, "setup": asdict(pair_options(kinds, flags))}


def beyond_noise(comparisons: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, bool]]:
    """Of each comparison but the noise floor's, which medians lie outside of what that spans."""
    if "noise" not in comparisons:
        return {}
    floor = comparisons["noise"]["spread"]
    return {
        name: {
            figure: not least <= found[figure] <= most for figure, (least, most) in floor.items()
        }
        for name, found in comparisons.items()
        if name != "noise"
    }


def check_machine(arms: int) -> None:
    """Refuse a machine on which the numbers would mean something else.

    Raises:
        StartError: says what is missing.
    """
    if not {ENGINE_CORE, OTHER_CORE} <= os.sched_getaffinity(0):
        raise StartError(f"cores {ENGINE_CORE} and {OTHER_CORE} are needed; allow both (taskset)")
    available = psutil.virtual_memory().available
    if available < arms * ARM_BYTES:
        raise StartError(
            f"{arms} arms need about {arms * ARM_BYTES / 2**30:.0f} GiB of memory and "
            f"{available / 2**30:.1f} GiB is available; end other programs"
        )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", default="demo", help="demo, a folder, or a hub id")
    parser.add_argument(
        "--arms",
        default=list(DEFAULT_ARMS),
        type=parse_kinds,
        help="the baseline, and what is compared with it: "
        + "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
        + "; loomserve:FOLDER: another checkout, installed there",
    )
    parser.add_argument(
        "--loads",
        default=USUAL_LOADS,
        type=_loads,
        help=f"which loads, by their streams, of {','.join(LOADS)}; all but the last by default",
    )
    parser.add_argument("--runs", type=int, default=5, help="pairs of each load")
    parser.add_argument("--seconds", type=float, default=8, help="measured time a load and arm")
    parser.add_argument("--warmup", type=float, default=2, help="time before each measurement, s")
    parser.add_argument("--max-tokens", type=int, default=32, help="output tokens a request")
    parser.add_argument("--dtype", help="vLLM's dtype for both arms; else what this CPU is fit for")
    parser.add_argument("--start-timeout", type=float, default=600, help="for each server, s")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    parser.add_argument("--quick", action="store_true", help="a smoke run: 1 pair of 3 s each")
    parsed = parser.parse_args(words)
    if parsed.quick:
        parsed.runs, parsed.seconds, parsed.warmup = 1, 3, 1
    if parsed.runs < 1 or parsed.seconds <= 0 or parsed.warmup < 0 or parsed.max_tokens < 2:
        parser.error("--runs and --seconds must be positive, --warmup not negative, "
                     "--max-tokens at least 2")  # fmt: skip
    return parsed


def _loads(text: str) -> tuple[str, ...]:
    loads = tuple(text.split(","))
    if len(set(loads)) < len(loads) or not set(loads) <= set(LOADS):
        raise argparse.ArgumentTypeError(f"give some of {','.join(LOADS)}, each once")
    return loads


def main() -> int:
    options = arguments()
    plan = Plan(options.loads, options.runs, options.seconds, options.warmup, options.max_tokens)
    flags = EngineFlags(dtype=options.dtype or cpu_dtype())
    logs = options.logs or Path(tempfile.mkdtemp(prefix="overhead-"))
    facts = machine()
    begin = time.monotonic()
    try:
        check_machine(2)
        model = str(catalog.resolve(options.model, Path.cwd()))
        print(f"serving {model}; logs in {logs}", flush=True)
        comparisons = {}
        for kinds in pairs(options.arms):
            name = comparison_name(*kinds)
            comparisons[name] = compared(kinds, model, flags, plan, options, logs / name)
    except (LoomserveError, WindowTooShortError) as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 2
    except (ServerFailedError, RequestsFailedError) as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 1
    figures = {
        "comparisons": comparisons,
        "beyond_noise": beyond_noise(comparisons),
        "errors": 0,
    }
    setup = {
        "arms": options.arms,
        "plan": asdict(plan),
        "model": Path(model).name,
        "cores": {"engine": ENGINE_CORE, "other": OTHER_CORE},
        "unmeasured_arm": "frozen",
        "wall_seconds": round(time.monotonic() - begin),
    }
    publish("overhead", figures, setup=setup, facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
