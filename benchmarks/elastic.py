"""How fast do models come back that sleep or are unloaded, and what do many names cost that share
the memory of a few?

How, and what was found: ``docs/elastic.md``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.engine import save_llama
from benchmarks.harness import NotMeasuredError, parser_of, percentile, run, spread
from benchmarks.load import Outcome, Request, send_when_due
from benchmarks.platforms import CORES, Platform, configuration, cores, served
from benchmarks.servers import EngineFlags, bare_arm
from benchmarks.start import started
from benchmarks.workload import BLOCK_TOKENS, PrefixRequest
from loomserve.platform.config import Model
from loomserve.platform.devices.memory import replica_bytes
from loomserve.platform.models import catalog
from loomserve.platform.placement import model_files

PORT = 18460
ALWAYS, COLD = "always", "cold"
FLAGS = EngineFlags(
    max_model_len=512, max_num_seqs=16, kv_cache_memory_bytes=128 * 2**20, dtype="float32"
)
EXPONENT = 0.52
TURNS, THINKS_S, TOKENS = 3, 4.0, 16
_SETTLES_S = 5.0


def configured(
    source: str, start: Mapping[str, str], memory: int | None = None, lending: str | None = None
) -> dict[str, Any]:
    """Names for one source, in turn on each core, of which nothing sleeps or ends by itself.

    Args:
        start: when each is loaded, ``now`` or ``on_demand``, by name.
        memory: of all models on a core together; None: without a bound.
        lending: of each; None: none of them lends.
    """
    stays = {"sleep_after_s": None, "unload_after_s": None}
    models = [
        served(
            name,
            source,
            FLAGS.kv_cache_memory_bytes,
            FLAGS.options(),
            devices=[f"core{CORES[place % len(CORES)]}"],
            replicas=1,
            start=when,
            **({"lending": lending} if lending else {}),
            **({"idle": stays} if when == "on_demand" else {}),
        )
        for place, (name, when) in enumerate(start.items())
    ]
    bound = {} if memory is None else {"memory": memory}
    return configuration(PORT, *models, devices=cores(**bound))


def first_token_s(platform: Platform, model: str, seed: str) -> float:
    """Seconds from a request to its first token.

    Raises:
        NotMeasuredError: the request failed.
    """
    asked = PrefixRequest(at_s=0, blocks=(0,), tokens=16, output_tokens=2).asked(model, seed)
    (outcome,) = platform.arm(model).answered(uvloop.run(send_when_due([platform.url], [asked])))
    return outcome.ttft


def starts(source: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds to the first token of a model, by what it is when it is asked for."""
    names = {ALWAYS: "now", COLD: "on_demand"}
    platform = Platform(configured(source, names, lending=options.lending), folder, "starts")
    took: dict[str, list[float]] = {"unloaded": [], "asleep": []}
    vllm = [vllm_s(source, options, folder) for _ in range(options.servers)]
    with platform.running(options.start_timeout):
        never = first_token_s(platform, COLD, "never")
        for number in range(options.runs):
            for status, of in took.items():
                platform.have(COLD, status)
                of.append(first_token_s(platform, COLD, f"{status}/{number}"))
                print(f"run {number}: {status}, {of[-1]:.2f} s", flush=True)
    unloaded, start = spread(took["unloaded"]), spread(vllm)
    return {
        "first_token_unloaded_s": unloaded,
        "first_token_never_loaded_s": never,
        "first_token_asleep_s": spread(took["asleep"]),
        "vllm_server_start_s": start,
        "unloaded_vs_vllm": unloaded["median"] / start["median"],
    }


def vllm_s(source: str, options: argparse.Namespace, folder: Path) -> float:
    """Seconds from the start of vLLM's own server to its first token."""
    arm = bare_arm("vllm", source, FLAGS, PORT, folder, engines=1)
    try:
        took = started(arm, arm.targets, options.start_timeout)
    finally:
        arm.servers[0].stop()
    print(f"vLLM's own server: {took:.2f} s", flush=True)
    return took


