"""What does separating prefill from decode gain, and what does it cost?

Two replicas of one model, one a core, with the KV store. "Separated": one prefills, the other
decodes, and the KV goes through the store. "Unified": both do both. The same requests go to both
arms in turn, as an open loop at 60 % of what the unified arm was measured to serve of them; a run's
requests are new to both. Prompts are random tokens and share no prefix.

A request's TTFT counts from when it was due; its TPOT is (last - first token) / (tokens - 1); the
gaps between its tokens include the one in which it is handed over. Goodput counts the requests that
meet an SLO: TTFT and TPOT below multiples of what the idle unified arm gives for that length of
prompt. The hand-off by itself is measured on the idle separated arm: the gap before the second
token less the median of the later ones, beside the time in which the store's loader fetches as many
blocks.

``--trace`` takes Azure LLM inference traces of 2023 (gzipped CSV), else requests are generated in
their likeness. The last line of the output is one JSON object, also written to
``benchmarks/results``.
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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvloop

from benchmarks.engine import running_store
from benchmarks.load import EventStream, Target, new_session
from benchmarks.overhead import RequestsFailedError, in_turn
from benchmarks.report import Spread, percentile, percentiles
from benchmarks.result_files import machine, publish
from benchmarks.servers import Arm, ServerFailedError, configured_arm, running
from benchmarks.store import (
    BLOCKS,
    LAYER_BYTES,
    LAYERS,
    Engine,
    chain,
    wait_for,
)
from benchmarks.workload import (
    AZURE_LIKE,
    BLOCK_TOKENS,
    OUTPUT_SCALE,
    PROMPT_SCALE,
    Arrival,
    PrefixRequest,
    azure,
    azure_like,
    scaled_down,
    window,
)
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.platform.devices.precision import cpu_dtype
from loomserve.platform.models import catalog

FIRST_PORT = 18700
MODEL = "chat"
CONTEXT = 2048
SEPARATED, UNIFIED = "separated", "unified"
LOAD = 0.6
"""Of what the unified arm serves when all requests come at once."""
BURST = 24
"""Requests that measure this."""
PROBE_LENGTHS = (64, 256, 1024)
PROBE_TOKENS = 16
PROBES = 5
"""Of each length, one after the other."""
LOCAL_TOKENS = BLOCK_TOKENS
"""Shorter prompts have no whole block, so the decode replica computes them."""
HANDED_OVER = 0.9
"""Share of the longer ones below which the separated arm was not separated."""
GENERATED = 5000
_HANDOFFS = re.compile(
    r'^loomserve_handoffs_total\{[^}]*outcome="continued"[^}]*\} ([0-9.e+]+)$', re.MULTILINE
)
_RATIOS = {
    "ttft_p50_ratio": "ttft_ms_p50",
    "ttft_p99_ratio": "ttft_ms_p99",
    "tpot_p50_ratio": "tpot_ms_p50",
    "tpot_p99_ratio": "tpot_ms_p99",
    "itl_p99_ratio": "itl_ms_p99",
    "goodput_ratio": "goodput",
}


@dataclass(frozen=True)
class Answer:
    """One request: when it was due, and when the events with its tokens came; seconds."""

    due: float
    times: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int

    @property
    def ttft_ms(self) -> float:
        return 1000 * (self.times[0] - self.due)

    @property
    def tpot_ms(self) -> float:
        return 1000 * (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    @property
    def gaps_ms(self) -> list[float]:
        return [1000 * (b - a) for a, b in itertools.pairwise(self.times)]

    @property
    def handoff_ms(self) -> float:
        """How much longer the second token took than those after it."""
        first, *later = self.gaps_ms
        return first - statistics.median(later)


Pair = tuple[list[Answer], list[Answer]]
"""Of the separated and of the unified arm, to the same requests."""


@dataclass(frozen=True)
class Slo:
    """The longest TTFT for some lengths of prompt, with straight lines between them, and TPOT."""

    lengths: tuple[int, ...]
    ttft_ms: tuple[float, ...]
    tpot_ms: float

    @classmethod
    def over(cls, idle: Sequence[Answer], ttft_times: float, tpot_times: float) -> Slo:
        """Multiples of the medians of an idle server's answers."""
        lengths = tuple(sorted({one.prompt_tokens for one in idle}))
        return cls(
            lengths,
            tuple(
                ttft_times
                * statistics.median(one.ttft_ms for one in idle if one.prompt_tokens == length)
                for length in lengths
            ),
            tpot_times * statistics.median(one.tpot_ms for one in idle),
        )

    def met(self, answer: Answer) -> bool:
        longest = np.interp(answer.prompt_tokens, self.lengths, self.ttft_ms)
        return bool(answer.ttft_ms <= longest and answer.tpot_ms <= self.tpot_ms)


