"""Regressors of step time: the nine that the draft of AdaptiveLLM (section 3.2) compares.

Each is fitted to polynomials of a step's features, of degree 1 to 5. Linear, ridge, lasso and
elastic net add up seconds; support vectors, decision tree, random forest, gradient boosting and
nearest neighbours do not. Errors count as shares of a step's time, so the first four weigh steps by
it, and the others learn its logarithm.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.ensemble import GradientBoostingRegressor, RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import ElasticNet, Lasso, LinearRegression, Ridge
from sklearn.neighbors import KNeighborsRegressor
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from sklearn.svm import SVR
from sklearn.tree import DecisionTreeRegressor

from loomserve.platform.costs.step_time import Step, TimedStep

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Regressor:
    """Kind of regressor. ``row`` predicts one row as ``predict`` does, without 1 ms of checks."""

    estimator: Any
    row: Callable[[Any, Floats], float]
    adds_seconds: bool = False


def _linear(estimator: Any, row: Floats) -> float:
    return float(estimator.coef_ @ row + estimator.intercept_)


def _tree(estimator: Any, row: Floats) -> float:
    return float(estimator.tree_.predict(row[None].astype(np.float32))[0, 0])


def _forest(estimator: Any, row: Floats) -> float:
    single = row[None].astype(np.float32)
    trees = estimator.estimators_
    return float(sum(tree.tree_.predict(single)[0, 0] for tree in trees) / len(trees))


def _boosting(estimator: Any, row: Floats) -> float:
    single = row[None].astype(np.float32)
    steps = sum(tree.tree_.predict(single)[0, 0] for tree in estimator.estimators_[:, 0])
    return float(estimator.init_.constant_[0, 0] + estimator.learning_rate * steps)


def _whole(estimator: Any, row: Floats) -> float:
    return float(estimator.predict(row[None])[0])


REGRESSORS = {
    "linear": Regressor(LinearRegression(), _linear, adds_seconds=True),
    "ridge": Regressor(Ridge(alpha=1e-3), _linear, adds_seconds=True),
    "lasso": Regressor(Lasso(alpha=1e-3, max_iter=10_000), _linear, adds_seconds=True),
    "elastic net": Regressor(ElasticNet(alpha=1e-3, max_iter=10_000), _linear, adds_seconds=True),
    "support vectors": Regressor(SVR(C=10, epsilon=0.01), _whole),
    "decision tree": Regressor(DecisionTreeRegressor(random_state=0), _tree),
    "random forest": Regressor(RandomForestRegressor(50, random_state=0), _forest),
    "gradient boosting": Regressor(GradientBoostingRegressor(random_state=0), _boosting),
    "nearest neighbours": Regressor(KNeighborsRegressor(weights="distance"), _whole),
}

# Lengths of a prefill's last chunk in the table that is interpolated.
_LENGTHS = 17


class FittedModel:
    """Regressor fitted to samples, which :class:`StepTimes` corrects.

    ``longest`` is the engine's context in tokens. A prefill in chunks larger than the samples'
    largest step is predicted in chunks of that size.
    """

    def __init__(self, name: str, degree: int, samples: Sequence[TimedStep], longest: int) -> None:
        self._regressor = REGRESSORS[name]
        self._longest = longest
        self._largest = max(step.tokens for step, _ in samples)
        rows = self._scale(_features([step for step, _ in samples]))
        seconds = np.array([seconds for _, seconds in samples])
        # Outside of the samples, a polynomial may predict less than any step takes.
        self._floor = float(seconds.min())
        # Lasso's and elastic net's penalties are meant for values near 1.
        self._unit = float(np.median(seconds))
        self._polynomial = PolynomialFeatures(degree, include_bias=False).fit(rows[:1])
        self._powers = self._polynomial.powers_
        self._inner = StandardScaler().fit(rows)
        expanded = self._polynomial.transform(self._inner.transform(rows))
        self._outer = StandardScaler().fit(expanded)
        self._estimator = clone(self._regressor.estimator)
        expanded = self._outer.transform(expanded)
        with warnings.catch_warnings():
            # A high degree on few samples; the error on other samples shows what that costs.
            warnings.simplefilter("ignore", ConvergenceWarning)
            if self._regressor.adds_seconds:
                weights = (self._unit / seconds) ** 2
                self._estimator.fit(expanded, seconds / self._unit, sample_weight=weights)
            else:
                self._estimator.fit(expanded, np.log(seconds / self._unit))
        self._prefills: dict[int, tuple[Floats, NDArray[np.int64], Floats]] = {}
        self._plain = self._plainly() if self._regressor.adds_seconds and degree == 1 else None

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
        rows = self._inner.transform(self._scale(_features(steps)))
        rows = self._outer.transform(self._polynomial.transform(rows))
        return self._seconds(self._estimator.predict(rows))

    def seconds(self, step: Step) -> float:
        """Predicted seconds of one step, computed in a microsecond to a millisecond."""
        if self._plain is not None:
            seconds, tokens, requests, context, attention = self._plain
            seconds += tokens * step.tokens + requests * step.requests
            return max(self._floor, seconds + context * step.context + attention * step.attention)
        row = self._scale(_features([step]))[0]
        row = (row - self._inner.mean_) / self._inner.scale_
        row = np.prod(row**self._powers, axis=1)
        row = (row - self._outer.mean_) / self._outer.scale_
        return float(self._seconds(np.array(self._regressor.row(self._estimator, row))))

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

    def _scale(self, features: Floats) -> Floats:
        return features if self._regressor.adds_seconds else np.log1p(features)

    def _seconds(self, predicted: Floats) -> Floats:
        if not self._regressor.adds_seconds:
            predicted = np.exp(predicted)
        seconds: Floats = np.maximum(self._floor, self._unit * predicted)
        return seconds


def _features(steps: Sequence[Step]) -> Floats:
    """Features of the steps, ``[steps, 4]``."""
    return np.array([(s.tokens, s.requests, s.context, s.attention) for s in steps], np.float64)
