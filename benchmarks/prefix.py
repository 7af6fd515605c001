"""What does one KV store for all replicas gain on shared prefixes?

Two replicas of one model serve conversations whose turns share prefixes. Compared are Loomserve
with its store (any replica reuses what any other computed, and the router looks at load alone)
and, without it, the same router, the prefix-aware router, and round robin. Arms run in pairs,
the store against each other one, in turn and with the same requests; a run's requests are new to
all of them. Requests arrive as an open loop.

``--trace`` takes a Mooncake trace (gzipped JSON lines), else conversations are generated in its
likeness. The last line of the output is one JSON object, also written to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.load import Outcome, Target, new_session, post
from benchmarks.overhead import RequestsFailedError, in_turn
from benchmarks.report import Spread, percentile
from benchmarks.result_files import machine, publish
from benchmarks.servers import Arm, ServerFailedError, configured_arm, running
from benchmarks.workload import (
    BLOCK_TOKENS,
    PrefixRequest,
    conversations,
    mooncake,
    reuse,
    spread_over,
)
from loomserve.platform.devices.precision import cpu_dtype
from loomserve.platform.models import catalog

FIRST_PORT = 18600
MODEL = "chat"
CONTEXT = 2048
OTHERS = {
    "no_store": {"policy": "load_aware"},
    "prefix_router": {"policy": "prefix_aware"},
    "round_robin": {"policy": "round_robin"},
}
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


def arm(name: str, model: str, router: dict[str, str], port: int, folder: Path) -> Arm:
    """Two replicas, one a core; ``store`` has the KV store, the others have not."""
    config: dict[str, Any] = {
        "devices": [{"name": f"core{core}", "kind": "cpu", "cores": [core]} for core in range(2)],
        "models": [
            {
                "name": MODEL,
                "source": model,
                "devices": ["core0", "core1"],
                "replicas": 2,
                # Little over one request of full length: prefixes come back later than an engine
                # remembers them, as in a service with more conversations than memory.
                "kv_cache_memory": "128MiB",
                "router": router,
                "engine": {
                    "max_model_len": CONTEXT,
                    "max_num_seqs": 16,
                    "block_size": BLOCK_TOKENS,
                    "enforce_eager": True,
                    "dtype": cpu_dtype(),
                    "enable_prompt_tokens_details": True,
                },
            }
        ],
        "server": {"host": "127.0.0.1", "port": port},
    }
    if name == "store":
        config["kvstore"] = {"memory": "2GiB"}
    return configured_arm(name, config, MODEL, port, folder)


def served_tokens(target: Target) -> dict[str, float]:
    """Prompt tokens that each replica has taken so far."""
    with urllib.request.urlopen(f"{target.url}/metrics", timeout=10) as response:
        page = response.read().decode()
    found: dict[str, float] = {}
    for labels, value in _SERVED.findall(page):
        if replica := _REPLICA.search(labels):
            found[replica[1]] = float(value)
    return found


async def send(target: Target, requests: Sequence[PrefixRequest], seed: str) -> list[Outcome]:
    prompts = [request.prompt(seed) for request in requests]
    begin = time.perf_counter()
    async with new_session() as session:

        async def one(request: PrefixRequest, prompt: list[int]) -> Outcome:
            due = begin + request.at_s
            await asyncio.sleep(due - time.perf_counter())
            body = {
                "model": target.model,
                "prompt": prompt,
                "max_tokens": request.output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            data = json.dumps(body).encode()
            return await post(
                session, f"{target.url}/v1/completions", data, request.output_tokens, due
            )

        return await asyncio.gather(*map(one, requests, prompts))


def replay(arm: Arm, requests: Sequence[PrefixRequest], seed: str) -> Replay:
    """Thaw an arm, send it the requests, freeze it.

    Raises:
        RequestsFailedError: a request failed.
    """
    arm.thaw()
    before = served_tokens(arm.target)
    outcomes = uvloop.run(send(arm.target, requests, seed))
    time.sleep(2.5)  # replicas report their metrics every two seconds
    after = served_tokens(arm.target)
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
    model: str, other: str, options: argparse.Namespace, folder: Path
) -> list[tuple[Replay, Replay]]:
    """Replays of the store and of one other arm, run by run."""
    arms = [
        arm("store", model, {"policy": "load_aware"}, FIRST_PORT, folder / other),
        arm(other, model, OTHERS[other], FIRST_PORT + 10, folder / other),
    ]
    pairs = []
    with running(arms, options.start_timeout, bind=False):
        for one in arms:
            replay(one, workload(options, "warm")[:6], f"warm-up/{other}")
        for run in range(options.runs):
            requests = workload(options, f"run {run}")
            seed = f"{other}/{run}"
            found = {side: replay(arms[side], requests, seed) for side in in_turn(run)}
            pairs.append((found[0], found[1]))
            print(describe(f"run {run + 1}/{options.runs}", requests, other, pairs[-1]), flush=True)
    return pairs


def workload(options: argparse.Namespace, seed: str) -> list[PrefixRequest]:
    most = (CONTEXT - 128) // BLOCK_TOKENS
    if options.trace:
        return mooncake(options.trace, requests=options.requests, rate=options.rate,
                        max_blocks=most, seed=seed)  # fmt: skip
    return conversations(requests=options.requests, rate=options.rate, max_blocks=most, seed=seed)


def describe(
    what: str, requests: Sequence[PrefixRequest], other: str, pair: tuple[Replay, Replay]
) -> str:
    store, base = pair
    return (
        f"{what}: store and {other} TTFT p50 {store.p50:.0f} and {base.p50:.0f} ms, p99 "
        f"{store.p99:.0f} and {base.p99:.0f} ms, hit rate {store.hit_rate:.2f} and "
        f"{base.hit_rate:.2f} of {reuse(requests):.2f}, load CV {store.load_cv:.2f} and "
        f"{base.load_cv:.2f}"
    )


def ratio(pairs: Sequence[tuple[Replay, Replay]], rank: str) -> dict[str, float]:
    return asdict(Spread.of([getattr(s, rank) / getattr(b, rank) for s, b in pairs]))


def medians(pairs: Sequence[tuple[Replay, Replay]], rank: str) -> list[float]:
    """Of the store and of the other arm."""
    return [
        statistics.median(getattr(one, rank) for one in side) for side in zip(*pairs, strict=True)
    ]


def report(found: dict[str, list[tuple[Replay, Replay]]]) -> dict[str, Any]:
    stores = [store for pairs in found.values() for store, _ in pairs]
    result: dict[str, Any] = {
        f"ttft_ratio_vs_{other}": ratio(pairs, "p50")["median"] for other, pairs in found.items()
    }
    result["hit_rate"] = statistics.median(store.hit_rate for store in stores)
    result["load_cv"] = statistics.median(store.load_cv for store in stores)
    result["against"] = {
        other: {
            "ttft_p50_ratio": ratio(pairs, "p50"),
            "ttft_p99_ratio": ratio(pairs, "p99"),
            "hit_rate": statistics.median(base.hit_rate for _, base in pairs),
            "load_cv": statistics.median(base.load_cv for _, base in pairs),
            "ttft_ms_p50": medians(pairs, "p50"),
            "ttft_ms_p99": medians(pairs, "p99"),
        }
        for other, pairs in found.items()
    }  # fmt: skip
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefix", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--trace", type=Path, help="a Mooncake trace, .jsonl.gz")
    parser.add_argument("--runs", type=int, default=5, help="pairs against each other arm")
    parser.add_argument("--requests", type=int, default=40, help="a run and arm")
    parser.add_argument("--rate", type=float, default=0.8, help="requests a second")
    parser.add_argument("--against", nargs="+", choices=list(OTHERS), default=list(OTHERS))
    parser.add_argument("--start-timeout", type=float, default=600)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="prefix-"))
    facts = machine()
    model = str(catalog.resolve("demo", Path.cwd()))
    print(f"serving {model}; logs in {folder}", flush=True)
    try:
        found = {other: pairing(model, other, options, folder) for other in options.against}
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
    }
    publish("prefix", {**report(found), "runs": options.runs}, setup=setup, facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
