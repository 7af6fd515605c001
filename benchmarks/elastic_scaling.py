"""What does a burst cost a model that has one replica and may have two, beside one that has two?

A model on two cores: with ``replicas: {min: 1, max: 2}``, and with ``replicas: 2``. Both get the
same requests: few for a while, then a burst at Poisson times that one replica cannot carry. The
ratio is that of the 99th percentiles of the time to the first token of all requests of the burst;
those that come while the second replica starts are among them.

The last line of the output is one JSON object, also written to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.elastic_platform import ElasticPlatform
from benchmarks.load import Outcome, Target, arrivals, new_session, prompts, request
from benchmarks.report import Spread, percentile
from benchmarks.result_files import FOLDER, machine, publish, said_by
from benchmarks.servers import ENGINE_CORE, OTHER_CORE, EngineFlags
from loomserve.platform.cli.admin_token import token_for
from loomserve.platform.models import catalog

_PORT = 18470
_MODEL = "scaled"
_CORES = (ENGINE_CORE, OTHER_CORE)
_FLAGS = EngineFlags(
    max_model_len=512, max_num_seqs=16, kv_cache_memory_bytes=128 * 2**20, dtype="float32"
)
_LOOK_S = 0.2


@dataclass(frozen=True)
class Burst:
    """A load.

    Attributes:
        calm_rate: Requests a second before it.
        calm_s: Seconds of these.
        rate: Requests a second of the burst.
        seconds: Its length.
        max_tokens: Of each answer.
        target: Requests that a replica is to have at most.
    """

    calm_rate: float = 0.5
    calm_s: float = 10.0
    rate: float = 4.0
    seconds: float = 60.0
    max_tokens: int = 32
    target: float = 6.0

    def due(self, seed: str) -> list[float]:
        """Seconds from the beginning, in order."""
        calm = arrivals(f"{seed}/calm", self.calm_rate, self.calm_s)
        return calm + [self.calm_s + at for at in arrivals(seed, self.rate, self.seconds)]


@dataclass(frozen=True)
class Served:
    """What became of a burst.

    Attributes:
        ttft_s: Seconds to first tokens of the burst's requests.
        failed: Requests that failed.
        replicas: Seconds after the burst's beginning at which more replicas served first.
    """

    ttft_s: tuple[float, ...]
    failed: int
    replicas: tuple[tuple[float, int], ...]

    @property
    def p99_s(self) -> float:
        return percentile(self.ttft_s, 99)


def config(source: str, replicas: int | Mapping[str, object]) -> dict[str, object]:
    """The configuration file's content."""
    return {
        "devices": [{"name": f"core{core}", "cores": [core]} for core in _CORES],
        "models": [
            {
                "name": _MODEL,
                "source": source,
                "devices": [f"core{core}" for core in _CORES],
                "replicas": replicas,
                "kv_cache_memory": _FLAGS.kv_cache_memory_bytes,
                "engine": _FLAGS.options(),
            }
        ],
        "server": {"host": "127.0.0.1", "port": _PORT},
    }


def replicas_of(burst: Burst) -> dict[str, int | Mapping[str, object]]:
    """``models[].replicas`` of each arm."""
    scaling = {
        "min": 1,
        "max": len(_CORES),
        "target_ongoing_requests": burst.target,
        "upscale_delay_s": 1,
    }
    return {"scaled": scaling, "static": len(_CORES)}


async def served(url: str, burst: Burst, seed: str) -> Served:
    """Send a burst's requests when they are due, and watch the model's replicas."""
    due, texts = burst.due(seed), prompts(seed)
    begin = time.perf_counter()
    seen: dict[int, float] = {}
    watching = asyncio.create_task(_watch(url, begin + burst.calm_s, seen))
    async with new_session() as session:

        async def at(offset: float, text: str) -> Outcome:
            await asyncio.sleep(begin + offset - time.perf_counter())
            target = Target(url, _MODEL)
            return await request(session, target, text, burst.max_tokens, begin + offset)

        outcomes = await asyncio.gather(*(at(each, next(texts)) for each in due))
    watching.cancel()
    good = [each for each in outcomes if each.error is None]
    of_burst = [each for each in good if each.due >= begin + burst.calm_s]
    return Served(
        ttft_s=tuple(each.first - each.due for each in of_burst),
        failed=len(outcomes) - len(good),
        replicas=tuple((at_s, count) for count, at_s in sorted(seen.items())),
    )


