"""What does a hot model gain, and a cold one lose, when the cold one computes its attention?

Two real engines, the hot one on core 0 and the cold one on core 1. The hot model's requests come
at rates up to saturation, with lengths of the Azure conversation trace scaled down, prompts more
than outputs: a core computes a prompt's token in an eighth of a decode step, a GPU in a hundredth,
and prefill would hide what decode gains. The cold model's requests come at a tenth of the rate. The
hot engine's own KV memory is too small for its batch
(``--own-blocks``), and the cold engine lends ``--lent-blocks`` blocks of its own. Arms:

* ``dedicated``: nothing is lent.
* ``steps``, ``operators``, ``slices``: woven; the lender looks for tasks between its steps only,
  between operators too, and between the slices of sliced operators too (Weaver, figure 7).
* ``local``: what is lent is the hot engine's own instead, the ideal.
* ``multiplexed``: both models on both cores, half of the layers on each, in each other's idle time.
  (Tensor parallelism cannot divide the model's 9 query heads.)

``--disturb`` has another process take a share of the lender's core. Each run serves the same
requests in all arms, one after the other.

Run it as ``python -m benchmarks.weave`` or ``make bench-weave``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import Process
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine import BLOCK_BYTES, BLOCK_TOKENS, token_times
from benchmarks.report import Spread, percentile
from benchmarks.result_files import machine, publish, said_by
from benchmarks.workload import (
    Arrival,
    PrefixRequest,
    brief_conversations,
    window,
)
from loomserve.platform.devices.precision import cpu_dtype
from loomserve.platform.models import catalog
from loomserve.platform.state.lending_options import LENDING_CONFIG

CONTEXT = 512
STEP_TOKENS = 256
COLD_SHARE = 0.1
WOVEN = ("steps", "operators", "slices")
ARMS = ("dedicated", *WOVEN, "local", "multiplexed")


@dataclass(frozen=True)
class Served:
    """One model's requests of one run; milliseconds."""

    output_tokens: int
    seconds: float
    tpot_ms: list[float]
    ttft_ms: list[float]

    @property
    def throughput(self) -> float:
        return self.output_tokens / self.seconds


class Engine:
    """A real engine in processes of its own, whose worker is bound to ``cores``."""

    def __init__(self, cores: Sequence[int], blocks: int, places: int, **options: Any) -> None:
        os.environ.update(
            VLLM_CPU_OMP_THREADS_BIND="|".join(map(str, cores)),
            OMP_NUM_THREADS="1",
            VLLM_USE_V2_MODEL_RUNNER="0",
            VLLM_LOGGING_LEVEL="ERROR",
        )
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from loomserve.platform.engine.executor import NonSpinningExecutor

        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(catalog.resolve("demo", Path.cwd())),
                dtype=cpu_dtype(),
                enforce_eager=True,
                block_size=BLOCK_TOKENS,
                max_model_len=CONTEXT,
                max_num_seqs=places,
                max_num_batched_tokens=STEP_TOKENS,
                kv_cache_memory_bytes=blocks * BLOCK_BYTES,
                pipeline_parallel_size=len(cores),
                # vLLM takes no name of a class for more than one stage.
                distributed_executor_backend=NonSpinningExecutor,
                **options,
            )
        )
        self._names = itertools.count()

    async def call(self, method: str, *args: Any) -> Any:
        return (await self._llm.collective_rpc(f"loans.{method}", args=args))[0]

    async def forget(self) -> None:
        await self._llm.reset_prefix_cache()

    async def serve(self, requests: Sequence[PrefixRequest], seed: str) -> Served:
        begin = time.monotonic()
        times = await asyncio.gather(*(self._serve(one, begin, seed) for one in requests))
        ends = [token_times[-1] for token_times in times]
        return Served(
            output_tokens=sum(map(len, times)),
            seconds=max(ends) - begin,
            tpot_ms=[1000 * (of[-1] - of[0]) / (len(of) - 1) for of in times if len(of) > 1],
            ttft_ms=[
                1000 * (of[0] - begin - one.at_s) for of, one in zip(times, requests, strict=True)
            ],
        )

    async def _serve(self, one: PrefixRequest, begin: float, seed: str) -> list[float]:
        """When each of its tokens came."""
        await asyncio.sleep(begin + one.at_s - time.monotonic())
        name = str(next(self._names))
        return await token_times(self._llm, one.prompt(seed), one.output_tokens, name)

    def close(self) -> None:
        self._llm.shutdown()


