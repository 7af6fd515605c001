"""Online learning: a predictor that trains again, in the background, on the requests it served."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from filelock import FileLock, Timeout

from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
from loomserve.platform.lengths.predict.head import Head
from loomserve.platform.lengths.predict.prediction import COVERAGE, LengthQuery, Prediction
from loomserve.platform.lengths.predict.predictor import TrainedPredictor, margin
from loomserve.platform.lengths.training import learning, retrain
from loomserve.platform.lengths.training.learning import EndedRequests, Lessons, ObservedLength
from loomserve.platform.lengths.training.split import normalised
from loomserve.platform.lengths.training.versions import PredictorVersions, TrainingSet, Version

_logger = logging.getLogger(__name__)

Trainer = Callable[[str, TrainingSet], Head]

# Requests that ended, whose texts become features in the next period.
_WAITING = 2000


class Learner:
    """Predictor that serves the best version of its folder, and learns new ones.

    Any number of processes predict, one at a time learns. ``predict`` and ``observe`` may be called
    from any thread.
    """

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
        self._ended = EndedRequests(_WAITING, learning.FEWEST)
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
        """Record that the answer had ``tokens`` tokens. Returns at once.

        Only for answers that the model ended: one that ``max_tokens`` or its client cut off does
        not have the length that it would have had. ``key`` names the API key that asked, if any:
        none decides alone what is learnt for all.
        """
        predicted = math.inf if prediction is None else prediction.tokens
        self._ended.add(key, (query, predicted, tokens))

    def start(self) -> bool:
        """Start a thread that learns every 3 minutes until :meth:`close`; returns whether it does.

        If another process learns already, it takes over what that has learnt.
        """
        work = self.learn
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            work = self.take_over
        self._thread = threading.Thread(target=self._run, args=(work,), name="lengths", daemon=True)
        self._thread.start()
        return work == self.learn

    def take_over(self) -> None:
        """Serve the version that is current on disk.

        Raises:
            ConfigError: it cannot be read, or was trained with other embeddings.
        """
        self._lessons.next_period(self._clock())
        number = self._versions.current_number()
        if number is not None and number != self.version:
            self._serve(self._versions.read(number), None)

    def close(self) -> None:
        """Stop learning, without waiting for a training that is under way."""
        self._stop.set()
        self._lock.release()

    def learn(self) -> None:
        """Carry out one period of learning, if it is due. Training blocks for seconds.

        Raises:
            LoomserveError: a version could not be trained or written; the current one serves on.
        """
        if not self._lessons.next_period(self._clock()):
            return
        self._take_observed()
        if self._parent and learning.worse(self._head, self._parent, self._lessons.since):
            self._roll_back()
        self._calibrate()
        training = self._lessons.added_to(self._version.training)
        if training is not None:
            candidate = self._train(self._version.fitted.kind, training)
            if learning.better(candidate, self._head, self._lessons.held_out):
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
        if self._version.has_learnt and len(self._lessons.held_out) >= learning.FEWEST:
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
