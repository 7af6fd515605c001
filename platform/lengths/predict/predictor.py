"""A trained predictor is features, head and calibration; the kinds of them.

Calibration gives intervals the promised coverage by split-conformal quantile regression: Romano,
Patterson and Candès, "Conformalized Quantile Regression" (2019), on logarithms, since lengths
spread in proportion to themselves. However good or bad the quantiles are, the widened interval
holds the length of a new request with at least the promised probability, as long as requests are
like those that calibrated it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.lengths.predict import features
from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
from loomserve.platform.lengths.predict.features import Features
from loomserve.platform.lengths.predict.head import AppMeans, BucketClassifier, Forest, Guess, Head
from loomserve.platform.lengths.predict.prediction import LengthQuery, Prediction


def margin(guesses: Sequence[Guess], tokens: Sequence[int], coverage: float) -> float:
    """The width to add to both ends of intervals, in log(1 + tokens); negative narrows them. The
    samples must not be those that the predictor was trained on. Fewer than ``coverage / (1 -
    coverage)`` of them give an infinite margin."""
    actual = np.log1p(tokens)
    low = np.log1p([guess.low for guess in guesses])
    high = np.log1p([guess.high for guess in guesses])
    outside = np.sort(np.maximum(low - actual, actual - high))
    rank = math.ceil((len(outside) + 1) * coverage)
    return float(outside[rank - 1]) if rank <= len(outside) else math.inf


def calibrated(guess: Guess, margin: float, most: float) -> Prediction:
    """The prediction of a guess: its interval widened by ``margin``, all within ``most`` tokens."""
    tokens, median = min(most, guess.tokens), min(most, guess.median)
    if math.isinf(margin):
        return Prediction(tokens, 0.0, most, median)
    low = math.expm1(max(0.0, math.log1p(guess.low) - margin))
    high = math.expm1(max(0.0, math.log1p(guess.high) + margin))
    return Prediction(tokens, min(low, tokens), max(min(most, high), tokens), median)


@dataclass(frozen=True)
class Kind:
    features: Callable[[TokenEmbeddings], Features]
    head: type[Head]


KINDS = {
    "magnus": Kind(features.magnus, Forest),
    "uellm": Kind(features.uellm, BucketClassifier),
    "words": Kind(lambda _: features.words, BucketClassifier),
    "input length": Kind(lambda _: features.length, Forest),
    "mean per app": Kind(lambda _: features.app, AppMeans),
}
"""The two papers' predictors, a small classifier on words as in S3, and two baselines."""


@dataclass(frozen=True)
class Fitted:
    """Result of training: a key of :data:`KINDS`, and the digest of the embeddings that it used."""

    kind: str
    head: Head
    margin: float
    embeddings: str


class TrainedPredictor:
    """Predictor that reads a request's text. Immutable, so any thread may call it. A prediction
    takes 3 ms at most (median, one core) and longer for long texts, so it must not be called on an
    event loop."""

    def __init__(self, fitted: Fitted, embeddings: TokenEmbeddings) -> None:
        """Raises ``ConfigError`` if the predictor was trained with other embeddings."""
        if fitted.embeddings != embeddings.digest:
            raise ConfigError(
                "the length predictor was trained with other embeddings; give the model of its "
                "training, or train again (loomserve lengths train)"
            )
        self.fitted = fitted
        self.features = KINDS[fitted.kind].features(embeddings)

    def predict(self, query: LengthQuery) -> Prediction:
        most = math.inf if query.max_tokens is None else query.max_tokens
        guess = self.fitted.head.guess(self.features(query), most)
        return calibrated(guess, self.fitted.margin, most)

    def guess(self, query: LengthQuery) -> Guess:
        """The guess before calibration, for an answer that nothing bounds."""
        return self.fitted.head.guess(self.features(query))
