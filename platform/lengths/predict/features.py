"""What predictors see of a request: a vector of numbers instead of its text."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable

import numpy as np

from loomserve.platform.lengths.predict.embedding import Floats, TokenEmbeddings
from loomserve.platform.lengths.predict.prediction import LengthQuery

Features = Callable[[LengthQuery], Floats]

_APP_GROUPS, _USER_GROUPS = 4, 16
_WORDS = re.compile(r"\w+")
_HASHED = 2048


def compressed(embedding: Floats, groups: int) -> Floats:
    """Group sums over the square root of the group's size, shape ``[groups]`` (Magnus).

    Groups are of neighbouring dimensions, in size equal or one apart.
    """
    starts = np.arange(groups) * len(embedding) // groups
    sizes = np.diff(starts, append=len(embedding))
    sums: Floats = np.add.reduceat(embedding, starts) / np.sqrt(sizes, dtype=np.float32)
    return sums


def magnus(embeddings: TokenEmbeddings) -> Features:
    """Instruction in 4 values, user's input in 16, and the input's length, shape ``[21]``."""

    def features(query: LengthQuery) -> Floats:
        app = compressed(embeddings.mean(query.instruction), _APP_GROUPS)
        user = compressed(embeddings.mean(query.user_input), _USER_GROUPS)
        return np.concatenate((app, user, length(query)))

    return features


def uellm(embeddings: TokenEmbeddings) -> Features:
    """The whole prompt's embedding and the logarithm of its length, ``[dimensions + 1]``."""

    def features(query: LengthQuery) -> Floats:
        whole = embeddings.mean(f"{query.instruction}\n{query.user_input}".strip())
        return np.append(whole, np.float32(math.log1p(query.input_tokens)))

    return features


def words(query: LengthQuery) -> Floats:
    """The prompt's words, hashed and counted (square roots), and its length's logarithm."""
    vector = np.zeros(_HASHED + 1, np.float32)
    for word in _WORDS.findall(f"{query.instruction} {query.user_input}".lower())[:1000]:
        vector[zlib.crc32(word.encode()) % _HASHED] += 1
    vector = np.sqrt(vector)
    vector[-1] = math.log1p(query.input_tokens)
    return vector


def length(query: LengthQuery) -> Floats:
    """The input's length alone, shape ``[1]``."""
    return np.array([query.input_tokens], np.float32)


def app(query: LengthQuery) -> Floats:
    """Which application asks: its instruction as a number of 24 bits, shape ``[1]``."""
    return np.array([zlib.crc32(query.instruction.encode()) & 0xFFFFFF], np.float32)
