"""Exact search for a pipeline: dynamic programming over the devices used and the last of them.

UELLM's recurrence (section 3.5.2, equation 3-7) gives a device all layers that its memory holds,
whose sum is not the model's; it reads ``dp[i][j]`` for the state without i; and it adds the links
from the last device to all others (equation 3-8). The corrected recurrence, with ``n`` layers on
the devices of state ``S``, the last of which is ``i``, is::

    f(S, i, n) =  min over j in S \\ {i} and 1 <= m <= cap(j, i, P) of
                  f(S \\ {i}, j, n - m) + link(j, i) + stage(i) + m * layer(i)
    f({i}, i, n) = stage(i) + first(i) + n * layer(i)            for 1 <= n <= cap_first(i, P)

    cap(j, i, P) = the most m with      m * layer_bytes + stage_bytes          <= memory(i)
                               and link(j, i) + stage(i) + m * layer(i) <= P

Both include the output head's seconds and bytes for the last stage, and the embeddings' for the
first. The answer is the least ``f(S, i, layers)``: a step's latency, among pipelines in which no
stage is busy for longer than ``P``. Every layer is on one device, and a device without a layer is
not in ``S``, so a model may use fewer devices than there are.

Whether any pipeline keeps within ``P`` does not depend on ``n``: fill every stage, and take surplus
layers away again. ``g(S, i) = max over j of g(S \\ {i}, j) + cap(j, i, P)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from loomserve.platform.placement.policy.graph import Pipeline
from loomserve.platform.placement.policy.kinds import Floats, Ints, Kinds


class _Lattice:
    """States of the search: the number of devices used of each kind, as one mixed-radix number."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        sizes = np.array(counts) + 1
        self.step: Ints = np.concatenate([[1], np.cumprod(sizes[:-1])]).astype(np.int64)
        states = np.arange(np.prod(sizes))
        used = states[:, None] // self.step % sizes
        total = used.sum(axis=1)
        self._growing = [
            [np.flatnonzero((total == k) & (used[:, kind] < most)) for k in range(sum(counts) + 1)]
            for kind, most in enumerate(counts)
        ]

    def growing(self, stages: int) -> Iterator[tuple[int, Ints]]:
        """Each kind, with the states of ``stages`` devices that can take one more of it."""
        for kind, states in enumerate(self._growing):
            if len(states[stages]):
                yield kind, states[stages]


_lattice = lru_cache(maxsize=4)(_Lattice)


def fewest_stages(kinds: Kinds, bound: float) -> int | None:
    """Least stages of a pipeline with no stage busy for longer than ``bound``; None: none is."""
    caps, layers = kinds.caps(bound), kinds.demand.layers
    if (caps.only >= layers).any():
        return 1
    lattice = _lattice(tuple(kinds.counts.tolist()))
    placed = np.zeros((kinds.states, len(kinds.members)), dtype=np.int64)
    each = np.arange(len(kinds.members))
    placed[lattice.step, each] = caps.first
    for stages in range(1, kinds.most_stages):
        for kind, states in lattice.growing(stages):
            before = placed[states]
            there = before > 0
            ends = there & (caps.last[:, kind] > 0) & (before + caps.last[:, kind] >= layers)
            if ends.any():
                return stages + 1
            grown = np.where(there & (caps.middle[:, kind] > 0), before + caps.middle[:, kind], 0)
            placed[states + lattice.step[kind], kind] = grown.max(axis=1)
    return None


def quickest(kinds: Kinds, bound: float, most_stages: int) -> Pipeline | None:
    """The pipeline of least latency with no stage busy for longer than ``bound``; None: none is. Of
    equal ones, the one on the fewest devices."""
    return _Quickest(kinds, bound, most_stages).best()


