"""When a predictor learns, from what, and whether it was any good: pure decisions.

Magnus: every 3 minutes, requests whose prediction was off by more than 10 tokens and by more than
10 % join the training set, and the forest is trained again. UELLM queues its mistakes likewise.
Mistakes alone are no sample of the traffic, so three things are added. A quarter of the texts is
never learnt from: on those, a candidate must be better than what it replaces, and on those it is
calibrated. What was learnt earlier weighs less each time, else an application that changes its ways
is held back by its past. And a version that proves worse than the one before it goes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from loomserve.platform.lengths.predict.embedding import Floats
from loomserve.platform.lengths.predict.head import Head
from loomserve.platform.lengths.training.split import fold
from loomserve.platform.lengths.training.versions import TrainingSet

PERIOD_S = 180.0
_OFF_TOKENS, _OFF_SHARE = 10, 0.1
_HELD_OUT = 4
_FADE = 0.5
# Of what is old, so that applications that are quiet for long are not forgotten.
_LEAST = 0.05
_CAPACITY = 10_000
_RECENT = 300
FEWEST = 20
"""Requests on which versions are compared, at least."""
_WORSE = 1.05


@dataclass(frozen=True, slots=True)
class ObservedLength:
    """A request that has ended.

    Attributes:
        features: As the predictor sees it.
        predicted: What was predicted, in tokens.
        tokens: What its answer had.
        text: A digest of its normalised text: equal ones are all learnt from, or none.
    """

    features: Floats
    predicted: float
    tokens: int
    text: str


def is_off(predicted: float, tokens: int) -> bool:
    """By more than 10 tokens and by more than 10 % of the answer."""
    error = abs(predicted - tokens)
    return error > _OFF_TOKENS and error > _OFF_SHARE * tokens


class Lessons:
    """Outcomes on their way into the training set. Times are seconds of one clock."""

    def __init__(self, now: float) -> None:
        self._last = now
        self._new = False
        self._off: deque[ObservedLength] = deque(maxlen=_CAPACITY)
        self._held_out: deque[ObservedLength] = deque(maxlen=_RECENT)
        self._since: deque[ObservedLength] = deque(maxlen=_RECENT)

    def add(self, outcome: ObservedLength) -> None:
        self._since.append(outcome)
        if fold(outcome.text, _HELD_OUT) == 0:
            self._held_out.append(outcome)
        elif is_off(outcome.predicted, outcome.tokens):
            self._off.append(outcome)
            self._new = True

    @property
    def held_out(self) -> Collection[ObservedLength]:
        """The latest outcomes that are never learnt from."""
        return self._held_out

    @property
    def since(self) -> Collection[ObservedLength]:
        """The latest outcomes since the current version serves; it was trained on none."""
        return self._since

    def waits(self, now: float) -> float:
        """Seconds until the next period."""
        return max(0.0, self._last + PERIOD_S - now)

    def next_period(self, now: float) -> bool:
        """Whether it is time; if so, the next period begins."""
        if self.waits(now):
            return False
        self._last = now
        return True

    def added_to(self, training: TrainingSet) -> TrainingSet | None:
        """What to train on; None if there is nothing new to learn, or too little held out to tell
        whether it was learnt. What a candidate failed to learn is in the next one's set, too."""
        if not self._new or len(self._held_out) < FEWEST:
            return None
        self._new = False
        return _joined(training, list(self._off))

    def changed(self) -> None:
        """Another version serves from now on, and makes mistakes of its own."""
        self._off.clear()
        self._since.clear()
        self._new = False


def better(candidate: Head, current: Head, outcomes: Collection[ObservedLength]) -> bool:
    """Whether a candidate may replace the current head, by both's error on held-out requests."""
    return len(outcomes) >= FEWEST and error(candidate, outcomes) < error(current, outcomes)


def worse(current: Head, parent: Head, since: Collection[ObservedLength]) -> bool:
    """Whether the current head must go back to its parent: on traffic that came after both."""
    return len(since) >= FEWEST and error(current, since) > _WORSE * error(parent, since)


def error(head: Head, outcomes: Collection[ObservedLength]) -> float:
    """Mean absolute error in tokens."""
    return float(np.mean([abs(head.guess(o.features).tokens - o.tokens) for o in outcomes]))


def _joined(training: TrainingSet, lessons: list[ObservedLength]) -> TrainingSet:
    """The newest at weight 1, earlier ones at less; the oldest beyond the capacity are dropped."""
    faded = np.maximum(training.weights * _FADE, _LEAST)
    weights = np.concatenate((faded, np.ones(len(lessons))))
    rows = np.concatenate((training.rows, np.array([lesson.features for lesson in lessons])))
    tokens = np.concatenate((training.tokens, np.array([lesson.tokens for lesson in lessons])))
    return TrainingSet(rows[-_CAPACITY:], tokens[-_CAPACITY:], weights[-_CAPACITY:])
