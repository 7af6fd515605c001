"""Length estimation in the gateway: predict when a request arrives, learn when its answer ends.

A prediction takes two milliseconds of processor time, and longer on a busy machine. So a thread
makes it, and a request whose prediction is late goes on without.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.lengths.predict.prediction import LengthQuery, Prediction, query_of
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.scheduling.policy.hints import Expected

if TYPE_CHECKING:
    from loomserve.platform.lengths.training.learner import Learner

_log = logging.getLogger("ray.serve")

_LIMIT_S = 0.03


@dataclass(frozen=True)
class Predicted:
    """A prediction, with the predictor and the query that are needed to learn from the answer. It
    is None as long as the predictor has not learnt anything."""

    predictor: Learner
    query: LengthQuery
    prediction: Prediction | None

    @property
    def expected(self) -> Expected | None:
        made = self.prediction
        return None if made is None else Expected(made.tokens, made.high)

    @property
    def median(self) -> float | None:
        return None if self.prediction is None else self.prediction.median


class LengthPredictions:
    """Length estimation of all models that have a predictor; used on the event loop only."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        *,
        open_one: Callable[[str], Learner] | None = None,
        limit_s: float = _LIMIT_S,
    ) -> None:
        self._metrics = metrics
        self._open_one = open_one or open_predictor
        self._limit_s = limit_s
        self._names: dict[str, str] = {}
        self._open: dict[str, Learner] = {}
        self._opening: dict[str, asyncio.Task[None]] = {}
        # One thread: requests that come faster than it predicts would be late anyway.
        self._thread = ThreadPoolExecutor(1, "predict-lengths")

    def set_models(self, names: Mapping[str, str]) -> None:
        """Set each model's predictor by name; close all others, and open new ones in a thread."""
        for model in list(self._names):
            if names.get(model) != self._names[model]:
                self._forget(model)
        for model, name in names.items():
            if model not in self._names:
                self._names[model] = name
                self._opening[model] = asyncio.create_task(self._start(model, name))

    async def predict(self, model: str, request: Mapping[str, Any]) -> Predicted | None:
        """Predict the length of the answer; None: there is no open predictor, or it was late."""
        predictor = self._open.get(model)
        if predictor is None:
            return None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limit_s):
                # A prediction that has not begun when its time is over is never made.
                predicted = await loop.run_in_executor(self._thread, _predict, predictor, request)
        except TimeoutError:
            self._metrics.length_predicted(model, "late")
            return None
        except Exception as error:
            # Whatever makes a predictor fail, the request can be served without it.
            _log.warning("no length was predicted for a request of model %s: %r", model, error)
            self._metrics.length_predicted(model, "failed")
            return None
        if predicted is not None:
            outcome = "untrained" if predicted.prediction is None else "made"
            self._metrics.length_predicted(model, outcome)
        return predicted

    def ended(self, model: str, predicted: Predicted, tokens: int, key: str) -> None:
        """Learn from an answer that ended by itself with ``tokens`` tokens. ``key``: name of the
        API key that asked; empty where none is needed."""
        if predicted.prediction is not None:
            self._metrics.length_observed(model, abs(predicted.prediction.tokens - tokens))
        predicted.predictor.observe(predicted.query, predicted.prediction, tokens, key)

    def close(self) -> None:
        for model in list(self._names):
            self._forget(model)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _start(self, model: str, name: str) -> None:
        try:
            predictor = await asyncio.to_thread(self._open_one, name)
        except (ConfigError, OSError) as error:
            # The predictor was there when the model was loaded.
            _log.error("lengths of model %s are not predicted: %s", model, error)
            return
        if self._names.get(model) != name:
            return
        self._open[model] = predictor
        if not predictor.start():
            _log.warning("length predictor %s learns elsewhere: here it follows", name)

    def _forget(self, model: str) -> None:
        del self._names[model]
        self._opening.pop(model).cancel()
        predictor = self._open.pop(model, None)
        if predictor is not None:
            predictor.close()


def open_predictor(name: str) -> Learner:
    # Imported here: a process without predictors needs neither numpy nor tokenizers.
    from loomserve.platform.lengths import stored

    return stored.open_predictor(name)


def _predict(predictor: Learner, request: Mapping[str, Any]) -> Predicted | None:
    query = query_of(request, predictor.count)
    return Predicted(predictor, query, predictor.predict(query)) if query else None