class _Quickest:
    def __init__(self, kinds: Kinds, bound: float, most_stages: int) -> None:
        self._kinds = kinds
        self._caps = kinds.caps(bound)
        self._layers = kinds.demand.layers
        self._most_stages = min(most_stages, kinds.most_stages)
        self._lattice = _lattice(tuple(kinds.counts.tolist()))
        shape = (kinds.states, len(kinds.members), self._layers + 1)
        self._latency = np.full(shape, np.inf)
        self._best: tuple[float, int, int, int] | None = None
        """Latency, the state before the last stage, the last stage's kind, stages."""

    def best(self) -> Pipeline | None:
        self._start()
        for stages in range(1, self._most_stages):
            for kind, states in self._lattice.growing(stages):
                self._end(kind, states, stages + 1)
            if stages + 1 < self._most_stages:
                for kind, states in self._lattice.growing(stages):
                    self._grow(kind, states)
        return None if self._best is None else self._read(*self._best)

    def _start(self) -> None:
        kinds, counts = self._kinds, np.arange(self._layers + 1)
        for kind, cap in enumerate(self._caps.first):
            first = kinds.stage_s[kind] + kinds.first_s[kind] + kinds.layer_s[kind] * counts
            first[0], first[cap + 1 :] = np.inf, np.inf
            self._latency[self._lattice.step[kind], kind] = first
            if self._caps.only[kind] >= self._layers:
                self._offer(first_only(kinds, kind), 0, kind, 1)

    def _offer(self, latency: float, state: int, kind: int, stages: int) -> None:
        if self._best is None or latency < self._best[0] * (1 - 1e-12):
            self._best = latency, state, kind, stages

    def _end(self, kind: int, states: Ints, stages: int) -> None:
        kinds = self._kinds
        best, where = np.inf, 0
        for layers in range(1, int(self._caps.last[:, kind].max()) + 1):
            before = self._arriving(states, kind, layers, self._caps.last)
            if before is None:
                break
            ends = before[:, self._layers - layers] + layers * kinds.layer_s[kind]
            least = int(ends.argmin())
            if ends[least] < best:
                best, where = float(ends[least]), int(states[least])
        if np.isfinite(best):
            self._offer(best + kinds.stage_s[kind] + kinds.last_s[kind], where, kind, stages)

    def _grow(self, kind: int, states: Ints) -> None:
        kinds, size = self._kinds, self._layers + 1
        grown = np.full((len(states), size), np.inf)
        for layers in range(1, int(self._caps.middle[:, kind].max()) + 1):
            before = self._arriving(states, kind, layers, self._caps.middle)
            if before is None:
                break
            after = before[:, : size - layers] + layers * kinds.layer_s[kind]
            np.minimum(grown[:, layers:], after, out=grown[:, layers:])
        self._latency[states + self._lattice.step[kind], kind] = grown + kinds.stage_s[kind]

    def _arriving(self, states: Ints, kind: int, layers: int, caps: Ints) -> Floats | None:
        """Latency until a stage of this kind begins, over states and layers placed before."""
        allowed = np.flatnonzero(caps[:, kind] >= layers)
        if not len(allowed) or layers > self._layers:
            return None
        before = self._latency[states[:, None], allowed]
        before = before + self._kinds.links[allowed, kind][None, :, None]
        least: Floats = before.min(axis=1)
        return least

    def _read(self, latency: float, state: int, kind: int, stages: int) -> Pipeline:
        """Follow the minima back from the last stage."""
        kinds, order, layers = self._kinds, [kind], []
        left, caps = self._layers, self._caps.last
        while state:
            kind = order[-1]
            counts = np.arange(1, left)
            before = self._latency[state][:, left - counts] + kinds.links[:, kind][:, None]
            before = before + counts * kinds.layer_s[kind]
            before = np.where(counts[None, :] <= caps[:, kind][:, None], before, np.inf)
            last, place = np.unravel_index(int(before.argmin()), before.shape)
            layers.append(int(counts[place]))
            order.append(int(last))
            left -= int(counts[place])
            state -= int(self._lattice.step[last])
            caps = self._caps.middle
        layers.append(left)
        return kinds.pipeline(order[::-1], layers[::-1])


def first_only(kinds: Kinds, kind: int) -> float:
    """Latency of a step if one device has all layers."""
    return float(
        kinds.stage_s[kind]
        + kinds.first_s[kind]
        + kinds.last_s[kind]
        + kinds.demand.layers * kinds.layer_s[kind]
    )
