"""Online learning: a predictor that trains again, in the background, on the requests it served.

Magnus: every 3 minutes, requests whose prediction was off by more than 10 tokens and by more than
10 % join the training set, and the forest is trained again. UELLM queues its mistakes likewise.
Mistakes alone are no sample of the traffic, so three things are added. A quarter of the texts is
held out: on these a candidate must be better than the current version, and on these it is
calibrated. The weight of earlier samples falls with each training, so that an application that
changes is not held back by its past. And a version that proves worse than its parent is rolled
back.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np
from filelock import FileLock, Timeout

from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.lengths.predict.embedding import Floats, TokenEmbeddings
from loomserve.platform.lengths.predict.head import Head
from loomserve.platform.lengths.predict.prediction import COVERAGE, LengthQuery, Prediction
from loomserve.platform.lengths.predict.predictor import TrainedPredictor, margin
from loomserve.platform.lengths.training import retrain
from loomserve.platform.lengths.training.samples import fold, normalised
from loomserve.platform.lengths.training.versions import PredictorVersions, TrainingSet, Version

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
    """Requests that ended since the last round of learning; may be used from any thread. Learning
    from all alike would let one API key decide what is predicted for the others."""

    def __init__(self, most: int, fewest: int) -> None:
        """At most ``most`` requests wait; beyond them the key with the most loses its oldest. Of
        one key ``fewest`` are taken in a round whatever the others do."""
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
        """The requests of a round, after which none wait. A key that has more than all others
        together gives its latest as many. As long as one key alone has asked, it gives all."""
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
    """The real length of an answer beside its prediction. ``predicted`` is infinite where nothing
    was predicted. ``text`` is the digest of the request's normalised text; equal texts are all held
    out, or none."""

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


_logger = logging.getLogger(__name__)

Trainer = Callable[[str, TrainingSet], Head]

# Requests that ended, whose texts become features in the next period.
_WAITING = 2000


class Learner:
    """Predictor that serves the best version of its folder, and learns new ones. Any number of
    processes predict, one at a time learns. ``predict`` and ``observe`` may be called from any
    thread."""

    def __init__(
        self,
        versions: PredictorVersions,
        version: Version,
        embeddings: TokenEmbeddings,
        *,
        clock: Callable[[], float] = time.monotonic,
        train: Trainer = retrain.in_own_process,
    ) -> None:
        """Raises ``ConfigError`` if the version was trained with other embeddings."""
        self._versions = versions
        self._embeddings = embeddings
        self._clock = clock
        self._train = train
        self._lock = FileLock(versions.folder / "learner.lock", thread_local=False)
        self._lessons = Lessons(clock())
        self._ended = EndedRequests(_WAITING, FEWEST)
        self._stop = threading.Event()
        self._predictor: TrainedPredictor | None = None
        self._serve(version, _parent(versions, version))

    @property
    def version(self) -> int:
        return self._version.number

    def count(self, text: str) -> int:
        """Number of tokens of a text, by the tokenizer that the predictor was trained with."""
        return self._embeddings.tokens(text)

    def predict(self, query: LengthQuery) -> Prediction | None:
        """None: it has not learnt anything yet."""
        predictor = self._predictor
        return None if predictor is None else predictor.predict(query)

    def observe(
        self, query: LengthQuery, prediction: Prediction | None, tokens: int, key: str = ""
    ) -> None:
        """Record that the answer had ``tokens`` tokens. Returns at once. Only for answers that the
        model ended: one that ``max_tokens`` or its client cut off does not have the length that it
        would have had. ``key`` names the API key that asked, if any: none decides alone what is
        learnt for all."""
        predicted = math.inf if prediction is None else prediction.tokens
        self._ended.add(key, (query, predicted, tokens))

    def start(self) -> bool:
        """Start a thread that learns every 3 minutes until :meth:`close`; returns whether it does.
        If another process learns already, it takes over what that has learnt."""
        work = self.learn
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            work = self.take_over
        self._thread = threading.Thread(target=self._run, args=(work,), name="lengths", daemon=True)
        self._thread.start()
        return work == self.learn

    def take_over(self) -> None:
        """Serve the version that is current on disk. Raises ConfigError if it cannot be read, or
        was trained with other embeddings."""
        self._lessons.next_period(self._clock())
        number = self._versions.current_number()
        if number is not None and number != self.version:
            self._serve(self._versions.read(number), None)

    def close(self) -> None:
        """Stop learning, without waiting for a training that is under way."""
        self._stop.set()
        self._lock.release()

    def learn(self) -> None:
        """Carry out one period of learning, if it is due. Training blocks for seconds. Raises
        LoomserveError if a version could not be trained or written; the current one serves on."""
        if not self._lessons.next_period(self._clock()):
            return
        self._take_observed()
        if self._parent and worse(self._head, self._parent, self._lessons.since):
            self._roll_back()
        self._calibrate()
        training = self._lessons.added_to(self._version.training)
        if training is not None:
            candidate = self._train(self._version.fitted.kind, training)
            if better(candidate, self._head, self._lessons.held_out):
                self._promote(candidate, training)

    @property
    def _head(self) -> Head:
        return self._version.fitted.head

    def _run(self, work: Callable[[], None]) -> None:
        while not self._stop.wait(self._lessons.waits(self._clock())):
            try:
                work()
            except (LoomserveError, OSError) as error:
                _logger.warning("length predictor %d goes on as it is: %s", self.version, error)

    def _take_observed(self) -> None:
        for query, predicted, tokens in self._ended.take():
            text = normalised(f"{query.instruction} {query.user_input}")
            digest = hashlib.sha256(text.encode()).hexdigest()
            features = self._features(query)
            self._lessons.add(ObservedLength(features, predicted, tokens, digest))

    def _promote(self, candidate: Head, training: TrainingSet) -> None:
        old = self._version.fitted
        fitted = replace(old, head=candidate, margin=self._margin(candidate))
        version = self._versions.publish(fitted, training)
        _logger.info("length predictor %d proved better than %d", version.number, self.version)
        self._serve(version, old.head)

    def _roll_back(self) -> None:
        version = self._versions.roll_back(self._version)
        _logger.warning(
            "length predictor %d was worse on %d requests, back to %d",
            self.version,
            len(self._lessons.since),
            version.number,
        )
        self._serve(version, None)

    def _calibrate(self) -> None:
        """Calibrate the current version on the latest requests, even if no new version follows."""
        if self._version.has_learnt and len(self._lessons.held_out) >= FEWEST:
            fitted = replace(self._version.fitted, margin=self._margin(self._head))
            self._predictor = TrainedPredictor(fitted, self._embeddings)

    def _margin(self, head: Head) -> float:
        held_out = self._lessons.held_out
        guesses = [head.guess(outcome.features) for outcome in held_out]
        return margin(guesses, [outcome.tokens for outcome in held_out], COVERAGE)

    def _serve(self, version: Version, parent: Head | None) -> None:
        predictor = TrainedPredictor(version.fitted, self._embeddings)
        self._features = predictor.features
        # Other threads look at this alone.
        self._predictor = predictor if version.has_learnt else None
        self._version, self._parent = version, parent
        self._lessons.changed()


def _parent(versions: PredictorVersions, version: Version) -> Head | None:
    """The head to go back to from ``version``; None: it has no parent with the same features."""
    if version.parent is None:
        return None
    try:
        parent = versions.read(version.parent).fitted
    except LoomserveError:  # removed since
        return None
    same = (parent.kind, parent.embeddings) == (version.fitted.kind, version.fitted.embeddings)
    return parent.head if same else None
