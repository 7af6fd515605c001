"""How fast do models come back that sleep or are unloaded, and what do many names cost that share
the memory of a few?

**Two models** with an engine each, from ``loomserve serve`` to the first answers of both.

**One name.** A model of its own core is unloaded, and asked for; put to sleep, and asked for: the
time from a request to its first token, beside the start of vLLM's own server to its first token.
Then names that sleep are added one by one, and the platform's memory is taken.

**Twenty names**, asked for by Zipf's law, in conversations of a few turns. Memory has room for some
of them at once; the others are loaded with a request, for which idle ones sleep or end. The same
requests go to the same names with all of them loaded. Tokens are compared: float32. ``--plot FILE``
draws what each name was over time.

**A burst**, for a model that may have one replica or two: :mod:`benchmarks.elastic_scaling`.

The exponent is that of the shares of the models that OpenRouter listed first in the spring of 2026,
0.34 to 0.74 in five weeks.

The last line of the output is one JSON object, also written to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.elastic_memory import growth, megabytes
from benchmarks.elastic_platform import ElasticPlatform, Models
from benchmarks.elastic_scaling import Burst, scale_up
from benchmarks.elastic_timeline import Timeline, plot
from benchmarks.popularity import Answer, Asked
from benchmarks.report import Spread, percentile
from benchmarks.result_files import FOLDER, machine, publish, said_by
from benchmarks.servers import EngineFlags, bare_arm, loomserve_arm
from benchmarks.start import started
from benchmarks.workload import BLOCK_TOKENS, PrefixRequest
from loomserve.platform.config import Model
from loomserve.platform.devices.memory import replica_bytes
from loomserve.platform.models import catalog
from loomserve.platform.placement import model_files

_PORT = 18460
_ALWAYS, _COLD = "always", "cold"
_KV_BYTES = 128 * 2**20
_FLAGS = EngineFlags(
    max_model_len=512, max_num_seqs=16, kv_cache_memory_bytes=_KV_BYTES, dtype="float32"
)
_EXPONENT = 0.52
_TURNS, _THINKS_S, _TOKENS = 3, 4.0, 16
_SETTLES_S = 5.0


def starts(source: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds to the first token of a model, by what it is when it is asked for."""
    models = Models(
        source, {_ALWAYS: "now", _COLD: "on_demand"}, _KV_BYTES, lending=options.lending
    )
    config = models.config(_FLAGS, _PORT)
    platform = ElasticPlatform(config, _PORT, "starts", options.logs)
    found: dict[str, list[float]] = {"vllm": [], "never": [], "unloaded": [], "asleep": []}
    for _ in range(options.servers):
        found["vllm"].append(_vllm_s(source, options))
    with platform.running(options.start_timeout):
        found["never"].append(platform.first_token_s(_COLD, "never"))
        for run in range(options.runs):
            for status in ("unloaded", "asleep"):
                platform.have(_COLD, status)
                found[status].append(platform.first_token_s(_COLD, f"{status}/{run}"))
                print(f"run {run}: {status}, {found[status][-1]:.2f} s", flush=True)
    return found


def _vllm_s(source: str, options: argparse.Namespace) -> float:
    arm = bare_arm("vllm", source, _FLAGS, _PORT, options.logs)
    del arm.servers[1:]
    try:
        took = started(arm, [("measured", _PORT)], options.start_timeout)
    finally:
        arm.servers[0].stop()
    print(f"vLLM's own server: {took:.2f} s", flush=True)
    return took


def ready_s(source: str, options: argparse.Namespace) -> list[float]:
    """Seconds from ``loomserve serve`` until two models, with an engine each, have answered."""
    took: list[float] = []
    for run in range(options.servers):
        arm = loomserve_arm(f"ready{run}", source, _FLAGS, _PORT, options.logs)
        try:
            both = [("measured", _PORT), ("idle", _PORT)]
            took.append(started(arm, both, options.start_timeout))
        finally:
            arm.servers[0].stop()
        print(f"two engines: {took[-1]:.2f} s", flush=True)
    return took


