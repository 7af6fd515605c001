"""What do swapping or recomputing by cost, and fair queues, gain where memory is short?

How, and what was found: ``benchmarks/adaptive.md``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.adaptive_engine import (
    BLOCKS,
    CONTEXT,
    STEP_TOKENS,
    EngineProcess,
    Length,
    Served,
    Setting,
)
from benchmarks.engine import BLOCK_BYTES, BLOCK_TOKENS
from benchmarks.harness import parser_of, rotated, run, spread
from benchmarks.workload import Likeness
from loomserve.kvstore.server.client import StoreClient
from loomserve.kvstore.server.opening import open_store
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.protocol import Done, Flush
from loomserve.kvstore.server.server import StoreServer
from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
from loomserve.platform.lengths.predict.prediction import LengthQuery
from loomserve.platform.lengths.predict.predictor import KINDS, TrainedPredictor
from loomserve.platform.lengths.training import samples
from loomserve.platform.lengths.training.samples import Sample
from loomserve.platform.models import catalog
from loomserve.platform.scheduling.policy.hints import Expected

ADAPTIVE = {"preemption": "adaptive", "queue": "fair"}
SWITCHES = (
    "deadlines", "overlap_swap", "prefetch_swap_in", "chunked_recompute", "peak_admission",
)  # fmt: skip
STOCK = {"recompute": False, "recompute_all_memory": True}
"""Arms of stock vLLM, and whether the memory of the others' store is its KV memory."""
ARMS: Mapping[str, Mapping[str, Any] | None] = {
    **dict.fromkeys(STOCK),
    "swap": {
        "preemption": "swap",
        "queue": "fcfs",
        "overlap_swap": False,
        "prefetch_swap_in": False,
    },
    "adaptive": ADAPTIVE,
    "adaptive_fcfs": {"preemption": "adaptive", "queue": "fcfs"},
    **{f"without_{switch}": {**ADAPTIVE, switch: False} for switch in SWITCHES},
    "without_predictions": ADAPTIVE,
}
"""What the scheduler is told; nothing for stock vLLM. Schedulers that swap have a store beside the
KV memory, so there are two arms of stock vLLM, one with as much KV memory as they have, as in
AdaptiveLLM, and one with as much memory in all."""
USUAL_ARMS = (
    *STOCK, "swap", "adaptive", "adaptive_fcfs", "without_predictions", "without_peak_admission",
)  # fmt: skip
"""Order, predictions and admission apart, beside what they are together."""
LONG_SCALE = 26
"""Documents are so many times as long as what is made of them: 340 tokens on average."""
SETS: Mapping[str, tuple[str, Likeness]] = {
    "short": ("alpaca_sample", Likeness(0.0, (2.64, 0.61), (3.74, 0.76))),
    "chat": ("alpaca_long_answers", Likeness(0.0, (2.64, 0.72), (4.62, 0.82))),
    "long": ("leval_long_docs", Likeness(0.0, (5.37, 0.96), (3.87, 0.71))),
}
"""Files, and log-normal lengths fitted to them."""
LONG_FEWER = 3
"""So many times fewer documents than short requests: their prompts take the most time."""
COMPARED = {
    "throughput": "tokens_per_second",
    "turnaround": "turnaround_s",
    "weighted_turnaround": "weighted_turnaround",
}
"""Ratios, and of which figure they are."""
_LEAST_STORE_BYTES = 2**25


# Memory


def kv_bytes(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_BYTES


def store_bytes(swap_tokens: int) -> int:
    """Of the store behind schedulers that swap.

    Half of it is swap space, as in the platform unless it is told otherwise, and no less of it than
    a store can be.
    """
    return max(2 * kv_bytes(swap_tokens), _LEAST_STORE_BYTES)


def blocks_of(arm: str, swap_tokens: int) -> int:
    """KV memory of the arm's engine."""
    return BLOCKS + (store_bytes(swap_tokens) // BLOCK_BYTES if STOCK.get(arm) else 0)


def memory_bytes(arm: str, swap_tokens: int) -> int:
    """Of an arm in all: its KV memory, and the store if it has one."""
    store = 0 if arm in STOCK else store_bytes(swap_tokens)
    return blocks_of(arm, swap_tokens) * BLOCK_BYTES + store


# Lengths


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
    predictor: TrainedPredictor | None

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
) -> list[TrainedPredictor | None]:
    """Of each sample, one that knows only the others' folds."""
    # scikit-learn takes seconds to import, which generated lengths need not spend.
    from loomserve.platform.lengths.training.evaluation import trained_without

    folds = samples.folds_of(found)
    trained = [
        trained_without(fold, kind, found, folds, embeddings) for fold in range(samples.FOLDS)
    ]
    return [trained[fold] for fold in folds]


# Engines


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
        self._vllm = EngineProcess(None, places, swap_bytes)
        stack.callback(self._vllm.close)
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
        rate: float | None,
        seed: str,
    ) -> Served:
        options = ARMS[arm]
        engine = self._vllm if options is None else self.ours
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
        served: Served = engine.call("serve", cut, setting, rate, options, seed)
        return served


# Figures

Runs = Sequence[Mapping[str, Served]]
"""By arm."""


def compared(runs: Runs) -> dict[str, list[float]]:
    """The adaptive arm over each other one, run by run; nothing without it."""
    others = [name for name in runs[0] if name != "adaptive"] if "adaptive" in runs[0] else []
    by_run = [{arm: served.figures() for arm, served in one.items()} for one in runs]
    return {
        f"{ratio}_vs_{other}": [one["adaptive"][name] / one[other][name] for one in by_run]
        for other in others
        for ratio, name in COMPARED.items()
    }


