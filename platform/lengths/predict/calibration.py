"""Intervals with the promised coverage: split-conformal quantile regression.

Romano, Patterson and Candès, "Conformalized Quantile Regression" (2019), on logarithms, since
lengths spread in proportion to themselves. However good or bad the quantiles are, the widened
interval holds the length of a new request with at least the promised probability, as long as
requests are like those that calibrated it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from loomserve.platform.lengths.predict.head import Guess
from loomserve.platform.lengths.predict.prediction import Prediction


def margin(guesses: Sequence[Guess], tokens: Sequence[int], coverage: float) -> float:
    """The width to add to both ends of intervals, in log(1 + tokens); negative narrows them.

    The samples must not be those that the predictor was trained on. The margin is infinite if there
    are fewer than ``coverage / (1 - coverage)`` samples.
    """
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
