"""Chooses a regressor of step time: scores every kind and degree on steps that it has not seen."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loomserve.platform.costs.regressors import REGRESSORS, FittedModel
from loomserve.platform.costs.step_time import TimedStep

Floats = NDArray[np.float64]

DEGREES = (1, 2, 3, 4, 5)


def _errors(predicted: Floats, samples: Sequence[TimedStep]) -> Floats:
    measured = np.array([seconds for _, seconds in samples])
    errors: Floats = np.abs(predicted - measured) / measured
    return errors


def mape(predicted: Floats, samples: Sequence[TimedStep]) -> float:
    """Mean absolute error as a share of the measured seconds."""
    return float(_errors(predicted, samples).mean())


def noise(samples: Sequence[tuple[Hashable, float]]) -> float | None:
    """Noise of the machine: :func:`mape` of equal steps, or sizes, against their own median.

    It counts work that was measured three times or more; None if none was. No predictor that does
    not know the machine's state can be much better.
    """
    same: dict[Hashable, list[float]] = {}
    for work, seconds in samples:
        same.setdefault(work, []).append(seconds)
    repeated = [np.array(times) for times in same.values() if len(times) >= 3]
    offs = [np.abs(np.median(times) - times) / times for times in repeated]
    return float(np.mean(np.concatenate(offs))) if offs else None


def held_out(
    samples: Sequence[TimedStep], share: float, seed: int
) -> tuple[list[TimedStep], list[TimedStep]]:
    """Split the samples: those of ``share`` of the distinct steps come second.

    All samples of a step are on the same side, else a tree would only have to remember them.
    """
    steps = sorted({step for step, _ in samples}, key=hash)
    number = max(1, round(share * len(steps)))
    chosen = {steps[i] for i in np.random.default_rng(seed).permutation(len(steps))[:number]}
    return (
        [sample for sample in samples if sample[0] not in chosen],
        [sample for sample in samples if sample[0] in chosen],
    )


@dataclass(frozen=True)
class RegressorScore:
    """Error (``mape``, a share), its ``standard_error``, and seconds to fit and to predict."""

    regressor: str
    degree: int
    mape: float
    standard_error: float
    fit_s: float
    predict_s: float


def compare(samples: Sequence[TimedStep]) -> list[RegressorScore]:
    """Score every regressor and degree on a fifth of the steps, fitted to the others."""
    known, unknown = held_out(samples, 0.2, seed=1)
    scores = []
    for name in REGRESSORS:
        for degree in DEGREES:
            begin = time.perf_counter()
            model = FittedModel(name, degree, known, longest=1)
            fitted = time.perf_counter()
            predicted = [model.seconds(step) for step, _ in unknown]
            each = (time.perf_counter() - fitted) / len(unknown)
            errors = _errors(np.array(predicted), unknown)
            doubt = float(errors.std() / len(errors) ** 0.5)
            scores.append(
                RegressorScore(name, degree, float(errors.mean()), doubt, fitted - begin, each)
            )
    return scores


def winner(scores: Sequence[RegressorScore]) -> RegressorScore:
    """The simplest within one standard error of the best: lowest degree, then fastest prediction.

    The rule of one standard error is of Breiman et al., "Classification and Regression Trees",
    1984. Where noise hides the differences between regressors, a high degree only goes astray on
    steps unlike those measured.
    """
    best = min(scores, key=lambda score: score.mape)
    good = (s for s in scores if s.mape <= best.mape + best.standard_error)
    return min(good, key=lambda score: (score.degree, score.predict_s))