def point(setting: Setting, runs: Runs) -> dict[str, Any]:
    """A setting's own figures: each arm's, and the ratios with their spread."""
    by_run = [{arm: served.figures() for arm, served in one.items()} for one in runs]
    return {
        **asdict(setting),
        "arms": {
            arm: {name: statistics.median(one[arm][name] for one in by_run) for name in of}
            for arm, of in by_run[0].items()
        },
        "by_run": by_run,
        **{name: spread(values) for name, values in compared(runs).items()},
    }


def by_set(measured: Mapping[Setting, Runs]) -> dict[str, Any]:
    """Of each set: geometric means over its settings, a run; their spread over the runs."""
    found: dict[str, Any] = {}
    for lengths in dict.fromkeys(setting.lengths for setting in measured):
        ratios = [compared(of) for setting, of in measured.items() if setting.lengths == lengths]
        for name in ratios[0]:
            of_runs = zip(*(one[name] for one in ratios), strict=True)
            found[f"{name}_{lengths}"] = spread(map(statistics.geometric_mean, of_runs))
    return found


def exactness(measured: Mapping[Setting, Runs]) -> dict[str, Any]:
    """How many answers of each arm are not those of the first one, of how many."""
    runs = [one for of_setting in measured.values() for one in of_setting]
    first = next(iter(runs[0]))
    return {
        "compared_answers": sum(len(one[first].answers) for one in runs),
        "different_answers": {
            arm: sum(one[arm].differs_from(one[first]) for one in runs) for arm in runs[0]
        },
    }


def decision_share(measured: Mapping[Setting, Runs]) -> float | None:
    """What decisions take of the adaptive arm's time."""
    ours = [one["adaptive"] for of in measured.values() for one in of if "adaptive" in one]
    if not ours:
        return None
    return sum(one.counts["decision_s"] for one in ours) / sum(one.seconds for one in ours)


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    sets = {
        name: Lengths(name, options.data, options.predictor, options.prediction_error)
        for name in options.sets
    }
    settings = [
        Setting(*chosen)
        for chosen in itertools.product(options.sets, options.max_output, options.batch_limit)
    ]

    def lengths(setting: Setting, seed: str) -> list[Length]:
        count = options.requests // (LONG_FEWER if setting.lengths == "long" else 1)
        return sets[setting.lengths].drawn(count, setting.max_output, seed)

    found: dict[Setting, list[Mapping[str, Served]]] = {setting: [] for setting in settings}
    with ExitStack() as stack:
        arms = Arms(options.arms, folder, max(options.batch_limit), options.swap_tokens, stack)
        for arm in options.arms:
            # Predictors learn, and caches fill.
            few = lengths(settings[0], "warm-up")[:12]
            arms.serve(arm, few, settings[0], None, "warm-up")
        for setting, number in itertools.product(settings, range(options.runs)):
            drawn = lengths(setting, str(number))
            served = {
                arm: arms.serve(arm, drawn, setting, options.rate, f"{number}/{setting}")
                for arm in rotated(options.arms, number)
            }
            found[setting].append({arm: served[arm] for arm in options.arms})
            print(f"run {number + 1}/{options.runs}: {setting}", flush=True)
        figures = arms.ours.call("figures")
    return {
        **by_set(found),
        **exactness(found),
        "step_mape": figures.get("step_time_error"),
        "swap_mape": figures.get("swap_time_error"),
        "decision_overhead_share": decision_share(found),
        "runs": options.runs,
        "points": [point(setting, of) for setting, of in found.items()],
    }


def main() -> int:
    parser = parser_of("adaptive", __doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(USUAL_ARMS))
    parser.add_argument(
        "--requests", type=int, default=60, help="of a set, and of long ones a third"
    )
    parser.add_argument("--max-output", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--batch-limit", type=int, nargs="+", default=[64])
    parser.add_argument("--swap-tokens", type=int, default=1024, help="of swap space")
    parser.add_argument("--rate", type=float, help="requests a second; else all come at once")
    predicted = parser.add_mutually_exclusive_group()
    predicted.add_argument("--predictor", choices=KINDS, help="of lengths; else none is predicted")
    predicted.add_argument(
        "--prediction-error", type=float, help="of logarithms of lengths; 0.5 without --predictor"
    )
    predicted.add_argument("--no-predictions", action="store_true")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--data", type=Path, help="folder with the sets' lengths")
    options = parser.parse_args()
    if options.predictor and options.data is None:
        parser.error("--predictor needs --data: a predictor is trained on texts")
    if not options.predictor and not options.no_predictions and options.prediction_error is None:
        options.prediction_error = 0.5
    if options.no_predictions:
        # It would be adaptive once more.
        options.arms = [arm for arm in options.arms if arm != "without_predictions"]
    return run(
        "adaptive",
        options,
        measured,
        without=("data", "no_predictions"),
        lengths="data" if options.data else "in the data's likeness",
        kv_blocks={arm: blocks_of(arm, options.swap_tokens) for arm in options.arms},
        memory_bytes={arm: memory_bytes(arm, options.swap_tokens) for arm in options.arms},
        block_tokens=BLOCK_TOKENS,
        step_tokens=STEP_TOKENS,
    )


if __name__ == "__main__":
    sys.exit(main())
