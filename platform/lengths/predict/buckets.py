"""UELLM's buckets of output lengths: [0, 8), [8, 16), [16, 32) ... [1024, 2048) (equation 3-1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

EDGES = np.array([0, *(2**power for power in range(3, 12))], np.float64)
"""Lower edges in tokens, and the upper edge of the last bucket."""

BUCKETS = len(EDGES) - 1


def bucket_of(tokens: ArrayLike) -> NDArray[np.int64]:
    """The bucket of each length; lengths beyond the last bucket belong to it."""
    return np.clip(np.searchsorted(EDGES, tokens, side="right") - 1, 0, BUCKETS - 1)
