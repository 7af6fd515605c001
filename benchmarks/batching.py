"""What do batching policies gain where batches are static, and how far is continuous batching?

Magnus's setting, scaled to a small machine: requests of six tasks (translation, correction, code)
arrive at random and a static engine on ``transformers`` computes them, batch after batch, on one
core. KV memory holds seven requests of the longest prompts and answers, as in the paper. Arms:

* ``vanilla``: first come, first served, in batches of the seven that are always safe.
* ``s3``: bin packing by predicted length; the batch that has waited the longest goes first.
* ``wma``: Magnus's batcher, in the same order.
* ``s3_hrrn``, ``wma_hrrn``: highest response ratio next, by batch times that nearest neighbours
  predict and learn. The latter is Magnus.
* ``slo_odbs``, ``slo_dbs``, ``odbs``: UELLM's, in the order of deadlines; ``_sum``: with line 6 of
  the algorithm as equation 3-4 has it, not as it is printed.
* ``vllm``: continuous batching with the same KV memory, the peer that static batching is up to.

Every answer has its reference's length, in all arms. Policies know what Magnus's predictor makes of
the text, trained on other texts of the data. With ``--noise``, and where there is no data, they
know the length times a log-normal factor instead; 0 is perfect knowledge. Batches that outgrow
memory are split and run again; policies plan with all of memory but ``--reserve``.

Real batches and steps are measured first, and models of their times fitted to these. At ``--real``
times vanilla's capacity, some arms serve the same requests really and by the model:
``batch_model_error_really`` is how far the model is off the batches that ran, ``model_error`` how
far the mean responses are apart in the worst of these arms, in which small errors of the times lead
to other batches. All other figures are the model's. Time is ``--clock cpu``: what the process
computes, the same as on a clock where nothing else runs. Parameters (Φ, thresholds and weights) are
chosen by requests other than those that count.

``load`` is the arrival rate over vanilla's capacity. Ratios are over ``vanilla`` of the same
requests, at the load where they are best, as in the papers; ``points`` has all. They are of
``policy``, the arm of the least mean response to those other requests, and of ``magnus``.
``throughput_bound_vs_vanilla`` is what no order of static batches can exceed, by the model.
Deadlines come ``--slo LOW HIGH`` seconds after arrival, evenly spread; ``slo_bound`` is the share
of them that no order of static batches can exceed (:func:`benchmarks.static_lane.attainable`).

``--data FOLDER`` takes lengths from ``magnus_codexglue`` and ``magnus_jfleg`` there; else they are
drawn in their likeness. The last line of the output is one JSON object, also written to
``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import continuous_lane, static_lane, task_lengths
from benchmarks.report import Spread, percentile
from benchmarks.result_files import machine, publish
from benchmarks.static_lane import FittedBatches, LaneRequest, Ran, Run, Served
from benchmarks.task_lengths import LONGEST_ANSWER, LONGEST_PROMPT, Length, drawn
from loomserve.platform.costs.batch_time import BatchShape, BatchTimes, TimedBatch
from loomserve.platform.costs.step_time import OnlineModel
from loomserve.platform.models import catalog
from loomserve.routers.static_batching.base import Batcher, BatchRequest, KvBudget, StaticBatch
from loomserve.routers.static_batching.fifo import Fifo
from loomserve.routers.static_batching.next_batch import Next, first, hrrn, oldest
from loomserve.routers.static_batching.queue import BatchQueue
from loomserve.routers.static_batching.s3 import s3
from loomserve.routers.static_batching.slo_odbs import OutputTerm, SloOdbs, odbs, slo_dbs
from loomserve.routers.static_batching.wma import Wma

VANILLA_SIZE = 7
CONTEXT = LONGEST_PROMPT + LONGEST_ANSWER
KV_TOKENS = VANILLA_SIZE * CONTEXT
REAL_ARMS = ("vanilla", "s3", "s3_hrrn", "wma", "wma_hrrn", "slo_odbs", "slo_odbs_sum", "vllm")
NOISE = 0.25
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
_BATCH_SIZES = (1, 2, 4, 7, 7, 12, 16, 20, 24, 28, 32, 40)
_LONGEST_STEPS = 64
"""Of a batch that the model is fitted to: what a step costs shows in fewer than the longest has."""

_KNOWN_BATCHES = 200

_THRESHOLDS = {
    "wma": (1000, 2000, 4000, 8000, 16000, 32000),
    "sum": (500, 1000, 2000, 4000, 8000),
    "difference": (0, 100, 300, 1000, 3000),
    "slo": (1000, 2000, 4000, 8000, 16000),
}
_SLO_WEIGHTS = (0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Policy:
    """``choose`` None stands for HRRN, which needs an estimator of each run's own."""

    batcher: Batcher
    choose: Next | None


