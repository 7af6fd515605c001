"""Expected lengths of lines' prompts and answers.

The lane has a :class:`LineLengths` for each batch, and feeds it with lines that have finished and
with predictions from lines' texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from loomserve.platform.batch.policy.lines import BatchLine

# Without finished lines, prompts are taken to be long in tokens ...
_BYTES_PER_TOKEN = 3.0
# ... and answers as long as they may be. So many finished lines stand for the rest.
_ENOUGH = 8
# Standard deviations beyond the mean: 99.9 % of a normal distribution are shorter.
_DEVIATIONS = 3.0


@dataclass(frozen=True, slots=True)
class LineLength:
    """Tokens of a line's prompt, and of each answer: expected (``tokens``), at most (``high``)."""

    prompt: int
    tokens: float
    high: float


class LineLengths:
    """Lengths of one batch's lines: predictions from their texts where there are any. Else the mean
    and the spread of the batch's finished lines (Welford's algorithm)."""

    def __init__(self) -> None:
        self._estimated: dict[int, LineLength] = {}
        self._lines = 0
        self._mean = 0.0
        self._squares = 0.0
        self._bytes = 0
        self._prompt_tokens = 0

    def set_estimates(self, found: Mapping[int, LineLength]) -> None:
        self._estimated.update(found)

    def predict(self, line: BatchLine, longest: int) -> LineLength:
        """Predict a line's length; ``longest``: the model's bound of prompt and answer together."""
        estimated = self._estimated.get(line.number)
        prompt = min(longest, estimated.prompt if estimated else self._prompt(line))
        most = longest - prompt if line.max_tokens is None else min(line.max_tokens, longest)
        if estimated is not None:
            return LineLength(prompt, min(most, estimated.tokens), min(most, estimated.high))
        if self._lines < _ENOUGH:
            return LineLength(prompt, most, most)
        deviation = math.sqrt(self._squares / (self._lines - 1))
        high = self._mean + _DEVIATIONS * deviation
        return LineLength(prompt, min(most, self._mean), min(most, high))

    def finished(self, line: BatchLine, prompt_tokens: int, tokens: float) -> None:
        """Learn from a finished line: tokens of its prompt, and of one answer on average."""
        self._estimated.pop(line.number, None)
        self._lines += 1
        off = tokens - self._mean
        self._mean += off / self._lines
        self._squares += off * (tokens - self._mean)
        self._bytes += line.size
        self._prompt_tokens += prompt_tokens

    def _prompt(self, line: BatchLine) -> int:
        if self._lines < _ENOUGH or not self._prompt_tokens:
            return math.ceil(line.size / _BYTES_PER_TOKEN)
        return math.ceil(line.size * self._prompt_tokens / self._bytes)
