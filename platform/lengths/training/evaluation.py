"""Measures predictors on requests unlike those that they were trained on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
from loomserve.platform.lengths.predict.head import bucket_of
from loomserve.platform.lengths.predict.prediction import Prediction
from loomserve.platform.lengths.predict.predictor import KINDS, TrainedPredictor
from loomserve.platform.lengths.training.fit import train
from loomserve.platform.lengths.training.samples import FOLDS, Sample, folds_of

ALL = "all"
_WARM = 20


@dataclass(frozen=True)
class PredictorScore:
    """Scores of one predictor on one task, each request predicted by a fold that has not seen it.

    Attributes:
        bucket: Share of requests predicted in the right one of UELLM's buckets.
        near: Share predicted in that bucket or in a neighbouring one.
        mae: Mean absolute error in tokens.
        r: Pearson's correlation of predicted and real lengths; None where either is constant.
        coverage: Share of the real lengths within the interval.
        width: Median width of the interval in tokens.
        p50_ms: Median processor time of a prediction.
    """

    predictor: str
    task: str
    requests: int
    bucket: float
    near: float
    mae: float
    r: float | None
    coverage: float
    width: float
    p50_ms: float


@dataclass(frozen=True)
class _Tested:
    task: str
    tokens: int
    bucket: int
    prediction: Prediction
    ms: float


def trained_without(
    fold: int,
    kind: str,
    samples: Sequence[Sample],
    folds: Sequence[int],
    embeddings: TokenEmbeddings,
) -> TrainedPredictor:
    """A predictor that has not seen this fold: the next fold calibrates it, the others train it.
    ``folds`` has the number of each sample's fold, below :data:`FOLDS` (``samples.py``). Raises
    ``ConfigError`` for too few samples."""
    known = [(sample, of) for sample, of in zip(samples, folds, strict=True) if of != fold]
    fitted, _ = train(
        kind,
        [sample for sample, _ in known],
        [of for _, of in known],
        embeddings,
        calibrate_on=(fold + 1) % FOLDS,
    )
    return TrainedPredictor(fitted, embeddings)


def evaluate(samples: Sequence[Sample], embeddings: TokenEmbeddings) -> list[PredictorScore]:
    """Scores of every kind of predictor on every task, and on all tasks together. Cross-validation
    over five folds without near-duplicates (``samples.py``). In each round one fold tests, the next
    calibrates and three train, so that every request is tested once. Raises ``ConfigError`` for too
    few samples."""
    folds = folds_of(samples)
    scores = []
    for kind in KINDS:
        tested = [
            t for fold in range(FOLDS) for t in _round(kind, samples, folds, fold, embeddings)
        ]
        tasks = sorted({t.task for t in tested})
        scores += [_score(kind, task, [t for t in tested if t.task == task]) for task in tasks]
        if len(tasks) > 1:
            scores.append(_score(kind, ALL, tested))
    return scores


def _round(
    kind: str,
    samples: Sequence[Sample],
    folds: Sequence[int],
    fold: int,
    embeddings: TokenEmbeddings,
) -> list[_Tested]:
    unseen = [s for s, f in zip(samples, folds, strict=True) if f == fold]
    if not 0 < len(unseen) < len(samples):
        raise ConfigError("the samples are too few or too much alike to test on unlike ones")
    predictor = trained_without(fold, kind, samples, folds, embeddings)
    for sample in unseen[:_WARM]:
        predictor.predict(sample.query)
    tested = []
    for sample in unseen:
        begin = time.thread_time()
        prediction = predictor.predict(sample.query)
        ms = 1e3 * (time.thread_time() - begin)
        bucket = predictor.guess(sample.query).bucket
        tested.append(_Tested(sample.task, sample.tokens, bucket, prediction, ms))
    return tested


def _score(kind: str, task: str, tested: Sequence[_Tested]) -> PredictorScore:
    actual = np.array([t.tokens for t in tested])
    predicted = np.array([t.prediction.tokens for t in tested])
    low = np.array([t.prediction.low for t in tested])
    high = np.array([t.prediction.high for t in tested])
    off = np.abs(np.array([t.bucket for t in tested]) - bucket_of(actual))
    varies = len(tested) > 2 and np.ptp(actual) > 0 and np.ptp(predicted) > 1e-9
    return PredictorScore(
        predictor=kind,
        task=task,
        requests=len(tested),
        bucket=float(np.mean(off == 0)),
        near=float(np.mean(off <= 1)),
        mae=float(np.mean(np.abs(predicted - actual))),
        r=float(np.corrcoef(predicted, actual)[0, 1]) if varies else None,
        coverage=float(np.mean((low <= actual) & (actual <= high))),
        width=float(np.median(high - low)),
        p50_ms=float(np.median([t.ms for t in tested])),
    )
