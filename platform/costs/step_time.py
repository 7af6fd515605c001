"""How long an engine's step takes: AdaptiveLLM's recomputation cost (section 3.2), kept up to date.

The paper predicts a step from the model's layers and width, the tokens of a request and the batch
size. A model's shape is fixed within an engine; and steps of today mix prefills and decodes of
unequal length, so that a step is told by sums over its requests instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from loomserve.platform.costs.correction import Correction


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an engine, all its requests summed up.

    ``tokens`` are computed, for ``requests`` many, of which ``context`` tokens stand in the KV
    cache; ``attention`` counts the pairs of a token and one that it attends to.
    """

    tokens: int
    requests: int
    context: int
    attention: float

    @classmethod
    def of(cls, parts: Iterable[tuple[int, int]]) -> Step:
        """From (tokens already computed, tokens scheduled now), one a request."""
        tokens = requests = context = 0
        attention = 0.0
        for computed, scheduled in parts:
            tokens += scheduled
            requests += 1
            context += computed
            attention += scheduled * (computed + scheduled / 2)
        return cls(tokens, requests, context, attention)


def prefill(tokens: int, chunk: int) -> Iterable[Step]:
    """The steps that compute ``tokens`` from nothing, alone, ``chunk`` at a time."""
    for computed in range(0, tokens, chunk):
        yield Step.of([(computed, min(chunk, tokens - computed))])


TimedStep = tuple[Step, float]
"""A step and the seconds that it took."""


class StepModel(Protocol):
    """What predicts before correction."""

    def seconds(self, step: Step) -> float:
        """Above 0."""

    def prefill_s(self, tokens: int, chunk: int) -> float:
        """Sum of the steps of :func:`prefill`."""

    def learn(self, step: Step, seconds: float) -> bool:
        """Get better by a step that took so long; whether it is predicted otherwise now."""


class StepTimes:
    """Predicts steps of one engine, corrected by those that it has seen."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        # A model that knows nothing yet follows its first steps by itself.
        self._correction = Correction(trusted=True)

    @classmethod
    def unprofiled(cls) -> StepTimes:
        """Knows nothing of the engine yet, and learns it step by step."""
        return cls(OnlineModel())

    def seconds(self, step: Step) -> float:
        """Predicted time of a step."""
        return self._correction.factor * self._model.seconds(step)

    def prefill_s(self, tokens: int, chunk: int) -> float:
        """Predicted time to compute ``tokens`` from nothing, alone, at most ``chunk`` a step."""
        return self._correction.factor * self._model.prefill_s(tokens, chunk)

    def observe(self, step: Step, seconds: float) -> float:
        """Learn from a step that took so long, above 0; returns what was predicted before."""
        uncorrected = self._model.seconds(step)
        predicted = self._correction.factor * uncorrected
        self._correction.score(predicted, seconds)
        if self._model.learn(step, seconds):
            uncorrected = self._model.seconds(step)
        self._correction.observe(uncorrected, seconds)
        return predicted

    @property
    def error(self) -> float:
        """Mean absolute percentage error of the latest predictions, as a share, 0 at first."""
        return self._correction.error


# Seconds a step, a token, a request, a token of context and a pair: a small model on one core.
_FIRST_GUESS = (1e-2, 1e-3, 1e-4, 1e-7, 1e-7)
# What is learnt of the machine outlives changes of load; changes of speed are the correction's.
_FORGETTING = 0.999
# The first guess counts as much as so many steps.
_DOUBT = 1e-3
# A feature not seen in so long, as context where requests only prefill, keeps what it had.
_FORGOTTEN = 1e-100
_SWEEPS = 8


class OnlineModel:
    """Seconds as a sum of non-negative shares of a step's features, learnt step by step.

    Recursive least squares of the relative error, older steps counting less, solved by coordinate
    descent: features that the steps so far do not tell apart keep what they had, and since no
    share is negative, steps larger than any seen are predicted sensibly. A step that stalled
    weighs little, as errors are relative to what was measured.
    """

    def __init__(self) -> None:
        self._shares = list(_FIRST_GUESS)
        size = range(len(_FIRST_GUESS))
        # In units of the first guess, its own step of every feature alone.
        self._products = [
            [_DOUBT / _FIRST_GUESS[i] ** 2 if i == j else 0.0 for j in size] for i in size
        ]
        self._targets = [_DOUBT / guess for guess in _FIRST_GUESS]

    def seconds(self, step: Step) -> float:
        return self._sum(1, step.tokens, step.requests, step.context, step.attention)

    def prefill_s(self, tokens: int, chunk: int) -> float:
        # Since shares add up, so do features: the pairs are the same however they are cut.
        steps = -(-tokens // chunk)
        return self._sum(steps, tokens, steps, chunk * steps * (steps - 1) // 2, tokens**2 / 2)

    def learn(self, step: Step, seconds: float) -> bool:
        row = [
            value / seconds
            for value in (1, step.tokens, step.requests, step.context, step.attention)
        ]
        for i, value in enumerate(row):
            products = self._products[i]
            for j, other in enumerate(row):
                products[j] = _FORGETTING * products[j] + value * other
            self._targets[i] = _FORGETTING * self._targets[i] + value
        for _ in range(_SWEEPS):
            self._descend()
        return True

    def _descend(self) -> None:
        shares = self._shares
        for i, products in enumerate(self._products):
            if products[i] < _FORGOTTEN:
                continue
            off = self._targets[i] - sum(map(float.__mul__, products, shares))
            shares[i] = max(0.0, shares[i] + off / products[i])

    def _sum(self, *features: float) -> float:
        return sum(share * value for share, value in zip(self._shares, features, strict=True))
