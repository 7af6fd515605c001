"""What do queues gain from predicted lengths, where requests come in bursts and have deadlines?

One engine within this process, on one core, serves the same requests under each arm, a queue and
what it knows of the answers' lengths: "none" (``max_tokens``, the same for all), "predicted", or
"perfect". A request ends after its reference answer's length, which the scheduler is not told: the
benchmark aborts it there.

Requests come as in Azure's conversation trace of 2023 (``--trace``), or in its likeness, with times
stretched by one factor, so that bursts stay bursts, to ``--load`` times the rate at which it
served them when all came at once. Deadlines are drawn as in UELLM (section 3.6): uniformly at
random between 1 and 350 seconds, whatever the request, and here divided by one factor, so that the
longest is ``--longest`` times the mean time that a request ran in that first round.

With ``--data FOLDER``, lengths are those of ``alpaca_sample``, a fifth of which is served, as
predicted by what was trained and calibrated on the rest (no near-duplicates on both sides). Else
they are drawn in the likeness of Alpaca's long answers, and so are predictions: by a predictor that
knows a normal variable which correlates with the length's logarithm at ``CORRELATION``, about what
``docs/lengths.md`` has for open questions.

Goodput is requests that met their deadline for each second from the first arrival to the last
end; attainment their share. ``goodput_vs_fcfs`` is each arm's over that of first come, first
served, of the same run; ``share_of_oracle`` what a queue gets with predictions of what it gets with
perfect lengths. The last line of the output is one JSON object, also written to
``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine import BLOCK_TOKENS, offline_engine
from benchmarks.report import Spread
from benchmarks.result_files import machine, publish
from benchmarks.workload import Likeness, azure, azure_like, window
from loomserve.platform.lengths.predict.prediction import LengthQuery
from loomserve.platform.models import catalog
from loomserve.platform.scheduling.policy.deadline import DEADLINE
from loomserve.platform.scheduling.policy.expected import EXPECTED, Expected

LIKENESS = Likeness(0.0, (2.64, 0.72), (4.62, 0.82))
"""Log-normal lengths fitted to ``alpaca_long_answers``."""
CORRELATION = 0.6
MAX_TOKENS = 384
CONTEXT = 1024
STEP_TOKENS = 512
PAPER_DEADLINES_S = (1.0, 350.0)
LENGTHS = ("none", "predicted", "perfect")
ARMS = (
    ("fcfs", "none"),
    ("fair", "none"),
    *((queue, lengths) for queue in ("sjf", "deadline") for lengths in LENGTHS),
)
_HIGH = 1.645  # a normal variable exceeds this by a chance of 5 %
_TEST = 1
_VOCABULARY = (1000, 40000)


@dataclass(frozen=True)
class Job:
    """A request: its lengths in tokens, and what a predictor says of its answer's."""

    prompt: int
    answer: int
    predicted: Expected

    def known(self, lengths: str) -> Expected | None:
        """What the scheduler is told of the answer's length."""
        if lengths == "perfect":
            return Expected(self.answer, self.answer)
        return self.predicted if lengths == "predicted" else None


@dataclass(frozen=True)
class Timed:
    """When a job comes, in seconds after the first; and how soon its client wants the answer."""

    job: Job
    at_s: float
    deadline_s: float


@dataclass(frozen=True)
class Served:
    """All requests by one arm. ``latencies_s`` are from arrival to end, in the order of arrival."""

    seconds: float
    latencies_s: list[float]
    deadlines_s: list[float]
    run_s: float
    preemptions: float

    @property
    def met(self) -> int:
        pairs = zip(self.latencies_s, self.deadlines_s, strict=True)
        return sum(latency <= deadline for latency, deadline in pairs)

    @property
    def goodput(self) -> float:
        return self.met / self.seconds

    @property
    def attainment(self) -> float:
        return self.met / len(self.latencies_s)


def likely_jobs(count: int, seed: str) -> list[Job]:
    """Drawn; predicted are the length's mean and 95th percentile, given what it correlates with."""
    source = random.Random(f"jobs/{seed}")
    mean, deviation = LIKENESS.output
    unknown = deviation * math.sqrt(1 - CORRELATION**2)
    jobs = []
    for _ in range(count):
        clue = source.gauss(0, 1)
        middle = mean + deviation * CORRELATION * clue
        answer = math.exp(middle + unknown * source.gauss(0, 1))
        tokens, high = math.exp(middle + unknown**2 / 2), math.exp(middle + _HIGH * unknown)
        jobs.append(
            _job(source.lognormvariate(*LIKENESS.prompt), answer, tokens, max(tokens, high))
        )
    return jobs


def _job(prompt: float, answer: float, tokens: float, high: float) -> Job:
    return Job(
        prompt=min(CONTEXT - MAX_TOKENS, max(1, int(prompt))),
        answer=min(MAX_TOKENS, max(2, int(answer))),
        predicted=Expected(min(MAX_TOKENS, tokens), min(MAX_TOKENS, high)),
    )