def woven(core: int, blocks: int, places: int, **lending: Any) -> Engine:
    return Engine(
        [core],
        blocks,
        places,
        worker_cls="loomserve.platform.lending.engine.worker.RemoteAttentionWorker",
        scheduler_cls="loomserve.platform.lending.engine.scheduler.make_scheduler",
        additional_config={"loomserve": {"queue": "fcfs"}, LENDING_CONFIG: lending},
    )


def plain(cores: Sequence[int], blocks: int, places: int) -> Engine:
    worker = "loomserve.platform.engine.worker.NonSpinningWorker"
    return Engine(cores, blocks, places, worker_cls=worker)


@asynccontextmanager
async def loan(hot: Engine, cold: Engine) -> AsyncIterator[int]:
    """While open, the hot engine may place requests with the cold one."""
    name = f"weave-{time.monotonic_ns()}"
    path = f"/dev/shm/loomserve-ring-{name}"
    await cold.call("lend", name, path, await hot.call("borrowing"))
    side = await hot.call("borrow", name, path)
    try:
        yield side
    finally:
        await hot.call("end_loan", side)
        await cold.call("end_lending", name)


@contextmanager
def disturbed(core: int, share: float) -> Iterator[None]:
    """Another process computes on this core for so much of the time."""
    if not share:
        yield
        return
    other = Process(target=_compute, args=(core, share), daemon=True)
    other.start()
    try:
        yield
    finally:
        other.kill()
        other.join()


def _compute(core: int, share: float) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        until = time.monotonic() + 0.02 * share
        while time.monotonic() < until:
            pass
        time.sleep(0.02 * (1 - share))


class Load(NamedTuple):
    """A trace of which each run takes another window."""

    arrivals: list[Arrival]
    requests: int

    def hot(self, rate: float, seed: str) -> list[PrefixRequest]:
        return window(self.arrivals, requests=self.requests, rate=rate, seed=seed)

    def cold(self, rate: float, until_s: float, seed: str) -> list[PrefixRequest]:
        count = max(2, round(rate * until_s))
        return window(self.arrivals, requests=count, rate=rate, seed=f"{seed}/cold")


@dataclass(frozen=True)
class Run:
    """Both models' requests in one arm at one rate."""

    hot: Served
    cold: Served
    figures: Mapping[str, float]
    """Of the loan: microseconds a task, and the share of steps' context that was lent."""


async def served(hot: Engine, cold: Engine, rate: float, load: Load, seed: str) -> Run:
    """Both models' requests at once, from empty prefix caches."""
    await asyncio.gather(hot.forget(), cold.forget())
    ours = load.hot(rate, seed)
    theirs = load.cold(rate * COLD_SHARE, ours[-1].at_s, seed)
    runs = await asyncio.gather(hot.serve(ours, seed), cold.serve(theirs, f"{seed}/cold"))
    return Run(*runs, figures={})