def sleeping_mb(source: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """MB of a platform's processes by kind, with more and more names that sleep."""
    names = [f"sleeps{number}" for number in range(options.sleeping + 1)]
    start = {_ALWAYS: "now", **dict.fromkeys(names, "on_demand")}
    models = Models(source, start, _KV_BYTES, lending=options.lending)
    platform = ElasticPlatform(models.config(_FLAGS, _PORT), _PORT, "sleeping", options.logs)
    looks: list[dict[str, float]] = []
    with platform.running(options.start_timeout):
        for name in names:
            took = platform.first_token_s(name, name)
            print(f"{name}: never loaded, {took:.2f} s", flush=True)
            platform.have(name, "asleep")
            time.sleep(_SETTLES_S)
            # The first has the gateway import what serves models.
            looks.append(megabytes(platform.server.members()))
            print(f"{name}: {looks[-1]}", flush=True)
    return looks


def zipf_load(names: Sequence[str], sessions: float, seconds: float, seed: str) -> list[Asked]:
    """Conversations that begin at random, ``sessions`` a second, each with a name by Zipf's law."""
    source = random.Random(seed)
    shares = [(place + 1) ** -_EXPONENT for place in range(len(names))]

    def turns(number: int, begin: float) -> Iterator[Asked]:
        (name,) = source.choices(names, shares)
        at = begin
        for turn in range(1, _TURNS + 1):
            blocks = tuple(number * _TURNS + each for each in range(turn))
            request = PrefixRequest(at, blocks, BLOCK_TOKENS * turn, _TOKENS)
            yield Asked(name, at, request)
            at += source.expovariate(1 / _THINKS_S)

    found: list[Asked] = []
    now = source.expovariate(sessions)
    while now < seconds:
        found += turns(len(found), now)
        now += source.expovariate(sessions)
    return sorted(found, key=lambda asked: asked.at_s)


def zipf(source: str, options: argparse.Namespace) -> dict[str, Any]:
    """The same requests, with room for some names and with all of them loaded."""
    names = [f"model{number:02}" for number in range(options.names)]
    load = zipf_load(names, options.sessions, options.seconds, options.seed)
    one = Model(
        name="one",
        source=source,
        devices=("core0",),
        kv_cache_memory=_KV_BYTES,
        engine=_FLAGS.options(),
    )
    room = int(
        options.room * replica_bytes(one, model_files.held_bytes(Path(source), one, on_gpus=False))
    )
    arms = {
        "elastic": Models(source, dict.fromkeys(names, "on_demand"), _KV_BYTES, room),
        "all_loaded": Models(source, dict.fromkeys(names, "now"), _KV_BYTES),
    }
    answers: dict[str, list[Answer]] = {}
    facts: dict[str, Any] = {}
    for arm, models in arms.items():
        config = models.config(_FLAGS, _PORT)
        platform = ElasticPlatform(config, _PORT, f"zipf-{arm}", options.logs)
        timeline = Timeline()
        with platform.running(options.start_timeout):
            with timeline.following(platform.statuses):
                answers[arm] = platform.answers(load, "zipf")
            gigabytes = platform.server.memory_bytes() / 1e9
        there = {status: timeline.mean(status) for status in ("ready", "asleep")}
        facts[arm] = _said(answers[arm]) | {"memory_gb": gigabytes, "mean_models": there}
        if options.plot and arm == "elastic":
            plot(timeline, names, load, options.plot)
        print(f"{arm}: {facts[arm]}", flush=True)
    pairs = list(zip(answers["elastic"], answers["all_loaded"], strict=True))
    return {
        "zipf_p99_first_token_vs_all_loaded": (
            facts["elastic"]["first_token_s"]["p99"] / facts["all_loaded"]["first_token_s"]["p99"]
        ),
        "zipf_failed": facts["elastic"]["failed"],
        "zipf_different": sum(a.tokens != b.tokens for a, b in pairs if not (a.error or b.error)),
        "zipf": facts,
    }


def _said(answers: Sequence[Answer]) -> dict[str, Any]:
    good = [answer.ttft_s for answer in answers if answer.error is None]
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "errors": sorted({str(answer.error)[:200] for answer in answers if answer.error})[:5],
        "first_token_s": {
            **{f"p{rank}": percentile(good, rank) for rank in (50, 90, 99)},
            "n": len(good),
            "all": good,
        },
    }


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elastic", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--model", default="demo", help="demo, or a folder")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--runs", type=int, default=5, help="of each start")
    parser.add_argument("--servers", type=int, default=2, help="starts of each whole server")
    parser.add_argument("--sleeping", type=int, default=4, help="further names that sleep")
    parser.add_argument("--lending", choices=("auto",), help="of the models that start and sleep")
    parser.add_argument("--names", type=int, default=20)
    parser.add_argument("--room", type=float, default=4, help="replicas on each core, by estimate")
    parser.add_argument("--sessions", type=float, default=0.2, help="that begin in a second")
    parser.add_argument("--seconds", type=float, default=240, help="of the load of many names")
    parser.add_argument("--seed", default="zipf")
    parser.add_argument("--plot", type=Path, help="draw what models were while many had a load")
    parser.add_argument("--start-timeout", type=float, default=900, help="for each server, s")
    parser.add_argument("--logs", type=Path, default=FOLDER / "elastic-logs")
    parsed = parser.parse_args(words)
    if parsed.runs < 1 or parsed.servers < 1 or parsed.sleeping < 1 or parsed.names < 1:
        parser.error("--runs, --servers, --sleeping and --names must be positive")
    return parsed


def _starts(source: str, options: argparse.Namespace) -> dict[str, Any]:
    took = starts(source, options)
    vllm, unloaded = Spread.of(took["vllm"]), Spread.of(took["unloaded"])
    return {
        "first_token_unloaded_s": asdict(unloaded),
        "first_token_never_loaded_s": took["never"][0],
        "first_token_asleep_s": asdict(Spread.of(took["asleep"])),
        "vllm_server_start_s": asdict(vllm),
        "unloaded_vs_vllm": unloaded.median / vllm.median,
    }


def _sleeping(source: str, options: argparse.Namespace) -> dict[str, Any]:
    looks = sleeping_mb(source, options)
    totals = [sum(each.values()) for each in looks]
    further = Spread.of([after - before for before, after in itertools.pairwise(totals)])
    # In float32 they are twice as wide as in the files.
    weights = 2 * catalog.weight_bytes(Path(source)) / 1e6
    return {
        "sleeping_model_mb": asdict(further),
        "weights_mb": weights,
        "sleeping_model_mb_beside_weights": further.median - weights,
        "sleeping_model_mb_by_process": growth(looks),
    }


def _ready(source: str, options: argparse.Namespace) -> dict[str, Any]:
    return {"two_engines_ready_s": asdict(Spread.of(ready_s(source, options)))}


def _scaling(source: str, options: argparse.Namespace) -> dict[str, Any]:
    return scale_up(source, Burst(), options.servers, options.logs, options.start_timeout)


_PARTS = {
    "ready": _ready,
    "starts": _starts,
    "sleeping": _sleeping,
    "zipf": zipf,
    "scaling": _scaling,
}


def main() -> int:
    options = arguments()
    facts = machine()
    source = str(catalog.resolve(options.model, Path.cwd()))
    result: dict[str, Any] = {}
    for part in options.parts:
        result |= _PARTS[part](source, options)
    publish("elastic", result, setup=said_by(options, "logs", "plot"), facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
