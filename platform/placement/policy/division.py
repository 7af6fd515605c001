"""Divides the cores of a machine into devices.

Decoding reads all weights for each token, so that an engine is bound by memory and gains little
from many cores; on a device of its own it waits for nobody. So devices are small: a core each where
there are few, and never more than eight. But there are at least four where there are so many cores,
for engines that spread over them, and lend to one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_MOST_CORES = 8
_FEW_DEVICES = 4


def divided(cores: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The cores of each device, of those given by the memory that they are next to; all have about
    as many, and none is next to two memories."""
    size = cores_a_device(sum(map(len, cores)))
    return [run for group in cores for run in _runs(group, max(1, len(group) // size))]


def cores_a_device(cores: int) -> int:
    """How many cores a device has, of so many: a power of two."""
    size = 1
    while size < _MOST_CORES and cores >= 2 * size * _FEW_DEVICES:
        size *= 2
    return size


def _runs(cores: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Consecutive runs whose lengths differ by one at most."""
    bounds = [at * len(cores) // count for at in range(count + 1)]
    return [tuple(cores[low:high]) for low, high in pairwise(bounds) if high > low]
