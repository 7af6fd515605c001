"""How much faster is a pipeline over unequal devices if HELR divides its layers?

Two cores, one of which is given a third of its speed: a process of real-time priority, for which
one must be root or have CAP_SYS_NICE, takes it for two of every three milliseconds, whether or not
the engine wants it, since a slow core is slow for whoever computes there. Both are measured as
``loomserve profile devices`` does, HELR divides the model's layers among them, and real engines
(vLLM, a stage a core) decode with that map, with the even split either way round, and with other
splits: HELR's neighbours, and a grid over both orders (``--grid 1`` is every split there is).
HELR's engine stays; each other one starts at full speed, then both decode the same requests in
turns, so each ratio is between runs that follow each other. Throughput is counted while all
requests decode.

``share_of_best`` compares HELR with the best of all splits by the medians of those ratios; the best
of many noisy ones is partly luck, so it is run once more, which alone counts.

Run it as ``python -m benchmarks.helr`` or ``make bench-helr``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine import token_times
from benchmarks.report import Spread
from benchmarks.result_files import machine, publish, said_by
from loomserve.platform.config import Device
from loomserve.platform.devices.claims import pipeline_environment
from loomserve.platform.models import catalog
from loomserve.platform.placement import model_files
from loomserve.platform.placement.policy.device_times import DeviceProfile
from loomserve.platform.placement.policy.graph import Pipeline, Stage, even, latency_s, period_s
from loomserve.platform.placement.policy.placer import PlacedModel, Wanted, place_models

SOURCE = "demo"
PROMPT = 16
NEIGHBOURS = (-4, -2, -1, 1, 2, 4)
# Short beside a step of a stage; real-time processes may have 95 % of each second.
_SLICE_S = 0.003


class Engine:
    """A real engine, a stage a device; a pipeline is full with ``batch`` requests a stage."""

    def __init__(self, devices: Sequence[Device], layers: Sequence[int], batch: int) -> None:
        environment = pipeline_environment(devices, layers)
        os.environ.update(environment, VLLM_USE_V2_MODEL_RUNNER="0", VLLM_LOGGING_LEVEL="ERROR")
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from loomserve.platform.devices.precision import cpu_dtype
        from loomserve.platform.engine.executor import NonSpinningExecutor

        self._requests = len(layers) * batch
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(catalog.resolve(SOURCE, Path.cwd())),
                dtype=cpu_dtype(),
                enforce_eager=True,
                block_size=32,
                max_model_len=512,
                max_num_seqs=self._requests,
                # A step's prompts fill one batch, so that all stages get equal ones.
                max_num_batched_tokens=batch * PROMPT,
                enable_prefix_caching=False,
                enable_chunked_prefill=True,
                kv_cache_memory_bytes=256 * 2**20,
                pipeline_parallel_size=len(layers),
                distributed_executor_backend=NonSpinningExecutor,
                worker_cls="loomserve.platform.engine.worker.NonSpinningWorker",
            )
        )
        self._names = itertools.count()

    async def decode(self, tokens: int, seed: int) -> float:
        """Output tokens a second while all of its requests decode."""
        prompts = np.random.default_rng(seed).integers(1000, size=(self._requests, PROMPT))
        times: list[list[float]] = [[] for _ in prompts]
        await asyncio.gather(
            *(
                token_times(self._llm, each.tolist(), tokens, str(next(self._names)), of)
                for each, of in zip(prompts, times, strict=True)
            )
        )
        begin, end = max(of[0] for of in times), min(of[-1] for of in times)
        if begin >= end:
            raise RuntimeError("requests did not decode together: give more --tokens")
        return sum(begin < at <= end for of in times for at in of) / (end - begin)

    def close(self) -> None:
        self._llm.shutdown()


@contextmanager
def throttled(core: int, slowdown: float) -> Iterator[None]:
    """Have the core give everybody else the ``slowdown``-th part of its time.

    Raises:
        SystemExit: it takes more rights than this process has.
    """
    context = get_context("spawn")
    began, begins = context.Pipe(duplex=False)
    taker = context.Process(target=_take, args=(core, slowdown, begins), daemon=True)
    taker.start()
    begins.close()
    try:
        try:
            began.recv()
        except EOFError:
            raise SystemExit(
                "a core is slowed down by a process of real-time priority: run this as root, or "
                "with CAP_SYS_NICE"
            ) from None
        yield
    finally:
        taker.kill()
        taker.join()


def _take(core: int, slowdown: float, begins: Connection) -> None:
    os.sched_setaffinity(0, {core})
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return
    begins.send(True)
    parent = os.getppid()
    begin = time.perf_counter()
    while os.getppid() == parent:
        taken = begin + _SLICE_S * (slowdown - 1) / slowdown
        while time.perf_counter() < taken:
            pass
        begin += _SLICE_S
        time.sleep(max(0.0, begin - time.perf_counter()))


def splits(layers: int, grid: int) -> list[Pipeline]:
    """Both orders of two devices, every ``grid``-th way to divide the layers."""
    return [
        (Stage(first, count), Stage(1 - first, layers - count))
        for first in (0, 1)
        for count in range(grid, layers, grid)
    ]


def neighbours(pipeline: Pipeline) -> list[Pipeline]:
    """A few layers moved from one stage to the other."""
    if len(pipeline) != 2:
        return []
    first, last = pipeline
    return [
        (Stage(first.node, first.layers + more), Stage(last.node, last.layers - more))
        for more in NEIGHBOURS
        if first.layers + more >= 1 and last.layers - more >= 1
    ]


def name(pipeline: Pipeline) -> str:
    return " → ".join(f"core{stage.node}:{stage.layers}" for stage in pipeline)


class Comparison:
    """Runs of other splits against HELR's."""

    def __init__(self, args: argparse.Namespace, devices: Sequence[Device]) -> None:
        self._args, self._devices = args, devices

    def engine(self, pipeline: Pipeline) -> Engine:
        return Engine(
            [self._devices[stage.node] for stage in pipeline],
            [stage.layers for stage in pipeline],
            self._args.batch,
        )

    async def against(self, helr: Engine, pipeline: Pipeline) -> tuple[list[float], list[float]]:
        """Tokens a second of HELR's engine and of this split's, run by run."""
        other = self.engine(pipeline)
        try:
            with throttled(self._args.slow_core, self._args.slowdown):
                ours: list[float] = []
                theirs: list[float] = []
                for run in range(-1, self._args.runs):
                    # Which comes first alternates; a first pair warms up.
                    pair = [(helr, ours), (other, theirs)]
                    for engine, results in pair if run % 2 else pair[::-1]:
                        tokens = self._args.tokens if run >= 0 else 8
                        rate = await engine.decode(tokens, run + 1)
                        if run >= 0:
                            results.append(rate)
        finally:
            other.close()
        print(
            f"{name(pipeline)}: {statistics.median(theirs):.1f} tok/s, HELR's "
            f"{statistics.median(ours):.1f}",
            flush=True,
        )
        return ours, theirs


