"""Time of an engine's step: AdaptiveLLM's recomputation cost (section 3.2), kept up to date.

The paper predicts a step from the model's layers and width, the tokens of a request and the batch
size. An engine's model is fixed, and its steps mix prefills and decodes of unequal length. So the
features of a step are sums over its requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Self

from loomserve.platform.costs.correction import Correction


@dataclass(frozen=True, slots=True)
class Step:
    """Features of an engine's step, summed over its requests.

    Attributes:
        tokens: Tokens that the step computes.
        requests: Number of requests.
        context: Tokens of these requests that are in the KV cache before the step.
        attention: Pairs of a computed token and a token that it attends to.
    """

    tokens: int
    requests: int
    context: int
    attention: float

    @classmethod
    def of(cls, parts: Iterable[tuple[int, int]]) -> Step:
        """Sum pairs of (tokens already computed, tokens scheduled now), one a request."""
        tokens = requests = context = 0
        attention = 0.0
        for computed, scheduled in parts:
            tokens += scheduled
            requests += 1
            context += computed
            attention += scheduled * (computed + scheduled / 2)
        return cls(tokens, requests, context, attention)


TimedStep = tuple[Step, float]
"""A step and the seconds that it took."""


# Steps that are learnt from at once, unless a prediction is asked for before there are so many.
_TOGETHER = 16


class StepTimes:
    """Predictor of an engine's steps, corrected by the steps that it has observed.

    To learn takes longer than to observe: steps are kept until a prediction is asked for, which
    knows of all, or there are enough of them.
    """

    def __init__(self, model: OnlineModel) -> None:
        self._model = model
        # A model that learns step by step follows its first steps without correction.
        self._correction = Correction(trusted=True)
        self._new: list[TimedStep] = []
        self._predicted_s = 0.0

    @classmethod
    def unprofiled(cls) -> StepTimes:
        """A predictor that knows nothing of the engine, and learns step by step."""
        return cls(OnlineModel())

    def seconds(self, step: Step) -> float:
        self._learn()
        return self._correction.factor * self._model.seconds(step)

    def prefill_s(self, tokens: int, chunk: int) -> float:
        """Predicted seconds to compute ``tokens`` from nothing, alone, at most ``chunk`` a step."""
        self._learn()
        return self._correction.factor * self._model.prefill_s(tokens, chunk)

    def observe(self, step: Step, seconds: float) -> None:
        """Learn from a step that took ``seconds``, above 0."""
        self._new.append((step, seconds))
        if len(self._new) >= _TOGETHER:
            self._learn()

    def _learn(self) -> None:
        if not self._new:
            return
        new, self._new = self._new, []
        for step, seconds in new:
            predicted = self._correction.factor * self._model.seconds(step)
            self._predicted_s += predicted
            self._correction.score(predicted, seconds)
        self._model.learn(new)
        for step, seconds in new:
            self._correction.observe(self._model.seconds(step), seconds)

    @property
    def predicted_s(self) -> float:
        """Sum of what was predicted for all steps so far, each before it was learnt from."""
        self._learn()
        return self._predicted_s

    @property
    def error(self) -> float:
        """As of :class:`Correction`."""
        self._learn()
        return self._correction.error


SMALL_MODEL = (1e-2, 1e-3, 1e-4, 1e-7, 1e-7)
"""Seconds a step, a token, a request, a token of context and a pair, for a small model on a core.
"""
# Shares outlast changes of load; the correction follows changes of the machine's speed.
_FORGETTING = 0.999
# The first guess weighs as much as this many steps.
_DOUBT = 1e-3
# A feature that has faded to this weight keeps its share: context, if requests only prefill.
_FORGOTTEN = 1e-100
_SWEEPS = 8
# A profile is learnt from once, so there is time.
_PROFILE_SWEEPS = 2000
# Shares that change by less, relatively, are good enough; the next step goes on.
_SETTLED = 1e-3


class OnlineModel:
    """Linear model of a step's seconds with non-negative coefficients, learnt step by step.

    It is recursive least squares of the relative error, with older steps weighing less, solved by
    coordinate descent: features that the steps so far do not tell apart keep their coefficients.
    Since none is negative, predictions of steps larger than any observed are sensible. A stalled
    step weighs little, as errors are relative to the measured time.
    """

    def __init__(self) -> None:
        self._shares = list(SMALL_MODEL)
        size = range(len(SMALL_MODEL))
        # The first guess counts as a step of each feature alone.
        self._products = [
            [_DOUBT / SMALL_MODEL[i] ** 2 if i == j else 0.0 for j in size] for i in size
        ]
        self._targets = [_DOUBT / guess for guess in SMALL_MODEL]

    @classmethod
    def known(cls, shares: Sequence[float]) -> Self:
        """The model of an engine whose coefficients are these, in the order of ``SMALL_MODEL``."""
        model = cls()
        model._shares = list(shares)
        return model

    def seconds(self, step: Step) -> float:
        """Predicted seconds, above 0."""
        return float(sum(map(mul, self._shares, _features(step))))

    def prefill_s(self, tokens: int, chunk: int) -> float:
        """Predicted seconds of all steps that compute ``tokens`` alone, ``chunk`` at a time."""
        # The model is linear, so the steps' features add up; pairs do not depend on the chunks.
        steps = -(-tokens // chunk)
        features = steps, tokens, steps, chunk * steps * (steps - 1) // 2, tokens**2 / 2
        return float(sum(map(mul, self._shares, features)))

    @classmethod
    def of(cls, samples: Iterable[TimedStep]) -> Self:
        """The model that has learnt from these steps, given in the order of time."""
        model = cls()
        model._note(list(samples))
        model._settle(_PROFILE_SWEEPS)
        return model

    def learn(self, timed: Sequence[TimedStep]) -> None:
        """Learn from steps, given in the order of time, and the seconds above 0 that they took."""
        self._note(timed)
        self._settle(_SWEEPS)

    def _note(self, timed: Sequence[TimedStep]) -> None:
        """Add the steps' weighted features to the sums, one feature after the other."""
        newest = len(timed) - 1
        roots = [_FORGETTING ** ((newest - at) / 2) for at in range(len(timed))]
        weights = [root / seconds for root, (_, seconds) in zip(roots, timed, strict=True)]
        columns = [
            list(map(mul, weights, column))
            for column in zip(*(_features(step) for step, _ in timed), strict=True)
        ]
        kept = _FORGETTING ** len(timed)
        for i, column in enumerate(columns):
            products = self._products[i]
            for j, other in enumerate(columns):
                products[j] = kept * products[j] + sum(map(mul, column, other))
            self._targets[i] = kept * self._targets[i] + sum(map(mul, column, roots))

    def _settle(self, sweeps: int) -> None:
        for _ in range(sweeps):
            if self._descend() < _SETTLED:
                break

    def _descend(self) -> float:
        """One sweep; returns the greatest change of a share, relative to what it was."""
        shares, most = self._shares, 0.0
        for i, products in enumerate(self._products):
            if products[i] < _FORGOTTEN:
                continue
            off = self._targets[i] - sum(map(mul, products, shares))
            share = max(0.0, shares[i] + off / products[i])
            most = max(most, abs(share - shares[i]) / (shares[i] or 1.0))
            shares[i] = share
        return most


def _features(step: Step) -> tuple[float, ...]:
    return 1, step.tokens, step.requests, step.context, step.attention