def candidates(memory: KvBudget) -> dict[str, list[Policy]]:
    """Of each arm, with each setting of its parameters."""
    wmas = [Wma(threshold) for threshold in _THRESHOLDS["wma"]]
    both = {
        term: [
            SloOdbs(threshold, weight, 1.0, term)
            for threshold in _THRESHOLDS[term]
            for weight in _SLO_WEIGHTS
        ]
        for term in OutputTerm
    }
    of_outputs = {
        term: [slo_dbs(threshold, output_term=term) for threshold in _THRESHOLDS[term]]
        for term in OutputTerm
    }
    sum_, difference = OutputTerm.SUM, OutputTerm.DIFFERENCE
    found: dict[str, tuple[Sequence[Batcher], Next | None]] = {
        "vanilla": ([Fifo.for_longest(memory, LONGEST_PROMPT, LONGEST_ANSWER)], oldest),
        "s3": ([s3], oldest),
        "s3_hrrn": ([s3], None),
        "wma": (wmas, oldest),
        "wma_hrrn": (wmas, None),
        "slo_odbs": (both[difference], first),
        "slo_odbs_sum": (both[sum_], first),
        "slo_dbs": (of_outputs[difference], first),
        "slo_dbs_sum": (of_outputs[sum_], first),
        "odbs": ([odbs(threshold) for threshold in _THRESHOLDS["slo"]], first),
    }
    return {
        arm: [Policy(batcher, choose) for batcher in batchers]
        for arm, (batchers, choose) in found.items()
    }


@dataclass(frozen=True)
class Figures:
    """One arm's run of so many requests."""

    requests: int
    throughput: float
    mean_response_s: float
    p95_response_s: float
    slo_attainment: float
    out_of_memory: int
    batches: int
    batch_time_error: float | None = None

    @classmethod
    def of(
        cls,
        requests: Sequence[LaneRequest],
        finished_s: Mapping[str, float],
        batches: Sequence[Ran] = (),
        batch_time_error: float | None = None,
    ) -> Figures:
        took = [finished_s[one.known.id] - one.known.arrived_s for one in requests]
        return cls(
            requests=len(requests),
            throughput=len(requests) / max(finished_s.values()),
            mean_response_s=statistics.fmean(took),
            p95_response_s=percentile(took, 95),
            slo_attainment=statistics.fmean(
                finished_s[one.known.id] <= (one.known.deadline_s or 0) for one in requests
            ),
            out_of_memory=sum(not one.fitted for one in batches),
            batches=len(batches),
            batch_time_error=batch_time_error,
        )


def requests_of(
    lengths: Sequence[Length], rate: float, slo: Sequence[float], noise: float | None, seed: str
) -> list[LaneRequest]:
    """Poisson arrivals of so many a second, and deadlines; without noise, lengths as predicted."""
    source = random.Random(f"arrivals/{seed}")
    low, high = slo
    at_s = 0.0
    found = []
    for number, length in enumerate(lengths):
        at_s += source.expovariate(rate)
        predicted = length.predicted
        if noise is not None or predicted is None:
            predicted = round(length.answer * source.lognormvariate(0, noise or 0.0))
        known = BatchRequest(
            f"{seed}/{number}",
            at_s,
            length.prompt,
            min(LONGEST_ANSWER, max(1, predicted)),
            at_s + source.uniform(low, high),
        )
        found.append(LaneRequest(known, length.answer))
    return found