def arm(name: str, model: str, port: int, folder: Path) -> Arm:
    served: dict[str, Any] = {
        "name": MODEL,
        "source": model,
        "devices": ["core0", "core1"],
        "replicas": 2,
        "kv_cache_memory": "512MiB",
        "router": {"policy": "load_aware"},
        "engine": {
            "max_model_len": CONTEXT,
            "max_num_batched_tokens": CONTEXT,
            "max_num_seqs": 32,
            "block_size": BLOCK_TOKENS,
            "enforce_eager": True,
            "dtype": cpu_dtype(),
        },
    }
    if name == SEPARATED:
        served["roles"] = {"prefill": 1, "decode": 1, "local_prompt_tokens": LOCAL_TOKENS}
    config = {
        "devices": [{"name": f"core{core}", "kind": "cpu", "cores": [core]} for core in range(2)],
        "models": [served],
        "kvstore": {"memory": "1GiB"},
        "server": {"host": "127.0.0.1", "port": port},
    }
    return configured_arm(name, config, MODEL, port, folder)


async def ask(
    session: aiohttp.ClientSession, target: Target, request: PrefixRequest, seed: str, due: float
) -> Answer:
    """Send one request and read its stream to the end.

    Raises:
        RequestsFailedError: it did not yield exactly the tokens asked for.
    """
    body = {
        "model": target.model,
        "prompt": request.prompt(seed),
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    stream = EventStream()
    times: list[float] = []
    try:
        async with session.post(f"{target.url}/v1/completions", json=body) as response:
            if response.status != 200:
                text = await response.text()
                raise RequestsFailedError(f"HTTP {response.status}: {text[:300]}")
            async for chunk in response.content.iter_any():
                now, before = time.perf_counter(), stream.events
                stream.feed(chunk, now)
                times += [now] * (stream.events - before)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise RequestsFailedError(f"{type(error).__name__}: {error}") from error
    return answer(stream, times, request, due)


def answer(
    stream: EventStream, times: Sequence[float], request: PrefixRequest, due: float
) -> Answer:
    """What a stream whose events came at ``times`` holds.

    Raises:
        RequestsFailedError: not exactly what was asked for.
    """
    if stream.failure or not stream.done:
        raise RequestsFailedError(stream.failure or "the stream ended before [DONE]")
    tokens = times[:-2]  # after them come the usage and [DONE]
    asked = (request.tokens, request.output_tokens)
    if (stream.prompt_tokens, stream.output_tokens) != asked or not (
        1 <= len(tokens) <= request.output_tokens
    ):
        raise RequestsFailedError(
            f"{stream.prompt_tokens} and {stream.output_tokens} tokens in {len(tokens)} events, "
            f"where {asked[0]} and {asked[1]} were asked for"
        )
    return Answer(due, tuple(tokens), *asked)


async def open_loop(target: Target, requests: Sequence[PrefixRequest], seed: str) -> list[Answer]:
    """Send every request when it is due, whether or not earlier ones have ended."""
    begin = time.perf_counter()
    async with new_session() as session:

        async def one(request: PrefixRequest) -> Answer:
            due = begin + request.at_s
            await asyncio.sleep(due - time.perf_counter())
            return await ask(session, target, request, seed, due)

        return await asyncio.gather(*map(one, requests))


async def one_by_one(target: Target, requests: Sequence[PrefixRequest], seed: str) -> list[Answer]:
    """Send every request when the one before has ended."""
    async with new_session() as session:
        return [
            await ask(session, target, request, seed, time.perf_counter()) for request in requests
        ]


Loop = Callable[[Target, Sequence[PrefixRequest], str], Coroutine[Any, Any, list[Answer]]]


def drive(arm: Arm, loop: Loop, requests: Sequence[PrefixRequest], seed: str) -> list[Answer]:
    """Thaw an arm, send it the requests, freeze it.

    Raises:
        RequestsFailedError: a request failed, or too few were handed from prefill to decode.
    """
    arm.thaw()
    before = handoffs(arm.target)
    try:
        answers = uvloop.run(loop(arm.target, requests, seed))
    except RequestsFailedError as error:
        raise RequestsFailedError(f"{arm.name}: {error}\n{arm.servers[0].tail()}") from error
    if arm.name == SEPARATED:
        time.sleep(2.5)  # replicas report their metrics every two seconds
        handed = handoffs(arm.target) - before
        longer = sum(request.tokens > LOCAL_TOKENS for request in requests)
        if handed < HANDED_OVER * longer:
            raise RequestsFailedError(
                f"{handed:.0f} of {longer} requests were handed from prefill to decode\n"
                + arm.servers[0].tail()
            )
    arm.freeze()
    return answers


def handoffs(target: Target) -> float:
    """Requests that decode replicas have continued so far."""
    with urllib.request.urlopen(f"{target.url}/metrics", timeout=10) as response:
        return continued(response.read().decode())


def continued(page: str) -> float:
    """The same, from a page of metrics."""
    return sum(float(value) for value in _HANDOFFS.findall(page))


def probes() -> list[PrefixRequest]:
    """``PROBES`` rounds of all lengths, to be sent one by one."""
    arrivals = [
        Arrival(float(number), length, PROBE_TOKENS)
        for number, length in enumerate(PROBE_LENGTHS * PROBES)
    ]
    return window(arrivals, requests=len(arrivals), rate=1.0, seed="probes")


def copy_ms(folder: Path) -> dict[int, float]:
    """Median time in which a worker's loader fetches a prompt's whole blocks, by its tokens."""
    with running_store(folder) as plan:
        engine = Engine(plan)
        engine.put(chain(0, BLOCKS))
        return {
            length: statistics.median(
                fetch_ms(engine, length // BLOCK_TOKENS) for _ in range(PROBES + 1)
            )
            for length in PROBE_LENGTHS
        }


def fetch_ms(engine: Engine, blocks: int) -> float:
    keys = chain(0, BLOCKS)[: KEY_BYTES * blocks]
    found = wait_for(engine, keys, blocks)
    begin = time.perf_counter()
    engine.get(keys, found)
    return 1000 * (time.perf_counter() - begin)


def handoff(answers: Sequence[Answer], copies: Mapping[int, float]) -> dict[str, Any]:
    """The hand-off's own time, and what of it is not the copy; ms.

    The spread is that of the medians of the rounds of :func:`probes`.
    """
    rounds = [answers[at : at + len(copies)] for at in range(0, len(answers), len(copies))]

    def spread(excess: Callable[[Answer], float]) -> dict[str, float]:
        return asdict(Spread.of([statistics.median(map(excess, of)) for of in rounds]))

    whole = spread(lambda one: one.handoff_ms)
    beside = spread(lambda one: one.handoff_ms - copies[one.prompt_tokens])
    return {
        "handoff_ms_p50": whole["median"],
        "handoff_over_copy_ms_p50": beside["median"],
        "handoff_spread": {"handoff_ms_p50": whole, "handoff_over_copy_ms_p50": beside},
        "handoff_by_prompt": {
            str(length): {
                "handoff_ms_p50": statistics.median(
                    one.handoff_ms for one in answers if one.prompt_tokens == length
                ),
                "copy_ms_p50": copied,
                "bytes": length // BLOCK_TOKENS * LAYERS * LAYER_BYTES,
            }
            for length, copied in copies.items()
        },
    }


def traces(paths: Sequence[Path]) -> dict[str, list[Arrival]]:
    """The files' requests, or generated ones, scaled to this context; says how."""
    whole = {path.name: azure(path) for path in paths} or {
        f"generated {kind}": azure_like(kind, requests=GENERATED, seed="trace")
        for kind in AZURE_LIKE
    }
    found = {name: scaled_down(arrivals, CONTEXT) for name, arrivals in whole.items()}
    for name, arrivals in found.items():
        print(
            f"{name}: prompts divided by {PROMPT_SCALE}, outputs by {OUTPUT_SCALE}; "
            f"{len(whole[name]) - len(arrivals)} of {len(whole[name])} requests still exceed "
            f"{CONTEXT} tokens and are left out",
            flush=True,
        )
    return found


def rate_for(arrivals: Sequence[Arrival], unified: Arm, name: str) -> float:
    """``LOAD`` of the requests a second that the unified arm serves of this trace."""
    # From all over the trace, since single stretches of it are longer or shorter than its mean.
    burst = window(arrivals[:: len(arrivals) // BURST], requests=BURST, rate=1e6, seed="burst")
    answers = drive(unified, open_loop, burst, f"{name}/burst")
    return LOAD * BURST / duration_s(answers)


def duration_s(answers: Sequence[Answer]) -> float:
    """From the first request's arrival to the last token."""
    return max(one.times[-1] for one in answers) - min(one.due for one in answers)


def compare(
    name: str, arrivals: Sequence[Arrival], arms: Sequence[Arm], slo: Slo, options: Any
) -> dict[str, Any]:
    """Run by run, the same part of a trace on both arms; the trace's part of the result."""
    rate = options.rate or rate_for(arrivals, arms[1], name)
    requests = round(rate * options.seconds)
    own = (len(arrivals) - 1) / (arrivals[-1].at_s - arrivals[0].at_s)
    print(
        f"{name}: {requests} consecutive requests a run, their times stretched from {own:.2f} (the "
        f"trace's mean) to {rate:.2f} requests/s",
        flush=True,
    )
    pairs: list[Pair] = []
    for run in range(options.runs):
        chosen = window(arrivals, requests=requests, rate=rate, seed=f"run {run}")
        found = {
            side: drive(arms[side], open_loop, chosen, f"{name}/{run}") for side in in_turn(run)
        }
        pairs.append((found[0], found[1]))
        print(describe(f"{name}, run {run + 1}/{options.runs}", pairs[-1], slo), flush=True)
    return {"rate": rate, "requests": requests, "trace_rate": own, **comparison(pairs, slo)}


def describe(what: str, pair: Pair, slo: Slo) -> str:
    separated, unified = (figures(answers, slo) for answers in pair)
    return f"{what}: separated and unified " + ", ".join(
        f"{name} {separated[name]:.{digits}f} and {unified[name]:.{digits}f}"
        for name, digits in (
            ("ttft_ms_p50", 0),
            ("ttft_ms_p99", 0),
            ("tpot_ms_p50", 0),
            ("tpot_ms_p99", 0),
            ("itl_ms_p99", 0),
            ("goodput", 2),
        )
    )


def figures(answers: Sequence[Answer], slo: Slo) -> dict[str, Any]:
    """Latencies in ms; ``goodput`` as a share of the requests."""
    ttft = [one.ttft_ms for one in answers]
    tpot = [one.tpot_ms for one in answers]
    gaps = [gap for one in answers for gap in one.gaps_ms]
    return {
        **percentiles("ttft_ms", ttft),
        **percentiles("tpot_ms", tpot),
        **percentiles("itl_ms", gaps),
        "goodput": sum(map(slo.met, answers)) / len(answers),
    }


def comparison(pairs: Sequence[Pair], slo: Slo) -> dict[str, Any]:
    """Ratios of all requests and of long prompts, and each arm's own figures."""
    longs = [(long_prompts(separated), long_prompts(unified)) for separated, unified in pairs]
    result = ratios(pairs, slo)
    result["long_prompts"] = ratios(longs, slo) | {
        "from_tokens": min(one.prompt_tokens for long, _ in longs for one in long),
        **absolutes(longs, slo),
    }
    return result | absolutes(pairs, slo)


def long_prompts(answers: Sequence[Answer]) -> list[Answer]:
    """The upper third by length of prompt."""
    least = percentile([one.prompt_tokens for one in answers], 200 / 3)
    return [one for one in answers if one.prompt_tokens >= least]


def ratios(pairs: Sequence[Pair], slo: Slo) -> dict[str, Any]:
    """Separated over unified, a pair; then their median and extremes."""
    found = [tuple(figures(answers, slo) for answers in pair) for pair in pairs]
    spreads = {
        # Where no unified request meets the SLO, as if a single one did: there is no ratio to 0.
        ratio: Spread.of(
            [
                separated[name] / (unified[name] or 1 / len(pair[1]))
                for pair, (separated, unified) in zip(pairs, found, strict=True)
            ]
        )
        for ratio, name in _RATIOS.items()
    }
    return {name: spread.median for name, spread in spreads.items()} | {
        "spread": {name: [spread.min, spread.max] for name, spread in spreads.items()},
        "by_run": [dict(zip((SEPARATED, UNIFIED), pair, strict=True)) for pair in found],
    }


def absolutes(pairs: Sequence[Pair], slo: Slo) -> dict[str, dict[str, Any]]:
    """Each arm's figures over the requests of all runs."""
    return {
        name: {
            **figures(list(itertools.chain.from_iterable(runs)), slo),
            "goodput_rps": statistics.median(
                sum(map(slo.met, answers)) / duration_s(answers) for answers in runs
            ),
            "requests": sum(map(len, runs)),
            "tokens_per_event": statistics.fmean(
                one.output_tokens / len(one.times) for answers in runs for one in answers
            ),
        }
        for name, runs in zip((SEPARATED, UNIFIED), zip(*pairs, strict=True), strict=True)
    }


def benchmark(options: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    loads = traces(options.trace)
    arms = [
        arm(name, model, FIRST_PORT + 10 * number, folder)
        for number, name in enumerate((SEPARATED, UNIFIED))
    ]
    with running(arms, options.start_timeout, bind=False):
        for one in arms:
            drive(one, one_by_one, probes()[: len(PROBE_LENGTHS)], "warm-up")
        alone = {one.name: drive(one, one_by_one, probes(), "probes") for one in arms}
        slo = Slo.over(alone[UNIFIED], options.slo_ttft, options.slo_tpot)
        print(
            f"SLO: TPOT {slo.tpot_ms:.0f} ms; TTFT by prompt tokens, ms: "
            + ", ".join(f"{n}: {t:.0f}" for n, t in zip(slo.lengths, slo.ttft_ms, strict=True)),
            flush=True,
        )
        moved = handoff(alone[SEPARATED], copy_ms(folder))
        print(
            f"hand-off {moved['handoff_ms_p50']:.1f} ms, of which not the copy "
            f"{moved['handoff_over_copy_ms_p50']:.1f} ms",
            flush=True,
        )
        found = {name: compare(name, of, arms, slo, options) for name, of in loads.items()}
    return {
        "traces": found,
        **moved,
        "slo": asdict(slo),
        "idle": {
            name: {
                "ttft_ms_p50": Slo.over(answers, 1, 1).ttft_ms,
                "tpot_ms_p50": Slo.over(answers, 1, 1).tpot_ms,
            }
            for name, answers in alone.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disaggregation", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--trace", type=Path, nargs="+", default=[], help="Azure traces, .csv.gz")
    parser.add_argument("--runs", type=int, default=5, help="pairs a trace")
    parser.add_argument("--seconds", type=float, default=30, help="of arrivals, a run and arm")
    parser.add_argument("--rate", type=float, help="requests a second, in place of the measured")
    parser.add_argument("--slo-ttft", type=float, default=5, help="times the idle one")
    parser.add_argument("--slo-tpot", type=float, default=3, help="times the idle one")
    parser.add_argument("--start-timeout", type=float, default=600)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="disaggregation-"))
    facts = machine()
    model = str(catalog.resolve("demo", Path.cwd()))
    print(f"serving {model}; logs in {folder}", flush=True)
    try:
        found = benchmark(options, model, folder)
    except (ServerFailedError, RequestsFailedError) as error:
        print(f"disaggregation: {error}", file=sys.stderr)
        return 1
    setup = {
        "seconds": options.seconds,
        "load": None if options.rate else LOAD,
        "prompt_scale": PROMPT_SCALE,
        "output_scale": OUTPUT_SCALE,
        "context": CONTEXT,
        "local_prompt_tokens": LOCAL_TOKENS,
        "max_num_batched_tokens": CONTEXT,
        "slo_ttft_times_idle": options.slo_ttft,
        "slo_tpot_times_idle": options.slo_tpot,
        "block_tokens": BLOCK_TOKENS,
    }
    result = {**found, "runs": options.runs}
    publish("disaggregation", result, setup=setup, facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