async def _watch(url: str, zero: float, seen: dict[int, float]) -> None:
    headers = {"Authorization": f"Bearer {token_for(url)}"}
    async with httpx.AsyncClient(headers=headers, timeout=30) as client:
        while True:
            said = await client.get(f"{url}/admin/v1/models/{_MODEL}")
            if said.is_success:
                seen.setdefault(len(said.json()["replicas"]), time.perf_counter() - zero)
            await asyncio.sleep(_LOOK_S)


def scale_up(
    source: str, burst: Burst, runs: int, logs: Path, start_timeout_s: float = 900.0
) -> dict[str, Any]:
    """The key ``scale_up_p99_ttft_vs_static``, the median over pairs of runs, and what it is of.

    Args:
        source: The model's.
        burst: The load.
        runs: Pairs of platforms, each started anew, that get the same requests.
        logs: Folder of the platforms' logs.
        start_timeout_s: For each platform.
    """
    arms = {name: config(source, replicas) for name, replicas in replicas_of(burst).items()}
    found: dict[str, list[Served]] = {name: [] for name in arms}
    for run in range(runs):
        for name in arms if run % 2 == 0 else reversed(arms):
            platform = ElasticPlatform(arms[name], _PORT, f"scaling-{name}{run}", logs)
            with platform.running(start_timeout_s):
                found[name].append(asyncio.run(served(platform.url, burst, f"burst{run}")))
            last = found[name][-1]
            print(f"run {run}: {name}: p99 {last.p99_s:.2f} s, {last.replicas}", flush=True)
    pairs = list(zip(found["scaled"], found["static"], strict=True))
    ratios = Spread.of([one.p99_s / other.p99_s for one, other in pairs])
    return {
        "scale_up_p99_ttft_vs_static": ratios.median,
        "scale_up": {
            "ratios": asdict(ratios),
            "second_replica_s": [
                at_s for each in found["scaled"] for at_s, n in each.replicas if n == len(_CORES)
            ],
            "arms": {
                name: {
                    "requests": sum(len(each.ttft_s) for each in of),
                    "failed": sum(each.failed for each in of),
                    "ttft_n": [len(each.ttft_s) for each in of],
                    "ttft_p50_s": [percentile(each.ttft_s, 50) for each in of],
                    "ttft_p99_s": [each.p99_s for each in of],
                }
                for name, of in found.items()
            },
            "load": asdict(burst),
        },
    }


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    usual = Burst()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elastic_scaling",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--model", default="demo", help="demo, or a folder")
    parser.add_argument("--runs", type=int, default=3, help="pairs of platforms")
    parser.add_argument("--rate", type=float, default=usual.rate, help="requests a second")
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="of the burst")
    parser.add_argument("--tokens", type=int, default=usual.max_tokens, help="of each answer")
    parser.add_argument("--start-timeout", type=float, default=900, help="for each platform, s")
    parser.add_argument("--logs", type=Path, default=FOLDER / "elastic-logs")
    parsed = parser.parse_args(words)
    if parsed.runs < 1 or parsed.rate <= 0 or parsed.seconds <= 0 or parsed.tokens < 1:
        parser.error("--runs, --rate, --seconds and --tokens must be positive")
    return parsed


def main() -> int:
    options = arguments()
    facts = machine()
    source = str(catalog.resolve(options.model, Path.cwd()))
    burst = Burst(rate=options.rate, seconds=options.seconds, max_tokens=options.tokens)
    result = scale_up(source, burst, options.runs, options.logs, options.start_timeout)
    publish("elastic_scaling", result, setup=said_by(options, "logs"), facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
