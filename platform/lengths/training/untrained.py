"""A predictor before it has learnt anything: what is learnt first has to be better than it."""

from __future__ import annotations

import numpy as np

from loomserve.platform.lengths.predict.buckets import EDGES, bucket_of
from loomserve.platform.lengths.predict.classifier import BucketClassifier
from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
from loomserve.platform.lengths.predict.prediction import LengthQuery
from loomserve.platform.lengths.predict.predictor import KINDS, Fitted
from loomserve.platform.lengths.training.versions import TrainingSet

KIND = "uellm"
"""For open questions the better of the two papers' (docs/lengths.md), and the faster to train."""
_TOKENS = 128.0
"""Guessed of every answer, to be beaten; nobody is told."""


def untrained(embeddings: TokenEmbeddings) -> tuple[Fitted, TrainingSet]:
    """A predictor that guesses the same of every answer, and its empty training set."""
    features = len(KINDS[KIND].features(embeddings)(LengthQuery("", "", 0)))
    bucket = bucket_of([_TOKENS])
    head = BucketClassifier(
        centre=np.zeros(features, np.float32),
        scale=np.ones(features, np.float32),
        weights=np.zeros((features, 1), np.float32),
        bias=np.zeros(1, np.float32),
        buckets=bucket,
        means=EDGES[bucket],
    )
    training = TrainingSet(
        np.zeros((0, features), np.float32), np.zeros(0, np.int64), np.zeros(0, np.float64)
    )
    return Fitted(KIND, head, 0.0, embeddings.digest), training
