"""Policy of online learning: when to train, on which requests, and which version to keep.

Magnus: every 3 minutes, requests whose prediction was off by more than 10 tokens and by more than
10 % join the training set, and the forest is trained again. UELLM queues its mistakes likewise.
Mistakes alone are no sample of the traffic, so three things are added. A quarter of the texts is
held out: on these a candidate must be better than the current version, and on these it is
calibrated. The weight of earlier samples falls with each training, so that an application that
changes is not held back by its past. And a version that proves worse than its parent is rolled
back.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from loomserve.platform.lengths.predict.embedding import Floats
from loomserve.platform.lengths.predict.head import Head
from loomserve.platform.lengths.predict.prediction import LengthQuery
from loomserve.platform.lengths.training.split import fold
from loomserve.platform.lengths.training.versions import TrainingSet

EndedRequest = tuple[LengthQuery, float, int]
"""Query of a request that ended, and predicted and real tokens of its answer."""
PERIOD_S = 180.0
_OFF_TOKENS, _OFF_SHARE = 10, 0.1
_HELD_OUT = 4
_FADE = 0.5
# Weight of the oldest samples, so that applications that are quiet for long are not forgotten.
_LEAST = 0.05
_CAPACITY = 10_000
_RECENT = 300
FEWEST = 20
"""The fewest requests on which versions are compared."""
_WORSE = 1.05


class EndedRequests:
    """Requests that ended since the last round of learning; may be used from any thread.

    Learning from all alike would let one API key decide what is predicted for the others.
    """

    def __init__(self, most: int, fewest: int) -> None:
        """At most ``most`` requests wait; beyond them the key with the most loses its oldest.

        Of one key ``fewest`` are taken in a round whatever the others do.
        """
        self._most = most
        self._fewest = fewest
        self._waiting: dict[str, deque[EndedRequest]] = {}
        self._keys: set[str] = set()
        self._lock = threading.Lock()

    def add(self, key: str, request: EndedRequest) -> None:
        """``key``: name of the API key; empty where none is needed."""
        with self._lock:
            self._keys.add(key)
            self._waiting.setdefault(key, deque()).append(request)
            if sum(map(len, self._waiting.values())) > self._most:
                max(self._waiting.values(), key=len).popleft()

    def take(self) -> list[EndedRequest]:
        """The requests of a round, after which none wait.

        A key that has more than all others together gives its latest as many. As long as one key
        alone has asked, it gives all.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            alone = len(self._keys) < 2
        total = sum(map(len, waiting.values()))
        taken: list[EndedRequest] = []
        for requests in waiting.values():
            others = total - len(requests)
            skipped = 0 if alone else len(requests) - max(others, self._fewest)
            taken += [*requests][max(0, skipped) :]
        return taken


@dataclass(frozen=True, slots=True)
class ObservedLength:
    """The real length of an answer beside its prediction.

    ``predicted`` is infinite where nothing was predicted. ``text`` is the digest of the request's
    normalised text; equal texts are all held out, or none.
    """

    features: Floats
    predicted: float
    tokens: int
    text: str


def is_off(predicted: float, tokens: int) -> bool:
    error = abs(predicted - tokens)
    return error > _OFF_TOKENS and error > _OFF_SHARE * tokens


class Lessons:
    """Observed lengths on their way into the training set. Times are seconds of one clock."""

    def __init__(self, now: float) -> None:
        self._last = now
        self._new = False
        self._off: deque[ObservedLength] = deque(maxlen=_CAPACITY)
        self.held_out: deque[ObservedLength] = deque(maxlen=_RECENT)
        """The latest observed lengths that are held out of training."""
        self.since: deque[ObservedLength] = deque(maxlen=_RECENT)
        """The latest lengths observed since the current version serves; it was trained on none."""

    def add(self, observed: ObservedLength) -> None:
        self.since.append(observed)
        if fold(observed.text, _HELD_OUT) == 0:
            self.held_out.append(observed)
        elif is_off(observed.predicted, observed.tokens):
            self._off.append(observed)
            self._new = True

    def waits(self, now: float) -> float:
        return max(0.0, self._last + PERIOD_S - now)

    def next_period(self, now: float) -> bool:
        """Whether a period is due; if so, begin the next one."""
        if self.waits(now):
            return False
        self._last = now
        return True

    def added_to(self, training: TrainingSet) -> TrainingSet | None:
        """The next training set; None: there is nothing new to learn, or too little is held out to
        compare versions. Samples that a candidate failed to learn are in the next set, too.
        """
        if not self._new or len(self.held_out) < FEWEST:
            return None
        self._new = False
        return _joined(training, list(self._off))

    def changed(self) -> None:
        """Start afresh for another version, which makes mistakes of its own."""
        self._off.clear()
        self.since.clear()
        self._new = False


def better(candidate: Head, current: Head, observed: Collection[ObservedLength]) -> bool:
    """Whether to replace the current head by a candidate: by their errors on held-out requests."""
    return len(observed) >= FEWEST and error(candidate, observed) < error(current, observed)


def worse(current: Head, parent: Head, since: Collection[ObservedLength]) -> bool:
    """Whether to roll back to the parent: by their errors on requests that neither has seen."""
    return len(since) >= FEWEST and error(current, since) > _WORSE * error(parent, since)


def error(head: Head, observed: Collection[ObservedLength]) -> float:
    return float(np.mean([abs(head.guess(o.features).tokens - o.tokens) for o in observed]))


def _joined(training: TrainingSet, lessons: list[ObservedLength]) -> TrainingSet:
    """``training`` at less weight and ``lessons`` at 1; the oldest beyond capacity drop out."""
    faded = np.maximum(training.weights * _FADE, _LEAST)
    weights = np.concatenate((faded, np.ones(len(lessons))))
    rows = np.concatenate((training.rows, np.array([lesson.features for lesson in lessons])))
    tokens = np.concatenate((training.tokens, np.array([lesson.tokens for lesson in lessons])))
    return TrainingSet(rows[-_CAPACITY:], tokens[-_CAPACITY:], weights[-_CAPACITY:])
