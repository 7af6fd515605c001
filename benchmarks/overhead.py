"""What does Loomserve cost over vLLM's own bare server?

How, and what was found: ``benchmarks/overhead.md``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.harness import medians, parser_of, ratios, rotated, run, spread
from benchmarks.load import Window, closed_loop
from benchmarks.platforms import PROGRAMS, Platform, two_models
from benchmarks.servers import ENGINE_CORE, OTHER_CORE, Arm, EngineFlags, bare_arm, running
from loomserve.platform import config
from loomserve.platform.base.errors import LoomserveError, StartError
from loomserve.platform.devices.machine import cpu_dtype
from loomserve.platform.models import catalog

KINDS = {
    "bare": "vLLM's own server, one an engine",
    "one": "Loomserve with one model",
    "loomserve": "Loomserve with two models, of which one is idle",
    "lending": "likewise, and they may lend to each other",
    "default": "likewise, as the example of make serve has it: its options, and its KV store",
}
"""``loomserve:FOLDER`` is another checkout, installed there."""
DEFAULT_ARMS = ("bare", "bare", "one", "loomserve", "default")
BUSY = "busy"
STREAMS = {"first": 1, "1": 1, "8": 8, "32": 32, "64": 64, BUSY: 16}
"""Of each load, all closed loops; ``first`` is one stream of two-token answers, since only many
requests tell a first token's few milliseconds of delay from the machine's noise. ``busy`` asks both
models at once, and no core is kept for anything but engines: what a platform takes, they lack."""
LONGER = {"32": 3, "64": 5}
"""A window must hold requests that begin and end in it; with many streams each takes longer."""
FIRST_PORT = 18500
EXAMPLE = Path(__file__).parents[1] / "examples/laptop.yaml"
Pair = tuple[dict[str, Any], dict[str, Any]]
"""Figures of the baseline's window and of the other arm's, taken one right after the other."""


# Arms


@dataclass(frozen=True)
class PairOptions:
    """What both arms of a pair are started with.

    Attributes:
        flags: of each engine.
        engines: how many; all but the measured one are idle.
        store_bytes: memory of the default configuration's KV store.
    """

    flags: EngineFlags
    engines: int
    store_bytes: int


def pair_options(kinds: Sequence[str], flags: EngineFlags) -> PairOptions:
    """For two arms; with ``default``, both have the flags of ``examples/laptop.yaml``.

    ``max_num_batched_tokens`` is not in it, and given to both arms as in every pair.
    """
    example = config.parse(EXAMPLE.read_text(encoding="utf-8"))
    model = example.models[0]
    if "default" in kinds:
        flags = EngineFlags(**model.engine, kv_cache_memory_bytes=model.kv_cache_memory)
    assert example.kvstore is not None
    return PairOptions(flags, 1 if "one" in kinds else 2, example.kvstore.memory)


def pairs(kinds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The baseline with each of the others."""
    for other in kinds[1:]:
        yield kinds[0], other


def comparison_name(baseline: str, other: str) -> str:
    """What a pair's figures are called; ``noise`` is the baseline against itself."""
    if other == baseline:
        return "noise"
    return "loomserve-there" if ":" in other else other


def make_arms(kinds: Sequence[str], model: str, flags: EngineFlags, logs: Path) -> list[Arm]:
    """Of a pair; nothing is started. Configurations are written to ``logs``."""
    first, second = ("loomserve-there" if ":" in kind else kind for kind in kinds)
    names = (first, f"{second}-again" if first == second else second)
    options = pair_options(kinds, flags)
    arms = []
    for number, (kind, name) in enumerate(zip(kinds, names, strict=True)):
        port = FIRST_PORT + 10 * number
        if kind == "bare":
            arms.append(bare_arm(name, model, options.flags, port, logs, options.engines))
            continue
        checkout = kind.partition(":")[2]
        written = two_models(
            model,
            options.flags,
            port,
            lending="auto" if kind == "lending" else None,
            engines=options.engines,
            store_bytes=options.store_bytes if kind == "default" else None,
        )
        programs = Path(checkout, ".venv/bin").absolute() if checkout else PROGRAMS
        models = ("measured", "idle")[: options.engines]
        arms.append(Platform(written, logs, name, programs).arm(*models))
    return arms


def parse_kinds(text: str) -> list[str]:
    """Of a command line.

    Raises:
        argparse.ArgumentTypeError: there are fewer than two, one is not known, or not installed.
    """
    kinds = text.split(",")
    if len(kinds) < 2 or not {kind.partition(":")[0] for kind in kinds} <= KINDS.keys():
        raise argparse.ArgumentTypeError(
            f"give two or more of {', '.join(KINDS)}, the baseline first, such as bare,default"
        )
    for kind in kinds:
        checkout = kind.partition(":")[2]
        if checkout and not Path(checkout, ".venv/bin/loomserve").exists():
            raise argparse.ArgumentTypeError(f"{checkout} is not installed: run make install there")
    return kinds


# Measuring


def drive(arm: Arm, name: str, plan: argparse.Namespace, seed: str) -> Window:
    """Thaw an arm, load it, freeze it.

    Raises:
        NotMeasuredError: a request did not yield exactly the tokens asked for.
    """
    arm.thaw()
    load = closed_loop(
        *(arm.targets if name == BUSY else [arm.target]),
        streams=STREAMS[name],
        warmup=plan.warmup,
        seconds=plan.seconds * LONGER.get(name, 1),
        max_tokens=2 if name == "first" else plan.max_tokens,
        seed=seed,
    )
    window = uvloop.run(load)
    arm.freeze()
    arm.answered(window.outcomes, f", load {name}")
    return window