async def served_woven(
    hot: Engine, cold: Engine, polling: str, rate: float, load: Load, seed: str
) -> Run:
    await cold.call("look_for_tasks", polling)
    async with loan(hot, cold) as side:
        run = await served(hot, cold, rate, load, seed)
        state = await hot.call("loan_state")
    of_loan = next((each for each in state["loans"] if each["partition"] == side), None)
    if of_loan is None:
        # Its requests were computed without the lender, which counts; its figures are gone.
        print(f"the loan broke; broken so far: {state['broken']}")
        return run
    tasks = max(1, of_loan["tasks"])
    return replace(
        run,
        figures={
            "tasks": of_loan["tasks"],
            "post_us": of_loan["post_ns"] / tasks / 1e3,
            "wait_us": of_loan["wait_ns"] / tasks / 1e3,
            "pickup_us": of_loan["pickup_ns"] / tasks / 1e3,
            "service_us": of_loan["service_ns"] / tasks / 1e3,
            "longest_wait_us": of_loan["wait_max_ns"] / 1e3,
        },
    )


class Fleet:
    """All engines, of which two compute at a time."""

    def __init__(self, args: argparse.Namespace) -> None:
        own, lent, places = args.own_blocks, args.lent_blocks, args.places
        # One block of each engine is vLLM's placeholder.
        # Without polling within steps, a task may wait for a whole one of the lender.
        self.hot = woven(0, own + 1, places, borrow_bytes=lent * BLOCK_BYTES, patience_ms=5000)
        self.cold = woven(1, args.cold_blocks + lent + 1, places, lend_bytes=lent * BLOCK_BYTES)
        self.ideal = plain([0], own + lent + 1, places) if "local" in args.arms else None
        self.shared: tuple[Engine, Engine] | None = None
        if "multiplexed" in args.arms:
            self.shared = (
                plain([0, 1], own + lent + 1, places),
                plain([0, 1], args.cold_blocks + 1, places),
            )

    async def run(self, arm: str, rate: float, load: Load, seed: str) -> Run:
        if arm in WOVEN:
            return await served_woven(self.hot, self.cold, arm, rate, load, seed)
        hot, cold = self.hot, self.cold
        if arm == "local":
            assert self.ideal is not None
            hot = self.ideal
        elif arm == "multiplexed":
            assert self.shared is not None
            hot, cold = self.shared
        return await served(hot, cold, rate, load, seed)

    def close(self) -> None:
        for engine in (self.hot, self.cold, self.ideal, *(self.shared or ())):
            if engine is not None:
                engine.close()


Runs = dict[str, dict[float, list[Run]]]
"""By arm and rate."""


def peaks(runs: Runs, arm: str) -> list[float]:
    """Of each run, the hot model's throughput at the rate where it is highest."""
    return [
        max(each.hot.throughput for each in of_run)
        for of_run in zip(*runs[arm].values(), strict=True)
    ]


def compared(runs: Runs) -> dict[str, Any]:
    """Ratios within runs."""
    best = next(arm for arm in ("slices", "operators", "steps") if arm in runs)
    busiest = max(runs[best])
    woven, apart = runs[best][busiest], runs["dedicated"][busiest]
    result: dict[str, Any] = {
        f"hot_peak_vs_{arm}": _ratios(peaks(runs, best), peaks(runs, arm))
        for arm in ("dedicated", "multiplexed")
        if arm in runs
    }
    if "local" in runs:
        result["share_of_all_local"] = _ratios(peaks(runs, best), peaks(runs, "local"))
    result |= {
        "hot_tpot_vs_dedicated_at_peak": _ratios(
            [statistics.fmean(one.hot.tpot_ms) for one in woven],
            [statistics.fmean(one.hot.tpot_ms) for one in apart],
        ),
        "cold_tpot_ratio_mean": _ratios(
            [statistics.fmean(one.cold.tpot_ms) for one in woven],
            [statistics.fmean(one.cold.tpot_ms) for one in apart],
        ),
        "cold_tpot_ratio_p99": _ratios(
            [percentile(one.cold.tpot_ms, 99) for one in woven],
            [percentile(one.cold.tpot_ms, 99) for one in apart],
        ),
    }
    for arm, name in zip(WOVEN, ("cpu_control", "polling", "splitting"), strict=True):
        if taken := _of_tasks(runs.get(arm, {}), "pickup_us"):
            result[f"wait_us_{name}"] = asdict(Spread.of(taken))
    overheads = (_of_tasks(runs[best], name) for name in ("post_us", "pickup_us"))
    if added := list(map(sum, zip(*overheads, strict=True))):
        result["per_layer_overhead_us"] = asdict(Spread.of(added))
    return result


