"""Lower bounds of period and latency for all pipelines: optima of a simpler problem.

In it, every device has its best incoming link, and devices may be used in any order.
"""

from __future__ import annotations

import numpy as np

from loomserve.platform.placement.policy.kinds import Kinds


def least_period_s(kinds: Kinds, most_stages: int) -> float:
    """Lower bound of the period with at most ``most_stages`` stages; infinite: none fits."""
    kinds = kinds.by_best_link
    candidates = kinds.bounds()
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        if _room(kinds, float(candidates[middle]), most_stages) >= kinds.demand.layers:
            high = middle
        else:
            low = middle + 1
    return float(candidates[low]) if low < len(candidates) else np.inf


def _room(kinds: Kinds, bound: float, most_stages: int) -> int:
    """Layers within the bound; one device may be the first and another the last."""
    caps = kinds.caps(bound)
    alone = int(caps.only.max())
    middle = np.sort(np.repeat(caps.middle.max(axis=0), kinds.counts))[::-1]
    if most_stages < 2 or not caps.first.any() or not caps.last.any():
        return alone
    # Without the least two of the chosen ones, which are the ends.
    ends = int(caps.first.max()) + int(caps.last.max())
    return max(alone, int(middle[: most_stages - 2].sum()) + ends)


def least_latency_s(kinds: Kinds) -> float:
    """Lower bound of the latency: the fastest devices hold all they can, over the best links."""
    caps = kinds.by_best_link.caps(np.inf)
    ends = kinds.first_s.min() + kinds.last_s.min() + kinds.stage_s.min()
    left, seconds = kinds.demand.layers, float(ends)
    # A stage with neither embeddings nor head holds the most.
    room = np.maximum(caps.middle.max(axis=0), caps.only)
    for kind in np.argsort(kinds.layer_s, kind="stable"):
        taken = min(left, int(room[kind] * kinds.counts[kind]))
        seconds += taken * float(kinds.layer_s[kind])
        left -= taken
    return seconds if left == 0 else np.inf