@dataclass(frozen=True)
class Lane:
    """A static engine: its memory, what was measured of it, and what policies plan with."""

    memory: KvBudget
    planned: KvBudget
    known: Sequence[TimedBatch]

    def serve(self, policy: Policy, requests: Sequence[LaneRequest], run: Run) -> Figures:
        """All requests by one policy; its estimator knows some batches beforehand."""
        times = BatchTimes(self.known, 0.0)
        errors: list[float] = []

        def processing_s(batches: Sequence[StaticBatch]) -> Sequence[float]:
            shapes = [BatchShape(len(one.requests), one.length, one.generation) for one in batches]
            found: list[float] = times.seconds(shapes).tolist()
            return found

        def ended(ran: Ran, now: float) -> None:
            errors.append(abs(float(times.seconds([ran.shape])[0]) / ran.seconds - 1))
            times.finished(ran.shape, ran.seconds, now)

        queue = BatchQueue(policy.batcher, policy.choose or hrrn(processing_s), self.planned)
        served = static_lane.serve(requests, queue, run, ended if policy.choose is None else _no)
        return figures_of(requests, served, statistics.fmean(errors) if errors else None)


def _no(ran: Ran, now: float) -> None: ...


def figures_of(
    requests: Sequence[LaneRequest], served: Served, batch_time_error: float | None
) -> Figures:
    return Figures.of(requests, served.finished_s, served.batches, batch_time_error)


