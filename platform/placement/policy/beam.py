"""Good pipelines where the states are too many for :mod:`exact`: a beam over orders of devices.

Stages are added one by one, each as full as its memory and the bound allow. Of all the partial
pipelines of a length only ``WIDTH`` are kept: half of them those with the most layers placed, which
find a pipeline within a tight bound, half those with the least latency to be expected, the
remaining layers being counted at the speed of the fastest devices left. A whole pipeline has more
room than layers; which stages give up theirs is then chosen exactly, the slowest first.
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
    """Pipelines of one length that are not whole; a row each."""

    order: Ints
    used: Ints
    placed: Ints
    latency: Floats


class _Whole(NamedTuple):
    order: list[int]
    latency: float
    """With every stage full; only to choose which to look at first."""


def fewest_stages(kinds: Kinds, bound: float) -> int | None:
    """As in :mod:`exact`, but may miss pipelines."""
    caps = kinds.caps(bound)
    return next((len(whole.order) for whole in _whole(kinds, caps, kinds.most_stages)), None)


def quickest(kinds: Kinds, bound: float, most_stages: int) -> Pipeline | None:
    """As in :mod:`exact`, but may miss better ones."""
    caps = kinds.caps(bound)
    found = (
        filled(kinds, caps, whole.order)
        for whole in _whole(kinds, caps, min(most_stages, kinds.most_stages))
    )
    return min(
        found, key=lambda pipeline: latency_s(kinds.demand, kinds.graph, pipeline), default=None
    )


def filled(kinds: Kinds, caps: Caps, order: Sequence[int]) -> Pipeline:
    """The layers of a pipeline on devices of these kinds, for the least latency within the caps.

    Every device has one at least; the others go to the fastest, as many as it may have.
    """
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
    """Pipelines that hold all layers; the shortest first."""
    layers = kinds.demand.layers
    for kind in np.flatnonzero(caps.only >= layers):
        yield _Whole([int(kind)], 0.0)
    partial = _started(kinds, caps)
    for stages in range(1, most_stages):
        if not len(partial.placed):
            return
        yield from _ended(kinds, caps, partial)
        if stages + 1 < most_stages:
            partial = _pruned(kinds, _grown(kinds, caps, partial))


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
    """Rows and kinds of the stages that can follow, the layers then placed, and latencies."""
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
    # What is given up again is about as slow as the slowest stage.
    expected = latency[ends] - surplus * kinds.layer_s[following[ends]]
    best = ends[np.argsort(expected, kind="stable")[:_ENDS]]
    return [
        _Whole([*map(int, partial.order[rows[end]]), int(following[end])], float(latency[end]))
        for end in best
    ]


def _grown(kinds: Kinds, caps: Caps, partial: _Partial) -> _Partial:
    none = np.zeros(len(kinds.members))
    rows, following, placed, latency = _next(kinds, caps.middle, partial, none)
    used = partial.used[rows]
    used[np.arange(len(rows)), following] += 1
    return _Partial(
        order=np.column_stack([partial.order[rows], following]),
        used=used,
        placed=placed,
        latency=latency,
    )


def _pruned(kinds: Kinds, partial: _Partial) -> _Partial:
    partial = _distinct(partial)
    fastest = np.where(partial.used < kinds.counts, kinds.layer_s, np.inf).min(axis=1)
    left = np.maximum(0, kinds.demand.layers - partial.placed)
    expected = partial.latency + np.where(left > 0, left * fastest, 0.0)
    by_layers = np.lexsort((partial.latency, -partial.placed))[: WIDTH // 2]
    by_latency = np.argsort(expected, kind="stable")[: WIDTH // 2]
    return _rows(partial, np.union1d(by_layers, by_latency))


def _distinct(partial: _Partial) -> _Partial:
    """Of those on the same devices with the same last one, the one with the most layers."""
    order = np.lexsort((partial.latency, -partial.placed))
    # Equal random weights mean equal counts, but for one chance in 2⁶⁴ or so.
    weights = np.random.default_rng(0).integers(2**62, size=partial.used.shape[1] + 1)
    keys = partial.used[order] @ weights[1:] + partial.order[order, -1] * weights[0]
    _, first = np.unique(keys, return_index=True)
    return _rows(partial, order[first])


def _rows(partial: _Partial, rows: Ints) -> _Partial:
    return _Partial(
        partial.order[rows], partial.used[rows], partial.placed[rows], partial.latency[rows]
    )
