"""Fits predictors' heads with scikit-learn.

Importing it takes seconds, so no gateway's or engine's process imports this module (see
``retrain.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.lengths.predict.embedding import Floats, TokenEmbeddings
from loomserve.platform.lengths.predict.head import (
    SHARES,
    AppMeans,
    BucketClassifier,
    Forest,
    Head,
    bucket_of,
)
from loomserve.platform.lengths.predict.prediction import COVERAGE
from loomserve.platform.lengths.predict.predictor import KINDS, Fitted, margin
from loomserve.platform.lengths.training.samples import Sample
from loomserve.platform.lengths.training.versions import TrainingSet

FEWEST = 100
"""The fewest samples to train on; about a fifth of them calibrates the interval."""

_CALIBRATING = 10


def train(
    kind: str,
    samples: Sequence[Sample],
    folds: Sequence[int],
    embeddings: TokenEmbeddings,
    *,
    calibrate_on: int,
) -> tuple[Fitted, TrainingSet]:
    """Train on all folds but ``calibrate_on``, and calibrate on that one. ``folds`` has the fold of
    each sample; near-duplicates must share theirs (``samples.py``). Raises ConfigError if there are
    too few samples, or too few to calibrate."""
    features = KINDS[kind].features(embeddings)
    rows = np.array([features(sample.query) for sample in samples])
    tokens = np.array([sample.tokens for sample in samples])
    held_out = np.array(folds) == calibrate_on
    if len(samples) < FEWEST or held_out.sum() < _CALIBRATING:
        raise ConfigError(
            f"{len(samples)} samples are too few for a length predictor, or too much alike "
            f"({held_out.sum()} of them would calibrate it); give {FEWEST} and more that differ"
        )
    weights = np.ones(len(samples) - held_out.sum())
    training = TrainingSet(rows[~held_out], tokens[~held_out], weights)
    head = fit(kind, training.rows, training.tokens, weights)
    guesses = [head.guess(row) for row in rows[held_out]]
    widen = margin(guesses, tokens[held_out].tolist(), COVERAGE)
    return Fitted(kind, head, widen, embeddings.digest), training


def fit(
    kind: str, rows: Floats, tokens: NDArray[np.int64], weights: NDArray[np.float64] | None = None
) -> Head:
    """A head of this kind, fitted to features ``[samples, features]`` and lengths ``[samples]``."""
    weights = np.ones(len(rows)) if weights is None else weights
    head = KINDS[kind].head
    if head is Forest:
        return _forest(rows, tokens, weights)
    if head is BucketClassifier:
        return _classifier(rows, tokens, weights)
    return _app_means(rows, tokens, weights)


def _forest(rows: Floats, tokens: NDArray[np.int64], weights: NDArray[np.float64]) -> Forest:
    """Fit a forest that splits by the logarithm of the length, so that short answers count as much
    as long ones; a leaf's value is the mean of its lengths themselves."""
    forest = RandomForestRegressor(100, min_samples_leaf=3, max_features=0.5, random_state=0)
    forest.fit(rows, np.log1p(tokens), sample_weight=weights)
    roots, features, thresholds, children, means, quantiles = [], [], [], [], [], []
    start = 0
    for estimator in forest.estimators_:
        tree = estimator.tree_
        numbers = np.arange(tree.node_count)
        leaf = tree.children_left < 0
        both = np.stack((tree.children_left, tree.children_right), axis=1)
        both[leaf] = numbers[leaf, None]
        roots.append(start)
        features.append(np.where(leaf, 0, tree.feature))
        thresholds.append(tree.threshold)
        children.append(both + start)
        groups, statistics = _statistics(tree.apply(rows), tokens, weights, SHARES)
        values = np.zeros((tree.node_count, 1 + len(SHARES)), np.float32)
        values[groups] = statistics
        means.append(values[:, 0])
        quantiles.append(values[:, 1:])
        start += tree.node_count
    return Forest(
        np.array(roots, np.int32),
        np.concatenate(features).astype(np.int32),
        np.concatenate(thresholds),
        np.concatenate(children).astype(np.int32),
        np.concatenate(means),
        np.concatenate(quantiles),
        np.array(max(e.get_depth() for e in forest.estimators_), np.int32),
    )


def _statistics(
    groups: NDArray[np.generic],
    tokens: NDArray[np.int64],
    weights: NDArray[np.float64],
    shares: Sequence[float],
) -> tuple[NDArray[np.generic], NDArray[np.float64]]:
    """The distinct groups, ascending, and each group's mean and quantiles of ``tokens``, shape
    ``[groups, 1 + shares]``."""
    order = np.lexsort((tokens, groups))
    groups, tokens, weights = groups[order], tokens[order], weights[order]
    starts = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
    ends = np.append(starts[1:], len(groups)) - 1
    totals = np.add.reduceat(weights, starts)
    columns = [np.add.reduceat(weights * tokens, starts) / totals]
    reached = np.cumsum(weights)
    before = reached[starts] - weights[starts]
    for share in shares:
        at = np.searchsorted(reached, before + share * totals)
        columns.append(tokens[np.clip(at, starts, ends)].astype(np.float64))
    return groups[starts], np.stack(columns, axis=1)


def _classifier(
    rows: Floats, tokens: NDArray[np.int64], weights: NDArray[np.float64]
) -> BucketClassifier:
    scaler = StandardScaler().fit(rows, sample_weight=weights)
    buckets = bucket_of(tokens)
    seen = np.unique(buckets)
    means = np.array(
        [np.average(tokens[buckets == b], weights=weights[buckets == b]) for b in seen]
    )
    width = rows.shape[1]
    shape = (width, len(seen))
    if len(seen) == 1:  # nothing to tell apart
        coefficients, bias = np.zeros(shape), np.zeros(1)
    else:
        model = LogisticRegression(C=3.0 / width, max_iter=1000, tol=1e-3)
        model.fit(scaler.transform(rows), buckets, sample_weight=weights)
        coefficients, bias = model.coef_.T, model.intercept_
        if len(seen) == 2:  # scikit-learn has one logit, of the second class
            coefficients = np.concatenate((np.zeros((width, 1)), coefficients), axis=1)
            bias = np.array([0.0, bias[0]])
    return BucketClassifier(
        scaler.mean_.astype(np.float32),
        scaler.scale_.astype(np.float32),
        coefficients.astype(np.float32),
        bias.astype(np.float32),
        seen,
        means,
    )


def _app_means(rows: Floats, tokens: NDArray[np.int64], weights: NDArray[np.float64]) -> AppMeans:
    shares = (0.05, 0.95)
    apps, each = _statistics(rows[:, 0], tokens, weights, shares)
    _, together = _statistics(np.zeros(len(rows)), tokens, weights, shares)
    return AppMeans(apps.astype(np.float32), np.concatenate((each, together)))