def sleeping(source: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """MB that a further name takes that sleeps."""
    names = [f"sleeps{number}" for number in range(options.sleeping + 1)]
    start = {ALWAYS: "now", **dict.fromkeys(names, "on_demand")}
    platform = Platform(configured(source, start, lending=options.lending), folder, "sleeping")
    looks: list[float] = []
    with platform.running(options.start_timeout):
        for name in names:
            took = first_token_s(platform, name, name)
            print(f"{name}: never loaded, {took:.2f} s", flush=True)
            platform.have(name, "asleep")
            time.sleep(_SETTLES_S)
            # The first has the gateway import what serves models.
            looks.append(platform.server.memory_bytes() / 1e6)
            print(f"{name}: {looks[-1]:.0f} MB", flush=True)
    further = spread(after - before for before, after in itertools.pairwise(looks))
    # In float32 they are twice as wide as in the files.
    weights = 2 * catalog.weight_bytes(Path(source)) / 1e6
    return {
        "sleeping_model_mb": further,
        "weights_mb": weights,
        "sleeping_model_mb_beside_weights": further["median"] - weights,
    }


def at_rest(source: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What a platform takes while nobody asks, with nothing loaded and with many names asleep.

    Their model is small: what sleeps takes no more of a core for being large.
    """
    small = folder / "small"
    shutil.copytree(source, small, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = json.loads(Path(source, "config.json").read_text(encoding="utf-8"))
    save_llama(
        small,
        vocab_size=config["vocab_size"],
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
    )
    names = [f"asleep{number:02}" for number in range(options.asleep)]
    start = dict.fromkeys(names, "on_demand")
    platform = Platform(configured(str(small), start), folder, "asleep")

    def look() -> dict[str, float]:
        time.sleep(3 * _SETTLES_S)
        found = {
            "cores": platform.arm(*names[:1]).idle_cores(options.idle_seconds),
            "memory_mb": platform.server.memory_bytes() / 1e6,
            "processes": len(platform.server.members()),
        }
        print(f"at rest: {found}", flush=True)
        return found

    with platform.running(options.start_timeout):
        nothing = look()
        for name in names:
            first_token_s(platform, name, name)
            platform.have(name, "asleep")
        return {"at_rest": {"nothing_loaded": nothing, "asleep": look()}}


def zipf_load(names: Sequence[str], sessions: float, seconds: float, seed: str) -> list[Request]:
    """Conversations that begin at random, ``sessions`` a second, each with a name by Zipf's law."""
    source = random.Random(seed)
    shares = [(place + 1) ** -EXPONENT for place in range(len(names))]

    def turns(number: int, begin: float) -> Iterator[Request]:
        (name,) = source.choices(names, shares)
        at = begin
        for turn in range(1, TURNS + 1):
            blocks = tuple(number * TURNS + each for each in range(turn))
            asked = PrefixRequest(at, blocks, BLOCK_TOKENS * turn, TOKENS)
            yield asked.asked(name, seed, ids=True)
            at += source.expovariate(1 / THINKS_S)

    found: list[Request] = []
    now = source.expovariate(sessions)
    while now < seconds:
        found += turns(len(found), now)
        now += source.expovariate(sessions)
    return sorted(found, key=lambda asked: asked.at_s)


def zipf(source: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The same requests, with room for some names and with all of them loaded."""
    names = [f"model{number:02}" for number in range(options.names)]
    load = zipf_load(names, options.sessions, options.seconds, options.seed)
    one = Model(
        name="one",
        source=source,
        devices=("core0",),
        kv_cache_memory=FLAGS.kv_cache_memory_bytes,
        engine=FLAGS.options(),
    )
    held = model_files.held_bytes(Path(source), one, on_gpus=False)
    room = int(options.room * replica_bytes(one, held))
    arms = {
        "elastic": configured(source, dict.fromkeys(names, "on_demand"), room),
        "all_loaded": configured(source, dict.fromkeys(names, "now")),
    }
    outcomes: dict[str, list[Outcome]] = {}
    facts: dict[str, Any] = {}
    for arm, config in arms.items():
        platform = Platform(config, folder, f"zipf-{arm}")
        with platform.running(options.start_timeout):
            outcomes[arm] = uvloop.run(send_when_due([platform.url], load))
            memory_gb = platform.server.memory_bytes() / 1e9
        facts[arm] = said(outcomes[arm]) | {"memory_gb": memory_gb}
        print(f"{arm}: {facts[arm]}", flush=True)
    elastic, loaded = facts.values()
    pairs = list(zip(*outcomes.values(), strict=True))
    return {
        "zipf_p99_first_token_vs_all_loaded": (
            elastic["first_token_s"]["p99"] / loaded["first_token_s"]["p99"]
        ),
        "zipf_failed": elastic["failed"],
        "zipf_different": sum(a.ids != b.ids for a, b in pairs if not (a.error or b.error)),
        "zipf": facts,
    }


def said(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    good = [one.ttft for one in outcomes if one.error is None]
    if not good:
        raise NotMeasuredError(f"no request was answered: {outcomes[0].error}")
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "errors": sorted({str(one.error)[:200] for one in outcomes if one.error})[:5],
        "first_token_s": {
            **{f"p{rank}": percentile(good, rank) for rank in (50, 90, 99)},
            "n": len(good),
            "all": good,
        },
    }


PARTS = {"starts": starts, "sleeping": sleeping, "at_rest": at_rest, "zipf": zipf}


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    source = str(catalog.resolve(options.model, Path.cwd()))
    found: dict[str, Any] = {}
    for part in options.parts:
        found |= PARTS[part](source, options, folder)
    return found


def main() -> int:
    parser = parser_of("elastic", __doc__)
    parser.add_argument("--model", default="demo", help="demo, or a folder")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--runs", type=int, default=5, help="of each start")
    parser.add_argument("--servers", type=int, default=2, help="starts of vLLM's own server")
    parser.add_argument("--sleeping", type=int, default=4, help="further names that sleep")
    parser.add_argument("--asleep", type=int, default=50, help="names that sleep while at rest")
    parser.add_argument("--idle-seconds", type=float, default=60, help="at rest, s")
    parser.add_argument("--lending", choices=("auto",), help="of the models that start and sleep")
    parser.add_argument("--names", type=int, default=20)
    parser.add_argument("--room", type=float, default=4, help="replicas on each core, by estimate")
    parser.add_argument("--sessions", type=float, default=0.2, help="that begin in a second")
    parser.add_argument("--seconds", type=float, default=240, help="of the load of many names")
    parser.add_argument("--seed", default="zipf")
    parser.add_argument("--start-timeout", type=float, default=900, help="for each server, s")
    return run("elastic", parser.parse_args(), measured, without=("start_timeout",))


if __name__ == "__main__":
    sys.exit(main())
