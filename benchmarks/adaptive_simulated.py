"""What would queues gain that know how long each answer is going to be, or that need not know?

A simulation. The requests and the memory of :mod:`benchmarks.adaptive`, in the simulator of the
engine's own policies (:mod:`loomserve.platform.scheduling.simulator`), whose decisions and copies
cost nothing: no predictor can do better than the arms that are told each answer's length. Stock
vLLM is the baseline: first come, first served, computing again what it preempts. A step takes so
many milliseconds, and so many more for each token in it (``--costs``).

``feedback`` needs no lengths: whoever has had the least goes first (a multi-level feedback queue,
as in FastServe: Wu et al., 2023). ``feedback_at_once`` starts whoever fits just now, so that
whoever has had more makes way for who comes. ``fair_predicted``, with ``--predictor KIND``, is told
what a predictor that was trained on the set's other requests expects, as in the engine.

``--data FOLDER`` takes lengths from there, as :mod:`benchmarks.adaptive` does. The last line of the
output is one JSON object, also written to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from benchmarks.adaptive import SETS, Lengths
from benchmarks.adaptive_arms import BLOCKS, kv_bytes
from benchmarks.adaptive_engine import STEP_TOKENS, Length
from benchmarks.engine import BLOCK_BYTES, BLOCK_TOKENS
from benchmarks.result_files import machine, publish, said_by
from loomserve.platform.lengths.predict.predictor import KINDS
from loomserve.platform.scheduling.policy.expected import Expected
from loomserve.platform.scheduling.policy.queue import QueuedRequest
from loomserve.platform.scheduling.simulator import (
    Costs,
    Limits,
    Policies,
    ScheduledStep,
    SimulatedRequest,
    simulate,
)


@dataclass(frozen=True)
class SimulatedArm:
    """
    Attributes:
        policies: of its engine.
        told: how long each answer is going to be, what a predictor expects, or neither.
    """

    policies: Policies
    told: Literal["length", "prediction", "nothing"] = "nothing"

    def expects(self, length: Length, answer: int) -> Expected | None:
        if self.told == "length":
            return Expected(answer, answer)
        return length.predicted if self.told == "prediction" else None


FIRST_LEVEL_TOKENS = 32
"""Of prompt and answer; each level has twice those of the one before."""


def feedback(request: QueuedRequest, now: float) -> float:
    """By level, and within one by arrival."""
    return -max(0.0, math.floor(math.log2(request.tokens / FIRST_LEVEL_TOKENS)) + 1)


STOCK = "recompute"
ARMS = {
    STOCK: SimulatedArm(Policies()),
    "adaptive_fcfs": SimulatedArm(Policies("fcfs", "adaptive")),
    "fair_known": SimulatedArm(Policies("fair", "adaptive"), "length"),
    "sjf_known": SimulatedArm(Policies("sjf", "adaptive"), "length"),
    "fair_predicted": SimulatedArm(Policies("fair", "adaptive"), "prediction"),
    "feedback": SimulatedArm(Policies(feedback, "adaptive")),
    "feedback_at_once": SimulatedArm(Policies(feedback, "adaptive", peak_admission=False)),
}


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of a step, and of each token in it."""

    step_ms: float
    token_ms: float

    @classmethod
    def parse(cls, text: str) -> StepCost:
        step, _, token = text.partition(":")
        return cls(float(step), float(token))

    def costs(self) -> Costs:
        def step_s(step: ScheduledStep) -> float:
            return self.recompute_s(sum(share.tokens for share in step.shares))

        return Costs(swap_s=lambda tokens: 0.0, recompute_s=self.recompute_s, step_s=step_s)

    def recompute_s(self, tokens: int) -> float:
        return (self.step_ms + self.token_ms * tokens) / 1000


@dataclass(frozen=True)
class Served:
    """Of an arm: until all have ended, and means over requests."""

    seconds: float
    turnaround_s: float
    weighted_turnaround: float


def serve(arm: SimulatedArm, lengths: Sequence[Length], most: int, cost: StepCost) -> Served:
    """All at once, with answers of at most so many tokens."""
    requests = [
        SimulatedRequest(
            name=str(number),
            arrived_s=0.0,
            prompt_tokens=length.prompt,
            output_tokens=(answer := min(length.answer, most)),
            max_tokens=most,
            expected=arm.expects(length, answer),
        )
        for number, length in enumerate(lengths)
    ]
    limits = Limits(
        # vLLM keeps one of them for itself.
        blocks=BLOCKS - 1,
        block_tokens=BLOCK_TOKENS,
        block_bytes=BLOCK_BYTES,
        running=64,
        step_tokens=STEP_TOKENS,
        # Stock vLLM leaves it empty.
        swap_bytes=kv_bytes(1024),
    )
    times = simulate(requests, limits, arm.policies, cost.costs()).times.values()
    return Served(
        seconds=max(each.finished_s for each in times),
        turnaround_s=fmean(each.finished_s for each in times),
        weighted_turnaround=fmean(each.weighted_turnaround for each in times),
    )


def compared(lengths: Sequence[Length], most: int, cost: StepCost) -> dict[str, dict[str, float]]:
    """Each arm's figures over those of stock vLLM."""
    found = {
        name: serve(arm, lengths, most, cost)
        for name, arm in ARMS.items()
        if arm.told != "prediction" or lengths[0].predicted is not None
    }
    stock = found.pop(STOCK)
    return {
        name: {
            "throughput": stock.seconds / each.seconds,
            "turnaround": each.turnaround_s / stock.turnaround_s,
            "weighted_turnaround": each.weighted_turnaround / stock.weighted_turnaround,
        }
        for name, each in found.items()
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    points = []
    sets = {name: Lengths(name, options.data, options.predictor, None) for name in options.sets}
    for (name, of), most in itertools.product(sets.items(), options.max_output):
        lengths = of.drawn(options.requests, most, "0")
        for cost in map(StepCost.parse, options.costs):
            over = compared(lengths, most, cost)
            points.append(
                {
                    "lengths": name,
                    "max_output": most,
                    "step_ms": cost.step_ms,
                    "token_ms": cost.token_ms,
                    "cut_share": fmean(each.answer >= most for each in lengths),
                    "over_stock": over,
                }
            )
            print(f"{name}, {most}, {cost}: {over['fair_known']}", flush=True)
    return {"points": points}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.adaptive_simulated",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["short", "chat"])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--max-output", type=int, nargs="+", default=[64, 128])
    parser.add_argument(
        "--costs",
        nargs="+",
        default=["12:0.6", "10:1.7", "33:1.2"],
        help="milliseconds of a step, and of each token in it",
    )
    parser.add_argument("--predictor", choices=KINDS, help="of lengths; needs --data")
    parser.add_argument("--data", type=Path, help="folder with the sets' lengths")
    options = parser.parse_args()
    if options.predictor and options.data is None:
        parser.error("--predictor needs --data: a predictor is trained on texts")
    facts = machine()
    publish("adaptive_simulated", measure(options), setup=said_by(options, "data"), facts=facts)


if __name__ == "__main__":
    main()