class RealJobs:
    """The tested fold of ``alpaca_sample``, as a predictor that was trained on others sees it."""

    def __init__(self, data: Path, kind: str) -> None:
        from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
        from loomserve.platform.lengths.training import samples, split
        from loomserve.platform.lengths.training.evaluation import FOLDS, trained_without

        model = catalog.resolve("demo", Path.cwd())
        assert isinstance(model, Path)
        embeddings = TokenEmbeddings(model)
        rows = samples.read(data / "alpaca_sample.jsonl.gz", embeddings.tokens)
        folds = [split.fold(g, FOLDS) for g in split.groups([row.query for row in rows])]
        predictor = trained_without(_TEST, kind, rows, folds, embeddings)
        self._jobs = []
        for row, fold in zip(rows, folds, strict=True):
            if fold == _TEST:
                asked = row.query
                query = LengthQuery(
                    asked.instruction, asked.user_input, asked.input_tokens, MAX_TOKENS
                )
                said = predictor.predict(query)
                self._jobs.append(_job(asked.input_tokens, row.tokens, said.tokens, said.high))

    def drawn(self, count: int, seed: str) -> list[Job]:
        """With replacement beyond the fold's size."""
        source = random.Random(f"jobs/{seed}")
        if count <= len(self._jobs):
            return source.sample(self._jobs, count)
        return source.choices(self._jobs, k=count)


def timed(
    jobs: Sequence[Job], trace: Path | None, rate: float, longest_s: float, seed: str
) -> list[Timed]:
    """Jobs at a trace's arrival times, with deadlines drawn as in UELLM."""
    source = random.Random(f"deadlines/{seed}")
    arrivals = (
        azure(trace) if trace else azure_like("conversation", requests=len(jobs) * 2, seed=seed)
    )
    comes = window(arrivals, requests=len(jobs), rate=rate, seed=seed)
    shortest, longest = PAPER_DEADLINES_S
    return [
        Timed(job, one.at_s, source.uniform(shortest, longest) / longest * longest_s)
        for job, one in zip(jobs, comes, strict=True)
    ]


class Engine:
    """A real engine within this process, with our scheduler, whose queue may be changed."""

    def __init__(self, places: int, blocks: int) -> None:
        # Options change between runs, and vLLM binds only workers of their own to a core.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        core = max(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        self._llm = offline_engine(
            str(catalog.resolve("demo", Path.cwd())),
            None,
            core,
            max_model_len=CONTEXT,
            max_num_seqs=places,
            max_num_batched_tokens=STEP_TOKENS,
            # One is vLLM's placeholder.
            num_gpu_blocks_override=blocks + 1,
            enable_prefix_caching=False,
            disable_log_stats=False,
            # Blocks are given, and other processes may hold most of the memory.
            gpu_memory_utilization=0.3,
            scheduler_cls="loomserve.platform.engine.scheduler.make_scheduler",
        )
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._names = 0

    def serve(self, coming: Sequence[Timed], queue: str, lengths: str, seed: str) -> Served:
        """All requests to their end; tokens by ``seed``."""
        from loomserve.platform.scheduling.options import SchedulerOptions

        self._scheduler.use(SchedulerOptions(queue=queue))
        source = random.Random(seed)
        before = self._preemptions()
        waiting = deque(coming)
        open_: dict[str, tuple[Timed, list[float]]] = {}
        latencies: dict[int, float] = {}
        run_s: list[float] = []
        begin, wall = time.monotonic(), time.time()
        while waiting or open_:
            while waiting and waiting[0].at_s <= time.monotonic() - begin:
                one = waiting.popleft()
                open_[self._send(one, begin, wall, lengths, source)] = one, []
            if not open_:
                time.sleep(max(0.0, waiting[0].at_s - (time.monotonic() - begin)))
                continue
            for output in self._engine.step():
                one, tokens_at = open_[output.request_id]
                now = time.monotonic() - begin
                tokens_at += [now] * len(output.outputs[0].token_ids)
                if output.finished or len(tokens_at) >= one.job.answer:
                    if not output.finished:
                        self._engine.abort_request([output.request_id])
                    del open_[output.request_id]
                    latencies[id(one)] = now - one.at_s
                    run_s.append(now - tokens_at[0])
        return Served(
            seconds=time.monotonic() - begin - coming[0].at_s,
            latencies_s=[latencies[id(one)] for one in coming],
            deadlines_s=[one.deadline_s for one in coming],
            run_s=statistics.fmean(run_s),
            preemptions=self._preemptions() - before,
        )

    def _send(
        self, one: Timed, begin: float, wall: float, lengths: str, source: random.Random
    ) -> str:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self._names += 1
        extra: dict[str, Any] = {DEADLINE: begin + one.at_s + one.deadline_s}
        if (known := one.job.known(lengths)) is not None:
            extra[EXPECTED] = [known.tokens, known.high]
        self._engine.add_request(
            str(self._names),
            TokensPrompt(
                prompt_token_ids=[source.randrange(*_VOCABULARY) for _ in range(one.job.prompt)]
            ),
            SamplingParams(
                temperature=0,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args=extra,
            ),
            arrival_time=wall + one.at_s,
        )
        return str(self._names)

    def _preemptions(self) -> float:
        metrics = {metric.name: metric for metric in self._llm.get_metrics()}
        return float(metrics["vllm:num_preemptions"].value)