def idle(arm: Arm) -> dict[str, float]:
    """What an arm takes while nobody asks: CPU seconds a second, and memory."""
    arm.thaw()
    # Engines poll busily for a while after their last request.
    time.sleep(5)
    found = {"idle_cores": arm.idle_cores(5)}
    found["memory_gib"] = sum(server.memory_bytes() for server in arm.servers) / 2**30
    arm.freeze()
    return found


def benchmark(
    arms: Sequence[Arm], plan: argparse.Namespace, loads: Sequence[str]
) -> dict[str, Any]:
    """All pairs of these loads; the arms are up and frozen."""
    rest = idle(arms[1])
    # Before anything counts: engines and front ends allocate on first use.
    short = argparse.Namespace(**vars(plan) | {"seconds": min(plan.seconds, 5)})
    for arm in arms:
        drive(arm, BUSY if BUSY in loads else "32", short, "warm-up")
    measured: dict[str, list[Pair]] = {name: [] for name in loads}
    for number in range(plan.runs):
        for name in loads:
            # Both arms get the same prompts, and no two loads share one: prefix caches stay cold.
            found = {
                arm.name: drive(arm, name, plan, f"{number}/{name}").figures()
                for arm in rotated(arms, number)
            }
            pair = (found[arms[0].name], found[arms[1].name])
            measured[name].append(pair)
            print(f"run {number + 1}/{plan.runs}, load {name}: {pair}", flush=True)
    return {
        **comparison(measured),
        "absolute": {
            arm.name: {name: absolute([pair[side] for pair in of]) for name, of in measured.items()}
            for side, arm in enumerate(arms)
        },
        "by_load": measured,
        **rest,
    }


def comparison(measured: Mapping[str, Sequence[Pair]]) -> dict[str, Any]:
    """Of each pair, then their medians: the machine's drift between pairs cancels."""
    spreads = {}
    for load, of in measured.items():
        if load == "first":
            later = [arm["ttft_ms_p50"] - base["ttft_ms_p50"] for base, arm in of]
            spreads["ttft_added_ms_p50"] = spread(later)
        else:
            bases, arms = (
                [each["tokens_per_second"] for each in side] for side in zip(*of, strict=True)
            )
            spreads[f"throughput_ratio_{load}"] = ratios(arms, bases)
    return {**medians(spreads), "runs": min(map(len, measured.values()))}


def absolute(windows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """One arm's own figures at one load: medians over its runs, and all requests."""
    found = {name: statistics.median(one[name] for one in windows) for name in windows[0]}
    return found | {"requests": sum(one["requests"] for one in windows)}


def compared(
    kinds: tuple[str, str],
    loads: Sequence[str],
    model: str,
    options: argparse.Namespace,
    logs: Path,
) -> dict[str, Any]:
    """Start a pair of arms, measure it, and end it."""
    here = os.sched_getaffinity(0)
    flags = EngineFlags(dtype=options.dtype or cpu_dtype())
    arms = make_arms(kinds, model, flags, logs)
    bind = BUSY not in loads
    with running(arms, options.start_timeout, bind=bind):
        # Servers that start inherit where this process may run, so it is bound only after that.
        os.sched_setaffinity(0, {OTHER_CORE} if bind else here)
        try:
            found = benchmark(arms, options, loads)
        finally:
            os.sched_setaffinity(0, here)
    return {"baseline": kinds[0], **found, "setup": asdict(pair_options(kinds, flags))}


def check_machine() -> None:
    """Refuse a machine on which the numbers would mean something else.

    Raises:
        StartError: says what is missing.
    """
    if not {ENGINE_CORE, OTHER_CORE} <= os.sched_getaffinity(0):
        raise StartError(f"cores {ENGINE_CORE} and {OTHER_CORE} are needed; allow both (taskset)")


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    check_machine()
    model = str(catalog.resolve(options.model, Path.cwd()))
    logs = options.logs or folder
    alone = tuple(load for load in options.loads if load != BUSY)
    comparisons, busy = {}, {}
    for kinds in pairs(options.arms):
        name = comparison_name(*kinds)
        if BUSY in options.loads and "one" not in kinds:
            busy[name] = compared(kinds, (BUSY,), model, options, logs / f"{name}-{BUSY}")
        if alone:
            comparisons[name] = compared(kinds, alone, model, options, logs / name)
    return {"comparisons": comparisons, "busy": busy}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("overhead", __doc__)
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
        "--loads", default=tuple(STREAMS), type=_loads, help=f"some of {','.join(STREAMS)}"
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
    if len(set(loads)) < len(loads) or not set(loads) <= STREAMS.keys():
        raise argparse.ArgumentTypeError(f"give some of {','.join(STREAMS)}, each once")
    return loads


def main() -> int:
    options = arguments()
    return run(
        "overhead",
        options,
        measured,
        without=("logs", "start_timeout", "quick"),
        errors=(LoomserveError,),
        cores={"engine": ENGINE_CORE, "other": OTHER_CORE},
        unmeasured_arm="frozen",
    )


if __name__ == "__main__":
    sys.exit(main())
