"""What do swapping or recomputing by cost, and fair queues, gain where memory is short?

AdaptiveLLM's setting (section 4), scaled to a small machine: the paper's 2,048 tokens of KV memory
and 1,024 of swap space, all requests sent at once, answers of at most 64 to 256 tokens, and three
sets of lengths. Arms, with the same engine flags, serve the same lengths one after the other on one
core: stock vLLM, which recomputes what it preempts, and once more with the memory of the others'
swap space as KV memory; "swap", which always swaps, first come, first served, and starts only what
swap space can take (the paper's vLLM_s); and "adaptive", which chooses by predicted costs and
serves by fairness. Its parts stand apart: adaptive first come, first served, without predictions,
and without one of its switches (:mod:`benchmarks.adaptive_arms`).

Every arm answers the same prompts, and its answers are compared with the first arm's. A request
asks for the maximum, and its answer ends by itself after its reference answer's length, as nobody
can know before. Its weighted turnaround is (finish - send) / (finish - first scheduled),
AdaptiveLLM's equation 5. Ratios are of adaptive over another arm of the same run; a set's headline
figure is the geometric mean over its settings. ``computed_ratio`` is what an arm computed over what
it would without preemption, in tokens: what is above 1 was computed again. ``--deadline-s`` lets
every second request ask for its answer within so many seconds. ``--predictor KIND`` tells the
schedulers of all arms but "without_predictions" how long each answer is expected to be, by a
predictor that was trained on the other requests of its set (no near-duplicates of it among them);
``--prediction-error`` by its real length, each off by a log-normal factor, of 0.5 unless there is a
predictor; ``--no-predictions`` tells none.

Beside that stand the two cost curves, and from which bandwidth on swapping a request is cheaper
than computing it again. ``--links`` makes each copy last as long as a link of so many MB/s would
take, and shows what each arm then does.

``--data FOLDER`` takes lengths from ``alpaca_sample``, ``alpaca_long_answers`` and
``leval_long_docs`` (gzipped JSON lines with ``in_tokens`` and ``out_tokens``) there; else they are
drawn in their likeness. The last line of the output is one JSON object, also written to
``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.adaptive_arms import (
    ARMS,
    USUAL_ARMS,
    blocks_of,
    kv_bytes,
    memory_bytes,
    store_bytes,
)
from benchmarks.adaptive_engine import (
    CONTEXT,
    STEP_TOKENS,
    EngineProcess,
    Length,
    Load,
    Served,
    Setting,
)
from benchmarks.engine import BLOCK_TOKENS
from benchmarks.report import Spread
from benchmarks.result_files import machine, publish
from benchmarks.workload import Likeness
from loomserve.kvstore.server.client import StoreClient
from loomserve.kvstore.server.opening import open_store
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.protocol import Done, Flush
from loomserve.kvstore.server.server import StoreServer
from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
from loomserve.platform.lengths.predict.prediction import LengthQuery, Predictor
from loomserve.platform.lengths.predict.predictor import KINDS
from loomserve.platform.lengths.training import samples, split
from loomserve.platform.lengths.training.samples import Sample
from loomserve.platform.models import catalog
from loomserve.platform.scheduling.policy.expected import Expected

LONG_SCALE = 26
"""Documents are so many times as long as what is made of them: 340 tokens on average."""
SETS: Mapping[str, tuple[str, Likeness]] = {
    "short": ("alpaca_sample", Likeness(0.0, (2.64, 0.61), (3.74, 0.76))),
    "chat": ("alpaca_long_answers", Likeness(0.0, (2.64, 0.72), (4.62, 0.82))),
    "long": ("leval_long_docs", Likeness(0.0, (5.37, 0.96), (3.87, 0.71))),
}
"""Files, and log-normal lengths fitted to them."""
CURVE_TOKENS = (32, 64, 128, 256, 512, 1024)
LONG_FEWER = 3
"""So many times fewer documents than short requests: their prompts take the most time."""
SETUP = (
    "sets", "arms", "requests", "max_output", "batch_limit", "swap_tokens", "rate", "deadline_s",
    "predictor", "prediction_error", "runs", "links",
)  # fmt: skip
SCALED_DOWN = (
    "1,000 requests a set to --requests (a third of that in the long set); a model of 13 to 32.5 "
    "billion parameters to one of 135 million; documents to the paper's mean of 340 tokens"
)


class Lengths:
    """A set's lengths: of its rows in the data, or in their likeness.

    ``prediction_error`` is the deviation of the logarithm of the lengths that are predicted.
    """

    def __init__(
        self, of_set: str, data: Path | None, predictor: str | None, prediction_error: float | None
    ) -> None:
        self._set = of_set
        self._error = prediction_error
        self._rows = None if data is None else _rows(of_set, data, predictor)

    def drawn(self, count: int, max_output: int, seed: str) -> list[Length]:
        """So many, in random order; a prompt and its longest answer fit the engine.

        Predicted are answers of at most so many tokens. Rows repeat where the data has fewer.
        """
        source = random.Random(f"{self._set}/{seed}")
        if self._rows is None:
            lengths = [self._like(source) for _ in range(count)]
        else:
            times = [math.ceil(count / len(self._rows))] * len(self._rows)
            drawn = source.sample(self._rows, count, counts=times)
            lengths = [row.length(max_output) for row in drawn]
        if self._error is None:
            return lengths
        return [self._guessed(length, self._error, source) for length in lengths]

    def _like(self, source: random.Random) -> Length:
        _, likeness = SETS[self._set]
        prompt = source.lognormvariate(*likeness.prompt)
        return _fitting(int(prompt), int(source.lognormvariate(*likeness.output)))

    def _guessed(self, length: Length, error: float, source: random.Random) -> Length:
        tokens = length.answer * source.lognormvariate(0, error)
        return replace(length, predicted=Expected(tokens, tokens * math.exp(error)))


def _fitting(prompt: int, answer: int, predicted: Expected | None = None) -> Length:
    longest = CONTEXT // 2
    return Length(min(longest, max(1, prompt)), min(longest, max(1, answer)), predicted)


@dataclass(frozen=True)
class _Row:
    """Of the data, and the predictor that has not seen it."""

    prompt: int
    answer: int
    query: LengthQuery
    predictor: Predictor | None

    def length(self, max_output: int) -> Length:
        if self.predictor is None:
            return _fitting(self.prompt, self.answer)
        said = self.predictor.predict(replace(self.query, max_tokens=max_output))
        return _fitting(self.prompt, self.answer, Expected(said.tokens, said.high))


def _rows(of_set: str, data: Path, kind: str | None) -> list[_Row]:
    model = catalog.resolve("demo", Path.cwd())
    assert isinstance(model, Path)
    embeddings = TokenEmbeddings(model)
    found = samples.read(data / f"{SETS[of_set][0]}.jsonl.gz", embeddings.tokens)
    scale = LONG_SCALE if of_set == "long" else 1
    predictors = [None] * len(found) if kind is None else _predictors(found, kind, embeddings)
    return [
        _Row(one.query.input_tokens // scale, one.tokens, one.query, predictor)
        for one, predictor in zip(found, predictors, strict=True)
    ]


def _predictors(
    found: Sequence[Sample], kind: str, embeddings: TokenEmbeddings
) -> list[Predictor | None]:
    """Of each sample, one that knows only the others' folds."""
    # scikit-learn takes seconds to import, which generated lengths need not spend.
    from loomserve.platform.lengths.training.evaluation import FOLDS, trained_without

    folds = [split.fold(group, FOLDS) for group in split.groups([one.query for one in found])]
    trained = [trained_without(fold, kind, found, folds, embeddings) for fold in range(FOLDS)]
    return [trained[fold] for fold in folds]


