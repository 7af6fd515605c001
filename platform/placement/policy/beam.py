"""Beam search over orders of devices, for graphs with too many states for :mod:`exact`.

Stages are added one by one, each as full as its memory and the bound allow. Of the partial
pipelines of each length, ``WIDTH`` are kept: half of them have the most layers placed, which finds
a pipeline within a tight bound; half have the least expected latency, with the remaining layers at
the speed of the fastest devices left. A whole pipeline has more room than layers; its slowest
stages then give up layers, which is optimal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from loomserve.platform.placement.policy.graph import Pipeline, latency_s
from loomserve.platform.placement.policy.kinds import Caps, Floats, Ints, Kinds

WIDTH = 128
_ENDS = 24


@dataclass
class _Partial:
    """Partial pipelines of one length, one a row."""

    order: Ints
    used: Ints
    placed: Ints
    latency: Floats


class _Whole(NamedTuple):
    order: list[int]
    latency: float
    """Latency with every stage full."""


def fewest_stages(kinds: Kinds, bound: float) -> int | None:
    """As in :mod:`exact`, but it may miss pipelines."""
    caps = kinds.caps(bound)
    return next((len(whole.order) for whole in _whole(kinds, caps, kinds.most_stages)), None)


def quickest(kinds: Kinds, bound: float, most_stages: int) -> Pipeline | None:
    """As in :mod:`exact`, but it may miss better pipelines."""
    caps = kinds.caps(bound)
    found = (
        filled(kinds, caps, whole.order)
        for whole in _whole(kinds, caps, min(most_stages, kinds.most_stages))
    )
    return min(
        found, key=lambda pipeline: latency_s(kinds.demand, kinds.graph, pipeline), default=None
    )


def filled(kinds: Kinds, caps: Caps, order: Sequence[int]) -> Pipeline:
    """The pipeline of least latency within the caps, on devices of these kinds in this order. Every
    device has at least one layer; the others go to the fastest devices, up to their caps."""
    most = _most(caps, order)
    layers = [1] * len(order)
    left = kinds.demand.layers - len(order)
    for place in sorted(range(len(order)), key=lambda place: kinds.layer_s[order[place]]):
        more = min(left, most[place] - 1)
        layers[place] += more
        left -= more
    return kinds.pipeline(order, layers)


def _most(caps: Caps, order: Sequence[int]) -> list[int]:
    if len(order) == 1:
        return [int(caps.only[order[0]])]
    pairs = list(pairwise(order))
    return [
        int(caps.first[order[0]]),
        *(int(caps.middle[pair]) for pair in pairs[:-1]),
        int(caps.last[pairs[-1]]),
    ]


def _whole(kinds: Kinds, caps: Caps, most_stages: int) -> Iterator[_Whole]:
    """Pipelines that hold all layers, the shortest first."""
    layers = kinds.demand.layers
    for kind in np.flatnonzero(caps.only >= layers):
        yield _Whole([int(kind)], 0.0)
    partial = _started(kinds, caps)
    for stages in range(1, most_stages):
        if not len(partial.placed):
            return
        yield from _ended(kinds, caps, partial)
        if stages + 1 < most_stages:
            partial = _grown(kinds, caps, partial)


def _started(kinds: Kinds, caps: Caps) -> _Partial:
    there = np.flatnonzero(caps.first > 0)
    placed = caps.first[there]
    seconds = kinds.stage_s + kinds.first_s
    return _Partial(
        order=there[:, None],
        used=np.eye(len(kinds.members), dtype=np.int64)[there],
        placed=placed,
        latency=seconds[there] + placed * kinds.layer_s[there],
    )


def _next(
    kinds: Kinds, caps: Ints, partial: _Partial, extra_s: Floats
) -> tuple[Ints, Ints, Ints, Floats]:
    """Rows and kinds of the stages that can follow, and the layers placed and latencies then."""
    last = partial.order[:, -1]
    more = caps[last]
    rows, following = np.nonzero((partial.used < kinds.counts) & (more > 0))
    added = more[rows, following]
    seconds = kinds.links[last[rows], following] + (kinds.stage_s + extra_s)[following]
    latency = partial.latency[rows] + seconds + added * kinds.layer_s[following]
    return rows, following, partial.placed[rows] + added, latency


def _ended(kinds: Kinds, caps: Caps, partial: _Partial) -> list[_Whole]:
    rows, following, placed, latency = _next(kinds, caps.last, partial, kinds.last_s)
    ends = np.flatnonzero(placed >= kinds.demand.layers)
    surplus = placed[ends] - kinds.demand.layers
    # Surplus layers are given up at about the speed of the last stage.
    expected = latency[ends] - surplus * kinds.layer_s[following[ends]]
    best = ends[np.argsort(expected, kind="stable")[:_ENDS]]
    return [
        _Whole([*map(int, partial.order[rows[end]]), int(following[end])], float(latency[end]))
        for end in best
    ]


def _grown(kinds: Kinds, caps: Caps, partial: _Partial) -> _Partial:
    """The best partial pipelines of one stage more; only these are made."""
    none = np.zeros(len(kinds.members))
    rows, following, placed, latency = _next(kinds, caps.middle, partial, none)
    kept = _distinct(partial.used, rows, following, placed, latency)
    rows, following, placed, latency = rows[kept], following[kept], placed[kept], latency[kept]
    left = np.maximum(0, kinds.demand.layers - placed)
    fastest = _fastest_left(kinds, partial.used, rows, following)
    expected = latency + np.where(left > 0, left * fastest, 0.0)
    by_layers = np.lexsort((latency, -placed))[: WIDTH // 2]
    by_latency = np.argsort(expected, kind="stable")[: WIDTH // 2]
    best = np.union1d(by_layers, by_latency)
    rows, following = rows[best], following[best]
    used = partial.used[rows]
    used[np.arange(len(rows)), following] += 1
    return _Partial(
        order=np.column_stack([partial.order[rows], following]),
        used=used,
        placed=placed[best],
        latency=latency[best],
    )


def _fastest_left(kinds: Kinds, used: Ints, rows: Ints, following: Ints) -> Floats:
    """Seconds of a layer on the fastest device that is left once the next one is used."""
    left = np.where(used < kinds.counts, kinds.layer_s, np.inf)
    every = np.arange(len(used))
    first = left.argmin(axis=1)
    without = left.copy()
    without[every, first] = np.inf
    is_last = used[every, first] + 1 == kinds.counts[first]
    takes_it = is_last[rows] & (first[rows] == following)
    fastest: Floats = np.where(takes_it, without.min(axis=1)[rows], left[every, first][rows])
    return fastest


def _distinct(used: Ints, rows: Ints, following: Ints, placed: Ints, latency: Floats) -> Ints:
    """Of those on the same devices with the same last one, the one with the most layers."""
    order = np.lexsort((latency, -placed))
    # Equal sums of random weights mean equal counts, but for a chance of about one in 2⁶⁴.
    weights = np.random.default_rng(0).integers(2**62, size=used.shape[1] + 1)
    devices = (used @ weights[1:])[rows] + weights[1:][following]
    keys = (devices + following * weights[0])[order]
    _, first = np.unique(keys, return_index=True)
    kept: Ints = order[first]
    return kept