Run = Mapping[tuple[str, str], Served]


def named(arm: tuple[str, str]) -> str:
    queue, lengths = arm
    return queue if queue in ("fcfs", "fair") else f"{queue}_{lengths}"


def ratios(runs: Sequence[Run]) -> dict[str, Any]:
    """Each arm's goodput over that of first come, first served; predicted over perfect.

    Raises:
        ValueError: an arm that others are compared with met no deadline at all.
    """
    bases = {("fcfs", "none"), ("sjf", "perfect"), ("deadline", "perfect")}
    if not all(run[base].met for run in runs for base in bases):
        raise ValueError("no deadline was met: lower --load, or raise --longest")

    def spread(arm: tuple[str, str], base: tuple[str, str]) -> dict[str, float]:
        return asdict(Spread.of([run[arm].goodput / run[base].goodput for run in runs]))

    return {
        "goodput_vs_fcfs": {
            named(arm): spread(arm, ("fcfs", "none")) for arm in ARMS if arm[0] != "fcfs"
        },
        "share_of_oracle": {
            queue: spread((queue, "predicted"), (queue, "perfect")) for queue in ("sjf", "deadline")
        },
    }


def absolute(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Each arm's own figures, medians over the runs."""
    return {
        named(arm): {
            "goodput": statistics.median(run[arm].goodput for run in runs),
            "attainment": statistics.median(run[arm].attainment for run in runs),
            "mean_latency_s": statistics.median(
                statistics.fmean(run[arm].latencies_s) for run in runs
            ),
            "preemptions": statistics.median(run[arm].preemptions for run in runs),
            "requests": len(runs[0][arm].latencies_s),
            "goodput_by_run": [run[arm].goodput for run in runs],
        }
        for arm in ARMS
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    # Before anything is imported that reads it.
    os.environ["OMP_NUM_THREADS"] = "1"
    real = RealJobs(options.data, options.predictor) if options.data else None

    def jobs(seed: str) -> list[Job]:
        return (real.drawn if real else likely_jobs)(options.requests, seed)

    engine = Engine(options.places, options.blocks)
    at_once = [Timed(job, 0.0, math.inf) for job in jobs("warm-up")]
    # Twice: the first round also warms up.
    for _ in range(2):
        full = engine.serve(at_once, "fcfs", "none", "warm-up")
    rate = options.load * len(at_once) / full.seconds
    longest_s = options.longest * full.run_s
    runs: list[Run] = []
    errors: list[float] = []
    for number in range(options.runs):
        coming = timed(jobs(str(number)), options.trace, rate, longest_s, str(number))
        errors += [abs(one.job.predicted.tokens - one.job.answer) for one in coming]
        first = number % len(ARMS)
        turn = (*ARMS[first:], *ARMS[:first])
        runs.append({arm: engine.serve(coming, *arm, str(number)) for arm in turn})
        print(f"run {number + 1} of {options.runs} is done", flush=True)
    return {
        **ratios(runs),
        "runs": options.runs,
        "arms": absolute(runs),
        "rate": rate,
        "longest_deadline_s": longest_s,
        "predicted_mae": statistics.fmean(errors),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slo", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--requests", type=int, default=160, help="of each run")
    parser.add_argument("--load", type=float, default=1.6, help="share of the engine's capacity")
    parser.add_argument("--longest", type=float, default=6.0, help="deadline, in mean run times")
    parser.add_argument("--places", type=int, default=16, help="requests that run at once")
    parser.add_argument(
        "--blocks", type=int, default=8192 // BLOCK_TOKENS, help="of KV memory, 32 tokens each"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--trace", type=Path, help="an Azure LLM trace of 2023, gzipped CSV")
    parser.add_argument("--data", type=Path, help="folder with alpaca_sample.jsonl.gz")
    parser.add_argument("--predictor", choices=("magnus", "uellm"), default="uellm")
    options = parser.parse_args()
    facts = machine()
    figures = measure(options)
    setup = {
        **{name: getattr(options, name) for name in ("requests", "load", "longest", "places")},
        "blocks": options.blocks,
        "block_tokens": BLOCK_TOKENS,
        "max_tokens": MAX_TOKENS,
        "arrivals": "trace" if options.trace else "in the trace's likeness",
        "lengths": options.predictor if options.data else "in the data's likeness",
        "scaled_down": "UELLM's deadlines of 1 to 350 s by one factor; a model of 6 billion "
        "parameters to one of 135 million",
    }
    publish("slo", figures, setup=setup, facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