class Arms:
    """The engines, vLLM's own and ours, and the store behind ours."""

    def __init__(
        self,
        names: Collection[str],
        folder: Path,
        places: int,
        swap_tokens: int,
        stack: ExitStack,
    ) -> None:
        swap_bytes = kv_bytes(swap_tokens)
        store_options = StoreOptions(
            folder=folder,
            arena=Path(f"/dev/shm/loomserve-kv-adaptive-{os.getpid()}"),
            memory=store_bytes(swap_tokens),
            ssd_folder=None,
            ssd=0,
            eviction="cost",
            quotas={},
        )
        self._address = store_options.address
        # Where modules are loaded that read it, before an engine is.
        os.environ["OMP_NUM_THREADS"] = "1"
        server = StoreServer(open_store(store_options), store_options.address)
        stack.callback(store_options.arena.unlink, missing_ok=True)
        server.start()
        stack.callback(server.stop)
        self.vllm = EngineProcess(None, places, swap_bytes)
        stack.callback(self.vllm.close)
        self._more: EngineProcess | None = None
        if "recompute_all_memory" in names:
            blocks = blocks_of("recompute_all_memory", swap_tokens)
            self._more = EngineProcess(None, places, swap_bytes, blocks)
            stack.callback(self._more.close)
        self.ours = EngineProcess(store_options.kv_transfer_config("demo"), places, swap_bytes)
        stack.callback(self.ours.close)

    def serve(
        self,
        arm: str,
        lengths: Sequence[Length],
        setting: Setting,
        load: Load,
        seed: str,
    ) -> Served:
        options = ARMS[arm]
        engine = self.vllm if options is None else self.ours
        if arm == "recompute_all_memory":
            assert self._more is not None
            engine = self._more
        told = arm != "without_predictions"
        cut = [
            replace(
                length,
                answer=min(length.answer, setting.max_output),
                predicted=length.predicted if told else None,
            )
            for length in lengths
        ]
        # Arms that share the store must not find each other's blocks.
        with closing(StoreClient(self._address, timeout_ms=5000)) as store:
            store.ask(Flush(""), Done)
        served: Served = engine.call("serve", cut, setting, load, options, seed)
        return served


