"""How long a line's prompt and answer are expected to be.

The lane makes :class:`LineLengths` for each batch and tells it of every line that has finished, and
of what was predicted from lines' texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from loomserve.platform.batch.policy.lines import BatchLine

# Before anything of a batch is known, its prompts are taken to be long in tokens ...
_BYTES_PER_TOKEN = 3.0
# ... and its answers as long as they may be; this many finished lines are taken for the rest.
_ENOUGH = 8
# Beyond the mean: of a normal distribution 99.9 % are shorter.
_DEVIATIONS = 3.0


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens of one line: of its prompt, and of each answer, expected and at most."""

    prompt: int
    tokens: float
    high: float


class LineLengths:
    """What was predicted from a line's text; without that, the mean and the spread of what this
    batch's finished lines took (Welford's algorithm)."""

    def __init__(self) -> None:
        self._estimated: dict[int, Length] = {}
        self._lines = 0
        self._mean = 0.0
        self._squares = 0.0
        self._bytes = 0
        self._prompt_tokens = 0

    def set_estimates(self, found: Mapping[int, Length]) -> None:
        """Predictions from their texts, by the lines' numbers."""
        self._estimated.update(found)

    def predict(self, line: BatchLine, longest: int) -> Length:
        """``longest`` is the model's bound of prompt and answer, where the line gives none."""
        estimated = self._estimated.get(line.number)
        prompt = min(longest, estimated.prompt if estimated else self._prompt(line))
        most = longest - prompt if line.max_tokens is None else min(line.max_tokens, longest)
        if estimated is not None:
            return Length(prompt, min(most, estimated.tokens), min(most, estimated.high))
        if self._lines < _ENOUGH:
            return Length(prompt, most, most)
        deviation = math.sqrt(self._squares / (self._lines - 1))
        high = self._mean + _DEVIATIONS * deviation
        return Length(prompt, min(most, self._mean), min(most, high))

    def finished(self, line: BatchLine, prompt_tokens: int, tokens: float) -> None:
        """What a line took: its prompt, and one answer of it on average."""
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
