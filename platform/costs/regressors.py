"""Regressors of step time, of those that the draft of AdaptiveLLM (section 3.2) compares.

Each is fitted to polynomials of a step's features, of degree 1 to 5. Errors count as shares of a
step's time, so samples weigh by it. Of the draft's nine kinds the linear ones were the most exact
and the quickest (docs/costs.md).
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from loomserve.platform.costs.step_time import Step, TimedStep

Floats = NDArray[np.float64]

REGRESSORS = {"linear": LinearRegression(), "ridge": Ridge(alpha=1e-3)}
DEGREES = (1, 2, 3, 4, 5)

# Lengths of a prefill's last chunk in the table that is interpolated.
_LENGTHS = 17


class FittedModel:
    """Regressor fitted to samples, which :class:`StepTimes` corrects.

    ``longest`` is the engine's context in tokens. A prefill in chunks larger than the samples'
    largest step is predicted in chunks of that size.
    """

    def __init__(self, name: str, degree: int, samples: Sequence[TimedStep], longest: int) -> None:
        self._longest = longest
        self._largest = max(step.tokens for step, _ in samples)
        rows = _features([step for step, _ in samples])
        seconds = np.array([seconds for _, seconds in samples])
        # Outside of the samples, a polynomial may predict less than any step takes.
        self._floor = float(seconds.min())
        # Ridge's penalty is meant for values near 1.
        self._unit = float(np.median(seconds))
        self._inner = StandardScaler().fit(rows)
        self._polynomial = PolynomialFeatures(degree, include_bias=False).fit(rows[:1])
        expanded = self._polynomial.transform(self._inner.transform(rows))
        self._outer = StandardScaler().fit(expanded)
        self._estimator = clone(REGRESSORS[name]).fit(
            self._outer.transform(expanded),
            seconds / self._unit,
            sample_weight=(self._unit / seconds) ** 2,
        )
        self._prefills: dict[int, tuple[Floats, NDArray[np.int64], Floats]] = {}
        self._plain = self._plainly() if degree == 1 else None

    def _plainly(self) -> tuple[float, float, float, float, float]:
        """Seconds that a step adds, and that each of its features adds per unit."""
        shares = self._estimator.coef_ / self._outer.scale_
        step = self._estimator.intercept_ - shares @ self._outer.mean_
        shares = shares / self._inner.scale_
        step = step - shares @ self._inner.mean_
        tokens, requests, context, attention = (self._unit * shares).tolist()
        return float(self._unit * step), tokens, requests, context, attention

    def predict(self, steps: Sequence[Step]) -> Floats:
        """Predicted seconds of many steps, ``[steps]``."""
        rows = self._polynomial.transform(self._inner.transform(_features(steps)))
        predicted: Floats = self._unit * self._estimator.predict(self._outer.transform(rows))
        return np.maximum(self._floor, predicted)

    def seconds(self, step: Step) -> float:
        """Predicted seconds of one step, computed in microseconds."""
        if self._plain is not None:
            seconds, tokens, requests, context, attention = self._plain
            seconds += tokens * step.tokens + requests * step.requests
            return max(self._floor, seconds + context * step.context + attention * step.attention)
        row = (_features([step])[0] - self._inner.mean_) / self._inner.scale_
        row = np.prod(row**self._polynomial.powers_, axis=1)
        row = (row - self._outer.mean_) / self._outer.scale_
        predicted = self._estimator.coef_ @ row + self._estimator.intercept_
        return max(self._floor, self._unit * float(predicted))

    def prefill_s(self, tokens: int, chunk: int) -> float:
        """Predicted seconds, from a table for each size of chunks, made at its first use."""
        chunk = min(chunk, self._largest)
        if chunk not in self._prefills:
            self._prefills[chunk] = self._prefill_table(chunk)
        full, lengths, last = self._prefills[chunk]
        chunks, rest = divmod(tokens, chunk)
        known = min(chunks, len(full) - 1)
        seconds = full[known] + (chunks - known) * last[-1, -1]
        if rest:
            seconds += np.interp(rest, lengths, last[known])
        return float(seconds)

    def learn(self, step: Step, seconds: float) -> bool:
        """Learn nothing: the correction follows what differs in production."""
        return False

    def _prefill_table(self, chunk: int) -> tuple[Floats, NDArray[np.int64], Floats]:
        """Seconds of n full chunks ``[chunks]``, lengths of the next chunk ``[lengths]``, and its
        seconds ``[chunks, lengths]``.
        """
        chunks = self._longest // chunk + 1
        lengths = np.unique(np.geomspace(1, chunk, _LENGTHS).astype(np.int64))
        steps = [
            Step.of([(number * chunk, int(length))])
            for number in range(chunks)
            for length in lengths
        ]
        last = self.predict(steps).reshape(chunks, len(lengths))
        return np.concatenate([[0.0], last[:-1, -1].cumsum()]), lengths, last


def _features(steps: Sequence[Step]) -> Floats:
    return np.array([(s.tokens, s.requests, s.context, s.attention) for s in steps], np.float64)


def _errors(predicted: Floats, samples: Sequence[TimedStep]) -> Floats:
    measured = np.array([seconds for _, seconds in samples])
    errors: Floats = np.abs(predicted - measured) / measured
    return errors


def mape(predicted: Floats, samples: Sequence[TimedStep]) -> float:
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

    All samples of a step are on the same side, or the error would be that of known steps.
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
    """Error (``mape``, a share), its ``standard_error``, and seconds to predict a step."""

    regressor: str
    degree: int
    mape: float
    standard_error: float
    predict_s: float


def compare(samples: Sequence[TimedStep]) -> list[RegressorScore]:
    """Score every regressor and degree on a fifth of the steps, fitted to the others."""
    known, unknown = held_out(samples, 0.2, seed=1)
    scores = []
    for name in REGRESSORS:
        for degree in DEGREES:
            model = FittedModel(name, degree, known, longest=1)
            begin = time.perf_counter()
            predicted = [model.seconds(step) for step, _ in unknown]
            each_s = (time.perf_counter() - begin) / len(unknown)
            errors = _errors(np.array(predicted), unknown)
            doubt = float(errors.std() / len(errors) ** 0.5)
            scores.append(RegressorScore(name, degree, float(errors.mean()), doubt, each_s))
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
