"""Length estimation: predicts the tokens of answers from the text of a batch's lines.

A prediction takes milliseconds of processor time. A thread makes them, some at a time, in the order
of the queue; meanwhile lines start by what is known without predictions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from loomserve.platform.batch.folder import BatchFolder
from loomserve.platform.batch.live import LiveBatch
from loomserve.platform.batch.policy.lengths import LineLength
from loomserve.platform.batch.policy.lines import BatchLine, parse
from loomserve.platform.batch.policy.objects import BatchRecord
from loomserve.platform.lengths.predict.prediction import query_of
from loomserve.platform.lengths.service import open_predictor

if TYPE_CHECKING:
    from loomserve.platform.lengths.training.learner import Learner

_log = logging.getLogger("ray.serve")

# Lines that are read and predicted before the lane gets their lengths.
_AT_ONCE = 32


class LengthEstimator:
    """Estimator for all batches and models. It has one thread: engines need the processor."""

    def __init__(
        self, folder: BatchFolder, open_one: Callable[[str], Learner] | None = None
    ) -> None:
        self._folder = folder
        self._open_one = open_one or open_predictor
        self._thread = ThreadPoolExecutor(1, "length-estimation")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def estimate(self, batch: LiveBatch, model: str, predictor: str) -> None:
        """Predict the lengths of a batch's lines that wait for a model, with a named predictor.
        Errors are logged only: the batch can be computed without predictions."""
        loop = asyncio.get_running_loop()
        lines = batch.lines(model)
        try:
            opened = await loop.run_in_executor(self._thread, self._open_one, predictor)
            try:
                next_sort = _AT_ONCE
                for at in range(0, len(lines), _AT_ONCE):
                    found = await loop.run_in_executor(
                        self._thread, self._predict, opened, batch.record, lines[at : at + _AT_ONCE]
                    )
                    # Sorting looks at every line, so it is done ever more seldom.
                    batch.set_estimates(found)
                    if at + _AT_ONCE >= next_sort:
                        next_sort *= 2
                        batch.sort()
                batch.sort()
            finally:
                opened.close()
        except Exception as error:
            _log.warning(
                "lengths of %s are not predicted for model %s: %r", batch.record.id, model, error
            )

    def _predict(
        self, predictor: Learner, batch: BatchRecord, lines: Sequence[BatchLine]
    ) -> Mapping[int, LineLength]:
        found: dict[int, LineLength] = {}
        with self._folder.blob(batch.input_file_id).open("rb") as stream:
            for line in lines:
                stream.seek(line.offset)
                body = parse(stream.read(line.size))["body"]
                try:
                    length = _predicted(predictor, body)
                except Exception as error:
                    # The line can be computed without a prediction.
                    _log.warning("no length for line %d of %s: %r", line.number, batch.id, error)
                    continue
                if length is not None:
                    found[line.number] = length
        return found


def _predicted(predictor: Learner, body: Mapping[str, object]) -> LineLength | None:
    query = query_of(body, predictor.count)
    if query is None:
        return None
    predicted = predictor.predict(query)
    if predicted is None:
        return None
    return LineLength(query.input_tokens, predicted.tokens, predicted.high)
