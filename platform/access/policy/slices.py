"""How much of a limit each gateway gets: as much as it asks for, or all the same."""

from __future__ import annotations

import math
from collections.abc import Mapping


def slices(demands: Mapping[str, float], limit: float) -> dict[str, float]:
    """Divide a limit by demand, max-min fair; the sum is the limit.

    Nobody gets less than its demand while another gets more than an equal part. What nobody asks
    for is divided evenly, so that whoever asks next has some.
    """
    given, left, asking = dict[str, float](), max(0.0, limit), len(demands)
    for name, demand in sorted(demands.items(), key=lambda each: (each[1], each[0])):
        given[name] = min(max(0.0, demand), left / asking)
        left -= given[name]
        asking -= 1
    return {name: part + left / len(demands) for name, part in given.items()}


def whole_slices(demands: Mapping[str, float], limit: int, turn: int) -> dict[str, int]:
    """The same in whole units, of which those that cannot be divided go round with the turns."""
    parts = slices(demands, limit)
    whole = {name: math.floor(part) for name, part in parts.items()}
    odd = max(0, limit) - sum(whole.values())
    names = sorted(parts)

    def first(name: str) -> tuple[bool, int]:
        waits = demands[name] > whole[name]
        return not waits, (names.index(name) + turn) % len(names)

    for name in sorted(names, key=first)[:odd]:
        whole[name] += 1
    return whole
