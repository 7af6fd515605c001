"""Kinds of devices: devices that can be exchanged for each other are counted, not told apart.

Two devices are of one kind if they have the same memory and speeds, and the same links to and from
all others. The search is over how many of each kind are used, so 64 devices of four kinds have 17⁴
states and not 2⁶⁴. If all devices differ, each kind is one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from loomserve.platform.placement.policy.graph import Demand, Graph, Pipeline, Stage

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROUNDING = 1e-9
_EVER = 1e200
"""Seconds that stand for no bound; a link that does not exist has infinity."""


@dataclass(frozen=True)
class Caps:
    """Most layers of a stage on kind i within a bound, 0 if none; ``[j, i]``: after kind j."""

    only: Ints
    first: Ints
    middle: Ints
    last: Ints


@dataclass(frozen=True)
class Kinds:
    """Graph of kinds: ``members`` are devices of the graph, ``links[j, i]`` the links of kinds."""

    demand: Demand
    graph: Graph
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, demand: Demand, graph: Graph) -> Kinds:
        links = np.array(graph.links).reshape(len(graph.nodes), len(graph.nodes))
        alike: dict[tuple[float, ...], list[list[int]]] = {}
        for node, each in enumerate(graph.nodes):
            figures = (each.memory, each.layer_s, each.stage_s, each.first_s, each.last_s)
            kinds = alike.setdefault(figures, [])
            for kind in kinds:
                # A device that can be exchanged for one of a kind can be for all.
                if _exchangeable(links, node, kind[0]):
                    kind.append(node)
                    break
            else:
                kinds.append([node])
        members = sorted(kind for kinds in alike.values() for kind in kinds)
        return cls(demand, graph, tuple(map(tuple, members)))

    @cached_property
    def counts(self) -> Ints:
        return np.array([len(kind) for kind in self.members])

    def _column(self, name: str) -> Floats:
        return np.array([getattr(self.graph.nodes[kind[0]], name) for kind in self.members])

    @cached_property
    def memory(self) -> Floats:
        return self._column("memory")

    @cached_property
    def layer_s(self) -> Floats:
        return self._column("layer_s")

    @cached_property
    def stage_s(self) -> Floats:
        return self._column("stage_s")

    @cached_property
    def first_s(self) -> Floats:
        return self._column("first_s")

    @cached_property
    def last_s(self) -> Floats:
        return self._column("last_s")

    @cached_property
    def links(self) -> Floats:
        """Links between kinds, in seconds; within a kind of one device, infinite."""
        links, here = np.array(self.graph.links), np.array([kind[0] for kind in self.members])
        between: Floats = links[np.ix_(here, here)].astype(np.float64)
        for place, kind in enumerate(self.members):
            between[place, place] = links[kind[0], kind[1]] if len(kind) > 1 else np.inf
        return between

    @cached_property
    def by_best_link(self) -> Kinds:
        """The same, but that each kind has its best incoming link from all: a single row."""
        found = replace(self)
        vars(found)["links"] = self.links.min(axis=0, keepdims=True)
        return found

    @cached_property
    def states(self) -> int:
        """Number of ways to choose devices, up to exchange within a kind."""
        return int(np.prod(self.counts.astype(np.float64) + 1))

    @cached_property
    def most_stages(self) -> int:
        return min(self.demand.layers, len(self.graph.nodes))

    def caps(self, bound: float) -> Caps:
        """Most layers of a stage by memory, and by ``bound`` seconds of being busy."""

        def most(extra_s: Floats, extra_bytes: float) -> Ints:
            room = self.memory - self.demand.stage_bytes - extra_bytes
            by_memory = room / self.demand.layer_bytes
            by_time = (min(bound, _EVER) - self.stage_s - extra_s) / self.layer_s
            most = np.floor(np.minimum(by_memory, by_time) + _ROUNDING)
            return np.clip(most, 0, self.demand.layers).astype(np.int64)

        first, last = self.demand.first_bytes, self.demand.last_bytes
        return Caps(
            only=most(self.first_s + self.last_s, first + last),
            first=most(self.first_s, first),
            middle=most(self.links, 0.0),
            last=most(self.last_s + self.links, last),
        )

    def bounds(self) -> Floats:
        """All times that a stage can be busy for, in seconds, ascending."""
        counts = np.arange(1, self.demand.layers + 1)
        layers = self.stage_s[:, None] + self.layer_s[:, None] * counts
        times = (
            layers + (self.first_s + self.last_s)[:, None],
            layers + self.first_s[:, None],
            layers[None] + self.links[:, :, None],
            layers[None] + (self.links + self.last_s)[:, :, None],
        )
        every = np.unique(np.concatenate([each.ravel() for each in times]))
        finite: Floats = every[np.isfinite(every)]
        return finite

    def pipeline(self, kinds: Sequence[int], layers: Sequence[int]) -> Pipeline:
        """Build a pipeline with a device of each of these kinds, lowest index first."""
        left = [iter(kind) for kind in self.members]
        return tuple(
            Stage(next(left[kind]), int(count)) for kind, count in zip(kinds, layers, strict=True)
        )


def _exchangeable(links: Floats, a: int, b: int) -> bool:
    """Whether both have the same links to and from all others, and between them."""
    differ = links[a] != links[b]
    differ |= links[:, a] != links[:, b]
    differ[[a, b]] = False
    return not differ.any() and bool(links[a, b] == links[b, a])
