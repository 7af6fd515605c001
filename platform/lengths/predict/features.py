"""Features of a request: the vector of numbers that a predictor sees instead of its text."""

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
    """An embedding compressed to ``groups`` values (Magnus), shape ``[groups]``. Each value is the
    sum of a group divided by the square root of the group's size. Groups are of neighbouring
    dimensions; their sizes differ by one at most."""
    starts = np.arange(groups) * len(embedding) // groups
    sizes = np.diff(starts, append=len(embedding))
    sums: Floats = np.add.reduceat(embedding, starts) / np.sqrt(sizes, dtype=np.float32)
    return sums


def magnus(embeddings: TokenEmbeddings) -> Features:
    """Magnus's features: 4 values of the instruction, 16 of the input, its length; ``[21]``."""

    def features(query: LengthQuery) -> Floats:
        app = compressed(embeddings.mean(query.instruction), _APP_GROUPS)
        user = compressed(embeddings.mean(query.user_input), _USER_GROUPS)
        return np.concatenate((app, user, length(query)))

    return features


def uellm(embeddings: TokenEmbeddings) -> Features:
    """UELLM's features: the prompt's embedding and log(1 + its length); ``[dimensions + 1]``."""

    def features(query: LengthQuery) -> Floats:
        whole = embeddings.mean(f"{query.instruction}\n{query.user_input}".strip())
        return np.append(whole, np.float32(math.log1p(query.input_tokens)))

    return features


def words(query: LengthQuery) -> Floats:
    """Square roots of the counts of the prompt's hashed words, and log(1 + its length)."""
    vector = np.zeros(_HASHED + 1, np.float32)
    for word in _WORDS.findall(f"{query.instruction} {query.user_input}".lower())[:1000]:
        vector[zlib.crc32(word.encode()) % _HASHED] += 1
    vector = np.sqrt(vector)
    vector[-1] = math.log1p(query.input_tokens)
    return vector


def length(query: LengthQuery) -> Floats:
    """The input's length in tokens alone, shape ``[1]``."""
    return np.array([query.input_tokens], np.float32)


def app(query: LengthQuery) -> Floats:
    """The application: a 24-bit hash of its instruction, shape ``[1]``."""
    return np.array([zlib.crc32(query.instruction.encode()) & 0xFFFFFF], np.float32)
