"""A trained predictor is features, head and calibration; the kinds of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.lengths.predict import features
from loomserve.platform.lengths.predict.app_means import AppMeans
from loomserve.platform.lengths.predict.calibration import calibrated
from loomserve.platform.lengths.predict.classifier import BucketClassifier
from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
from loomserve.platform.lengths.predict.features import Features
from loomserve.platform.lengths.predict.forest import Forest
from loomserve.platform.lengths.predict.head import Guess, Head
from loomserve.platform.lengths.predict.prediction import LengthQuery, Prediction


@dataclass(frozen=True)
class Kind:
    """The features and the head that make up one kind of predictor."""

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
    """Result of training, as a file keeps it.

    Attributes:
        kind: Key of :data:`KINDS`.
        margin: See :func:`~loomserve.platform.lengths.predict.calibration.margin`.
        embeddings: Digest of the embeddings that the head was trained with.
    """

    kind: str
    head: Head
    margin: float
    embeddings: str


class TrainedPredictor:
    """Predictor that reads a request's text. Immutable, so any thread may call it."""

    def __init__(self, fitted: Fitted, embeddings: TokenEmbeddings) -> None:
        """
        Raises:
            ConfigError: the predictor was trained with other embeddings.
        """
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