def baselines(arms: Collection[str]) -> list[str]:
    """What adaptive is compared with, if it is one of the arms."""
    return [name for name in arms if name != "adaptive"] if "adaptive" in arms else []


def compared(runs: Sequence[Mapping[str, Served]], baseline: str) -> dict[str, list[float]]:
    """The adaptive arm against a baseline, run by run."""
    pairs = [(run["adaptive"], run[baseline]) for run in runs]
    return {
        f"throughput_vs_{baseline}": [ours.throughput / base.throughput for ours, base in pairs],
        f"turnaround_vs_{baseline}": [
            ours.turnaround_s / base.turnaround_s for ours, base in pairs
        ],
        f"weighted_turnaround_vs_{baseline}": [
            ours.weighted_turnaround / base.weighted_turnaround for ours, base in pairs
        ],
    }


def point(setting: Setting, runs: Sequence[Mapping[str, Served]]) -> dict[str, Any]:
    """A setting's own figures: each arm's, and the ratios with their spread."""
    arms = {
        arm: {
            "tokens_per_second": statistics.median(run[arm].throughput for run in runs),
            "turnaround_s": statistics.median(run[arm].turnaround_s for run in runs),
            "weighted_turnaround": statistics.median(run[arm].weighted_turnaround for run in runs),
            "late": statistics.median(run[arm].late for run in runs),
            "computed_ratio": statistics.median(run[arm].computed_ratio for run in runs),
            **{
                name: statistics.median(run[arm].counts[name] for run in runs)
                for name in runs[0][arm].counts
            },
        }
        for arm in runs[0]
    }
    ratios = {
        name: asdict(Spread.of(values))
        for baseline in baselines(arms)
        for name, values in compared(runs, baseline).items()
    }
    by_run = [{arm: served.figures() for arm, served in run.items()} for run in runs]
    return {**asdict(setting), "arms": arms, "by_run": by_run, **ratios}


def headline(measured: Mapping[Setting, Sequence[Mapping[str, Served]]]) -> dict[str, Any]:
    """Of each set: geometric means over its settings, a run; their spread over the runs."""
    found: dict[str, Any] = {}
    for lengths in dict.fromkeys(setting.lengths for setting in measured):
        of_set = [runs for setting, runs in measured.items() if setting.lengths == lengths]
        for baseline in baselines(of_set[0][0]):
            ratios = [compared(runs, baseline) for runs in of_set]
            for name in ratios[0]:
                by_run = zip(*(one[name] for one in ratios), strict=True)
                found[f"{name}_{lengths}"] = asdict(
                    Spread.of([statistics.geometric_mean(run) for run in by_run])
                )
    return found


def exactness(measured: Mapping[Setting, Sequence[Mapping[str, Served]]]) -> dict[str, Any]:
    """How many answers of each arm are not those of the first one, of how many."""
    runs = [run for of_setting in measured.values() for run in of_setting]
    first = next(iter(runs[0]))
    return {
        "compared_answers": sum(len(run[first].answers) for run in runs),
        "different_answers": {
            arm: sum(run[arm].differs_from(run[first]) for run in runs) for arm in runs[0]
        },
    }


def curves(arms: Arms) -> list[dict[str, float]]:
    """Seconds to compute a request again and to swap it, by its tokens.

    ``crossover_mbps``: a link that is slower makes computing the cheaper way.
    """
    found = []
    for tokens in CURVE_TOKENS:
        measured = arms.vllm.call("prefill_s", tokens)
        recompute_s, swap_s = arms.ours.call("predicted_s", tokens)
        found.append(
            {
                "tokens": tokens,
                "recompute_s": measured,
                "recompute_predicted_s": recompute_s,
                "swap_predicted_s": swap_s,
                "crossover_mbps": 2 * kv_bytes(tokens) / measured / 1e6,
            }
        )
    return found