def sampled(executor: Any, clock: Callable[[], float]) -> list[TimedBatch]:
    """Batches of random shapes within the memory, really computed; the first warms up."""
    source = random.Random("batches")
    run = static_lane.measured(executor, clock)
    found: list[TimedBatch] = []
    for at, size in enumerate((2, *_BATCH_SIZES)):
        room = KV_TOKENS // size
        answer = source.randrange(8, min(_LONGEST_STEPS, room // 2))
        prompt = source.randrange(8, min(LONGEST_PROMPT, room - answer, 24 + 1600 // size))
        request = LaneRequest(BatchRequest("", 0.0, prompt, answer), answer)
        members = [
            replace(request, known=replace(request.known, id=f"sample/{at}/{number}"))
            for number in range(size)
        ]
        ran = run(members)
        if at:
            found.append((ran.shape, ran.seconds))
    return found


def likely(batches: FittedBatches, lengths: Sequence[Length]) -> list[TimedBatch]:
    """Batches of drawn requests, as many as an estimator may know from a day before.

    They take what the model says: to measure as many would take longer than everything else.
    """
    source = random.Random("likely")
    shapes: list[BatchShape] = []
    while len(shapes) < _KNOWN_BATCHES:
        members = source.sample(lengths, source.randint(1, max(_BATCH_SIZES)))
        longest = max(one.prompt for one in members), max(one.answer for one in members)
        if len(members) * sum(longest) <= KV_TOKENS:
            shapes.append(BatchShape(len(members), *longest))
    return list(zip(shapes, batches.seconds(shapes).tolist(), strict=True))


def chosen(
    lane: Lane,
    run: Run,
    policies: Mapping[str, Sequence[Policy]],
    sets: Sequence[Sequence[LaneRequest]],
) -> tuple[dict[str, Policy], str]:
    """Of each arm the setting that serves some other requests best, and the best arm.

    What serves in the order of deadlines is judged by the share of these that it meets, then, as
    all others, by the mean response.
    """

    def quality(policy: Policy) -> tuple[float, float]:
        figures = [lane.serve(policy, requests, run) for requests in sets]
        response_s = statistics.fmean(one.mean_response_s for one in figures)
        met = statistics.fmean(one.slo_attainment for one in figures)
        return (met if policy.choose is first else 0.0), -response_s

    best: dict[str, tuple[tuple[float, float], Policy]] = {}
    for arm, settings in policies.items():
        judged = [(quality(policy), policy) for policy in settings]
        best[arm] = max(judged, key=lambda one: one[0])
    fastest = max(best, key=lambda arm: best[arm][0][1])
    return {arm: policy for arm, (_, policy) in best.items()}, fastest


class Continuous:
    """vLLM in a process of its own, idle between calls."""

    def __init__(self, token_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, initializer=_start, initargs=(token_bytes,))

    def serve(self, requests: Sequence[LaneRequest], clock: str) -> Any:
        return self._pool.submit(_serve, requests, clock).result()

    def close(self) -> None:
        self._pool.shutdown()


_engine: continuous_lane.ContinuousEngine


def _start(token_bytes: int) -> None:
    global _engine
    _engine = continuous_lane.ContinuousEngine(KV_TOKENS, token_bytes, CONTEXT)


def _serve(requests: Sequence[LaneRequest], clock: str) -> Any:
    return _engine.serve(requests, CLOCKS[clock])


@dataclass(frozen=True)
class Real:
    """What some arms did really and by the models, and how far the model of batches is off those
    that really ran, each by itself."""

    arms: dict[str, Any]
    batch_error: float
    batches: int


def really(
    lane: Lane,
    policies: Mapping[str, Policy],
    batches: FittedBatches,
    requests: Sequence[LaneRequest],
    warm_up: Sequence[LaneRequest],
    real_run: Run,
    clock: str,
) -> tuple[Real, OnlineModel]:
    """Some arms really and by the models; and the model of vLLM's steps.

    Until vLLM is compared with that, it knows the steps of ``warm_up`` only.
    """
    ran: list[Ran] = []

    def run(batch: Sequence[LaneRequest]) -> Ran:
        ran.append(real_run(batch))
        return ran[-1]

    engine = Continuous(lane.memory.token_bytes)
    try:
        _, other_steps = engine.serve(warm_up, clock)
        steps = continuous_lane.fitted(other_steps)
        found: dict[str, Any] = {}
        for arm in REAL_ARMS:
            if arm == "vllm":
                finished, real_steps = engine.serve(requests, clock)
                real = Figures.of(requests, finished)
                model = Figures.of(requests, continuous_lane.simulated(requests, steps, KV_TOKENS))
                steps = continuous_lane.fitted([*other_steps, *real_steps])
            else:
                real = lane.serve(policies[arm], requests, run)
                model = lane.serve(policies[arm], requests, batches.run_with(lane.memory))
            found[arm] = {
                "real": asdict(real),
                "model": asdict(model),
                "mean_response_model_over_real": model.mean_response_s / real.mean_response_s,
                "throughput_model_over_real": model.throughput / real.throughput,
            }
            print(json.dumps({arm: found[arm]}), flush=True)
    finally:
        engine.close()
    whole = [one for one in ran if one.fitted]
    predicted = batches.seconds([one.shape for one in whole])
    error = statistics.fmean(
        abs(guess / one.seconds - 1) for guess, one in zip(predicted, whole, strict=True)
    )
    return Real(found, error, len(whole)), steps


def real_ratios(reals: Sequence[Real]) -> dict[str, Any]:
    """Of each arm that really ran, over vanilla of the same run."""
    return {
        arm: {
            name: asdict(
                Spread.of(
                    [
                        real.arms[arm]["real"][name] / real.arms["vanilla"]["real"][name]
                        for real in reals
                    ]
                )
            )
            for name in ("throughput", "mean_response_s", "p95_response_s")
        }
        for arm in REAL_ARMS
        if arm != "vanilla"
    }


def ratios(runs: Sequence[Mapping[str, Figures]], arm: str) -> dict[str, Spread]:
    """An arm over vanilla, run by run."""
    return {
        f"{name}_vs_vanilla": Spread.of(
            [getattr(run[arm], field) / getattr(run["vanilla"], field) for run in runs]
        )
        for name, field in (
            ("throughput", "throughput"),
            ("mean_response", "mean_response_s"),
            ("p95_response", "p95_response_s"),
        )
    }


def point(
    load: float, runs: Sequence[Mapping[str, Figures]], bounds: Sequence[float]
) -> dict[str, Any]:
    """A load's own figures: medians of each arm's, and its ratios with their spread."""
    arms = {}
    for arm in runs[0]:
        columns = [asdict(run[arm]) for run in runs]
        medians = {
            name: None if columns[0][name] is None else statistics.median(c[name] for c in columns)
            for name in columns[0]
        }
        spreads = {name: asdict(of) for name, of in ratios(runs, arm).items()}
        arms[arm] = {**medians, **spreads}
    by_run = [{arm: asdict(figures) for arm, figures in run.items()} for run in runs]
    return {"load": load, "slo_bound": statistics.median(bounds), "arms": arms, "by_run": by_run}


def best_ratios(points: Sequence[Mapping[str, Any]], arm: str) -> dict[str, Any]:
    """Each at the load where it is the best, as the papers' figures are."""
    found: dict[str, Any] = {}
    for name, best in (
        ("throughput_vs_vanilla", max),
        ("mean_response_vs_vanilla", min),
        ("p95_response_vs_vanilla", min),
    ):
        ratio = {at["load"]: at["arms"][arm][name] for at in points}
        load = best(ratio, key=lambda at: ratio[at]["median"])
        found[name] = ratio[load]["median"]
        found[f"{name}_spread"] = {**ratio[load], "load": load}
    return found


def attainment(at: Mapping[str, Any]) -> dict[str, float]:
    """The share of deadlines that were met by each arm, and what bounds it."""
    met = {f"slo_attainment_{arm}": one["slo_attainment"] for arm, one in at["arms"].items()}
    return {**met, "slo_bound": at["slo_bound"]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    os.environ["OMP_NUM_THREADS"] = "1"  # of vLLM's process too, which inherits it
    from loomserve.platform.batch.offline.executor import OfflineExecutor
    from loomserve.platform.devices.precision import cpu_dtype

    model = Path(catalog.resolve("demo", Path.cwd()))
    executor = OfflineExecutor(model, threads=1, kv_bytes=sys.maxsize, dtype=cpu_dtype())
    clock = CLOCKS[options.clock]
    noise = NOISE if options.data is None and options.noise is None else options.noise
    rows = task_lengths.read(options.data, predict=noise is None) if options.data else None
    token_bytes = executor.token_bytes
    memory = KvBudget(KV_TOKENS * token_bytes, token_bytes)
    executor.kv_bytes = memory.bytes
    planned = replace(memory, bytes=int(memory.bytes * (1 - options.reserve)))
    samples = sampled(executor, clock)
    print(json.dumps({"batches": [[*astuple(shape), took] for shape, took in samples]}), flush=True)
    batches = FittedBatches(samples)
    known = likely(batches, drawn(options.requests, rows, "known"))
    lane = Lane(memory, planned, known)
    run = batches.run_with(memory)
    all_policies = candidates(memory)

    def drawn_requests(
        count: int,
        load: float,
        seed: str,
        slo: Sequence[float] = options.slo,
        noise: float | None = noise,
    ) -> list[LaneRequest]:
        lengths = drawn(count, rows, seed)
        return requests_of(lengths, load * capacity, slo, noise, seed)

    capacity = 1.0
    [vanilla] = all_policies["vanilla"]
    at_once = [
        replace(one, known=replace(one.known, arrived_s=0.0))
        for one in drawn_requests(options.requests, 1.0, "capacity")
    ]
    capacity = lane.serve(vanilla, at_once, run).throughput
    tuning = [
        drawn_requests(options.requests, load, f"tune/{load}")
        for load in sorted({options.slo_load, options.real})
    ]
    policies, fastest = chosen(lane, run, all_policies, tuning)
    parameters = {
        arm: getattr(policy.batcher, "__name__", None) or str(policy.batcher)
        for arm, policy in policies.items()
    }
    print(json.dumps(parameters), flush=True)

    few = partial(drawn_requests, options.real_requests, options.real)
    reals: list[Real] = []
    for number in range(options.real_runs):
        real, steps = really(
            lane,
            policies,
            batches,
            few(f"real/{number}"),
            few("warm-up"),
            static_lane.measured(executor, clock),
            options.clock,
        )
        reals.append(real)

    def compare(
        load: float, run_number: int, slo: Sequence[float], noise: float | None
    ) -> tuple[dict[str, Figures], float]:
        requests = drawn_requests(options.requests, load, f"{run_number}/{load}", slo, noise)
        figures = {arm: lane.serve(one, requests, run) for arm, one in policies.items()}
        finished = continuous_lane.simulated(requests, steps, KV_TOKENS)
        figures["vllm"] = Figures.of(requests, finished)
        return figures, static_lane.attainable(requests, batches, memory)

    def compared(load: float, slo: Sequence[float], noise: float | None) -> dict[str, Any]:
        results = [compare(load, number, slo, noise) for number in range(options.runs)]
        found = point(load, [one for one, _ in results], [bound for _, bound in results])
        print(json.dumps(found), flush=True)
        return found

    points = [compared(load, options.slo, noise) for load in options.loads]
    return {
        "policy": fastest,
        **best_ratios(points, fastest),
        "magnus": best_ratios(points, "wma_hrrn"),
        **attainment(next(at for at in points if at["load"] == options.slo_load)),
        "oom_recovered": sum(
            one["out_of_memory"] or 0 for at in points for one in at["arms"].values()
        ),
        "oom_recovered_really": sum(
            one["real"]["out_of_memory"] for real in reals for one in real.arms.values()
        ),
        "runs": options.runs,
        "vanilla_requests_per_second": capacity,
        "throughput_bound_vs_vanilla": len(at_once)
        / sum(batches.least_share(one, memory) for one in at_once)
        / capacity,
        "batch_model_error": static_lane.fit_error(samples),
        "batch_model_error_really": [real.batch_error for real in reals],
        "batches_really": [real.batches for real in reals],
        "model_error": max(
            abs(one["mean_response_model_over_real"] - 1)
            for real in reals
            for one in real.arms.values()
        ),
        "real_over_vanilla": real_ratios(reals),
        "real": [real.arms for real in reals],
        "points": points,
        "perfect_lengths": compared(options.real, options.slo, 0.0),
        "papers_deadlines": compared(options.slo_load, (1.0, 350.0), noise),
        "parameters": parameters,
    }


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batching", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--data", type=Path, help="folder with Magnus's tasks")
    parser.add_argument("--loads", type=float, nargs="+", default=[1.0, 1.5, 2.0, 3.0])
    parser.add_argument("--requests", type=int, default=400, help="of each simulated run")
    parser.add_argument("--runs", type=int, default=3, help="simulated, at each load")
    parser.add_argument("--real", type=float, default=3.0, help="load of the real run")
    parser.add_argument("--real-requests", type=int, default=100, help="of each real run")
    parser.add_argument("--real-runs", type=int, default=3)
    parser.add_argument("--noise", type=float, help="instead of predictions")
    parser.add_argument("--reserve", type=float, default=0.2, help="share of memory")
    parser.add_argument("--slo", type=float, nargs=2, default=[60.0, 350.0], help="seconds")
    parser.add_argument("--slo-load", type=float, help="one of the loads, else the least of them")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    options = parser.parse_args(words)
    if options.slo_load is None:
        options.slo_load = min(options.loads)
    if options.real_runs < 1:
        parser.error("--real-runs must be positive")
    if options.slo_load not in options.loads:
        parser.error(f"--slo-load {options.slo_load} is none of --loads")
    return options


def main() -> int:
    options = arguments()
    facts = machine()
    figures = measure(options)
    setup = {
        **{name: value for name, value in vars(options).items() if name != "data"},
        "lengths": "data" if options.data else "in the data's likeness",
        "kv_tokens": KV_TOKENS,
        "vanilla_size": VANILLA_SIZE,
    }
    publish("batching", figures, setup=setup, facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