def placed(
    args: argparse.Namespace, devices: Sequence[Device]
) -> tuple[DeviceProfile, PlacedModel]:
    """Measured under throttling, as the engines will be."""
    from loomserve.platform.engine.profiling.device_speed import profile_devices

    folder = Path(catalog.resolve(SOURCE, Path.cwd()))
    with throttled(args.slow_core, args.slowdown):
        profile = profile_devices(
            devices, {SOURCE: (str(folder), devices)}, sorted({1, args.batch}), print
        )
    wanted = Wanted(
        name=SOURCE,
        source=SOURCE,
        shape=model_files.read(folder),
        devices=tuple(device.name for device in devices),
        kv_bytes=256 * 2**20,
        mode="balanced",
        batch=args.batch,
    )
    return profile, place_models([wanted], profile)[0]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    devices = [Device(name=f"core{core}", cores=(core,)) for core in (0, 1)]
    profile, found = placed(args, devices)
    placement = found.placement
    if placement is None:
        raise SystemExit("the model does not fit into this machine's memory")
    print(f"HELR: {name(placement.pipeline)}", flush=True)
    layers = found.demand.layers
    fast = 1 - args.slow_core
    evens = {
        "even, slow core last": even(found.demand, [fast, args.slow_core]),
        "even, slow core first": even(found.demand, [args.slow_core, fast]),
    }
    others = [
        *evens.values(),
        (Stage(fast, layers),),
        *neighbours(placement.pipeline),
        *(splits(layers, args.grid) if args.grid else ()),
    ]
    comparison = Comparison(args, devices)
    runs: dict[Pipeline, tuple[list[float], list[float]]] = {}
    helr = comparison.engine(placement.pipeline)
    try:
        for pipeline in dict.fromkeys(others):
            if pipeline != placement.pipeline:
                runs[pipeline] = await comparison.against(helr, pipeline)
        ratios = {pipeline: Spread.of_ratios(*of) for pipeline, of in runs.items()}
        closest = min(ratios, key=lambda pipeline: ratios[pipeline].median)
        # The least of many noisy ratios is low by chance, so that pair is run once more.
        of_best = Spread.of_ratios(*await comparison.against(helr, closest))
    finally:
        helr.close()
    against_even = {label: ratios[split] for label, split in evens.items() if split in ratios}
    weakest = min(against_even.values(), key=lambda ratio: ratio.median)
    times = {device.name: device.models[0].times[-1] for device in profile.devices}
    slow, quick = (times[f"core{core}"] for core in (args.slow_core, fast))
    return {
        "throughput_vs_even": weakest.median,
        # HELR's own map may be the best, which is 1.
        "share_of_best": min(1.0, of_best.median),
        "spread": {
            "throughput_vs_even": [weakest.min, weakest.max],
            "share_of_best": [of_best.min, of_best.max],
        },
        "runs": args.runs,
        "speed_of_slow_core": quick.layer_s / slow.layer_s,
        "helr": name(placement.pipeline),
        "best": name(closest) if of_best.median < 1 else name(placement.pipeline),
        "throughput_vs": {label: asdict(ratio) for label, ratio in against_even.items()},
        "predicted_vs": {
            label: period_s(found.demand, found.graph, split) / placement.period_s
            for label, split in evens.items()
        },
        "by_split": [
            {
                "split": name(pipeline),
                "tokens_per_second": statistics.median(theirs),
                "helr_tokens_per_second": statistics.median(ours),
                "helr_vs_it": asdict(ratios[pipeline]),
                "predicted_period_ms": 1e3 * period_s(found.demand, found.graph, pipeline),
                "predicted_latency_ms": 1e3 * latency_s(found.demand, found.graph, pipeline),
            }
            for pipeline, (ours, theirs) in runs.items()
        ],
        "predicted_period_ms": 1e3 * placement.period_s,
        "profile": profile.model_dump(mode="json"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="pairs of runs a split")
    parser.add_argument("--batch", type=int, default=8, help="requests of a step")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of a request")
    parser.add_argument(
        "--slowdown", type=float, default=3.0, help="how many times as slow the slow core is"
    )
    parser.add_argument("--slow-core", type=int, choices=(0, 1), default=1)
    parser.add_argument(
        "--grid", type=int, default=5, help="layers between splits; 1: all, 0: neighbours only"
    )
    args = parser.parse_args()
    facts = machine()
    publish("helr", asyncio.run(measure(args)), setup=said_by(args), facts=facts)


if __name__ == "__main__":
    main()