def crossover(
    arms: Arms,
    names: Sequence[str],
    lengths: Sequence[Length],
    setting: Setting,
    links: Sequence[float],
) -> list[dict[str, Any]]:
    """One run of each arm through each link; None stands for none."""
    found = []
    for mbps in (None, *links):
        arms.ours.call("reach_store_at", mbps and mbps * 1e6)
        run = {arm: arms.serve(arm, lengths, setting, Load(), f"link/{mbps}") for arm in names}
        found.append({"link_mbps": mbps, **point(setting, [run])})
    arms.ours.call("reach_store_at", None)
    return found


def measure(options: argparse.Namespace, sets: Mapping[str, Lengths], arms: Arms) -> dict[str, Any]:
    settings = [
        Setting(*chosen)
        for chosen in itertools.product(options.sets, options.max_output, options.batch_limit)
    ]

    def lengths(setting: Setting, seed: str) -> list[Length]:
        count = options.requests // (LONG_FEWER if setting.lengths == "long" else 1)
        return sets[setting.lengths].drawn(count, setting.max_output, seed)

    for arm in options.arms:
        # Predictors learn, and caches fill.
        arms.serve(arm, lengths(settings[0], "warm-up")[:12], settings[0], Load(), "warm-up")
    load = Load(options.rate, options.deadline_s)
    measured: dict[Setting, list[dict[str, Served]]] = {}
    points = []
    for setting in settings:
        measured[setting] = []
        for run in range(options.runs):
            first = run % len(options.arms)
            turn = [*options.arms[first:], *options.arms[:first]]
            drawn_lengths = lengths(setting, str(run))
            seed = f"{run}/{setting}"
            served = {arm: arms.serve(arm, drawn_lengths, setting, load, seed) for arm in turn}
            measured[setting].append({arm: served[arm] for arm in options.arms})
        points.append(point(setting, measured[setting]))
        print(json.dumps(points[-1]), flush=True)
    ours = [
        served
        for runs in measured.values()
        for run in runs
        for arm, served in run.items()
        if arm == "adaptive"
    ]
    figures = arms.ours.call("figures")
    return {
        **headline(measured),
        **exactness(measured),
        "step_mape": figures.get("step_time_error"),
        "swap_mape": figures.get("swap_time_error"),
        "decision_overhead_share": sum(one.counts["decision_s"] for one in ours)
        / sum(one.seconds for one in ours)
        if ours
        else None,
        "runs": options.runs,
        "points": points,
        "curves": curves(arms),
        "crossover": crossover(
            arms, options.arms, lengths(settings[0], "link"), settings[0], options.links
        )
        if options.links
        else [],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.adaptive", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(USUAL_ARMS))
    parser.add_argument(
        "--requests", type=int, default=60, help="of a set, and of long ones a third"
    )
    parser.add_argument("--max-output", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--batch-limit", type=int, nargs="+", default=[64])
    parser.add_argument("--swap-tokens", type=int, default=1024, help="of swap space")
    parser.add_argument("--rate", type=float, help="requests a second; else all come at once")
    parser.add_argument("--deadline-s", type=float, help="of every second request; else none")
    predicted = parser.add_mutually_exclusive_group()
    predicted.add_argument("--predictor", choices=KINDS, help="of lengths; else none is predicted")
    predicted.add_argument(
        "--prediction-error", type=float, help="of logarithms of lengths; 0.5 without --predictor"
    )
    predicted.add_argument("--no-predictions", action="store_true")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--links", type=float, nargs="*", default=[], help="MB/s")
    parser.add_argument("--data", type=Path, help="folder with the sets' lengths")
    options = parser.parse_args()
    if options.predictor and options.data is None:
        parser.error("--predictor needs --data: a predictor is trained on texts")
    if not options.predictor and not options.no_predictions and options.prediction_error is None:
        options.prediction_error = 0.5
    if options.no_predictions:
        # It would be adaptive once more.
        options.arms = [arm for arm in options.arms if arm != "without_predictions"]
    sets = {
        name: Lengths(name, options.data, options.predictor, options.prediction_error)
        for name in options.sets
    }
    facts = machine()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        places = max(options.batch_limit)
        arms = Arms(options.arms, folder, places, options.swap_tokens, stack)
        figures = measure(options, sets, arms)
    setup = {
        **{name: getattr(options, name) for name in SETUP},
        "lengths": "data" if options.data else "in the data's likeness",
        "kv_blocks": {arm: blocks_of(arm, options.swap_tokens) for arm in options.arms},
        "memory_bytes": {arm: memory_bytes(arm, options.swap_tokens) for arm in options.arms},
        "block_tokens": BLOCK_TOKENS,
        "step_tokens": STEP_TOKENS,
        "scaled_down": SCALED_DOWN,
    }
    publish("adaptive", figures, setup=setup, facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