def _of_tasks(of_arm: Mapping[float, list[Run]], name: str) -> list[float]:
    """A figure of the loans that did not break."""
    every = (one.figures.get(name) for of_rate in of_arm.values() for one in of_rate)
    return [each for each in every if each is not None]


def _ratios(values: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    return asdict(Spread.of([a / b for a, b in zip(values, base, strict=True)]))


def arrivals(trace: Path | None) -> list[Arrival]:
    return brief_conversations(trace, CONTEXT, requests=2000)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    load = Load(arrivals(args.trace), args.requests)
    fleet = Fleet(args)
    runs: Runs = {arm: {rate: [] for rate in args.rates} for arm in args.arms}
    try:
        await fleet.run("dedicated", max(args.rates), Load(load.arrivals, 6), "warm-up")
        with disturbed(1, args.disturb):
            for number, rate, arm in itertools.product(range(args.runs), args.rates, args.arms):
                one = await fleet.run(arm, rate, load, f"{number}/{rate}")
                runs[arm][rate].append(one)
                print(_line(number, args.runs, rate, arm, one), flush=True)
    finally:
        fleet.close()
    return {
        **compared(runs),
        "by_arm": {
            arm: {str(rate): _figures(of) for rate, of in by_rate.items()}
            for arm, by_rate in runs.items()
        },
        "runs": args.runs,
    }


def _line(number: int, count: int, rate: float, arm: str, one: Run) -> str:
    figures = " ".join(f"{name} {value:.0f}" for name, value in one.figures.items())
    return (
        f"run {number + 1}/{count} rate {rate} {arm}: hot {one.hot.throughput:.0f} tok/s, TPOT "
        f"{statistics.fmean(one.hot.tpot_ms):.0f} ms; cold {one.cold.throughput:.0f} tok/s, TPOT "
        f"{statistics.fmean(one.cold.tpot_ms):.0f} ms, p99 {percentile(one.cold.tpot_ms, 99):.0f} "
        f"{figures}"
    )


def _figures(of: Sequence[Run]) -> dict[str, float]:
    names = set[str]().union(*(one.figures for one in of))
    return {
        "hot_tokens_per_second": statistics.median(one.hot.throughput for one in of),
        "hot_tpot_ms_mean": statistics.fmean(t for one in of for t in one.hot.tpot_ms),
        "hot_ttft_ms_p50": percentile([t for one in of for t in one.hot.ttft_ms], 50),
        "cold_tpot_ms_mean": statistics.fmean(t for one in of for t in one.cold.tpot_ms),
        "cold_tpot_ms_p99": percentile([t for one in of for t in one.cold.tpot_ms], 99),
        **{
            name: statistics.median(one.figures[name] for one in of if name in one.figures)
            for name in sorted(names)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rates", type=float, nargs="+", default=[0.3, 0.6, 0.9])
    parser.add_argument("--requests", type=int, default=32, help="of the hot model, a run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--own-blocks", type=int, default=16)
    parser.add_argument("--cold-blocks", type=int, default=48, help="beside those that it lends")
    parser.add_argument("--lent-blocks", type=int, default=80)
    parser.add_argument("--places", type=int, default=32, help="requests in a step at most")
    parser.add_argument("--disturb", type=float, default=0.0, help="share of the lender's core")
    parser.add_argument("--trace", type=Path, help="an Azure conversation trace, .csv.gz")
    args = parser.parse_args()
    if "dedicated" not in args.arms or not set(WOVEN) & set(args.arms):
        parser.error("--arms needs dedicated and one of " + ", ".join(WOVEN))
    facts = machine()
    publish("weave", asyncio.run(measure(args)), setup=said_by(args), facts=facts)


if __name__ == "__main__":
    main()
