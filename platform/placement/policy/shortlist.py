"""Shortlist of devices, where there are too many that differ to search among all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from loomserve.platform.placement.policy.graph import Graph, Pipeline, Stage
from loomserve.platform.placement.policy.kinds import Kinds

NEIGHBOURS = 7
"""Devices that come with each that is on the list for itself: machines have eight, mostly."""


def shortlist(kinds: Kinds, bound: float, most: int) -> list[int]:
    """Indices of the devices of at most ``most`` kinds, from which a good pipeline can be made.

    On it are those that hold the most layers in a stage of ``bound`` seconds, the fastest and, so
    that the model fits, the largest in turn, each with those to which it has the best links (of
    equal ones the fastest): a pipeline of the best devices alone would cross slow links at each
    stage.
    """
    chosen: dict[int, None] = {}
    for kind in _in_turn(kinds, bound):
        if len(chosen) >= most:
            break
        chosen[kind] = None
    return sorted(node for kind in chosen for node in kinds.members[kind])


def largest(kinds: Kinds) -> list[int]:
    """Indices of the largest devices, as many kinds as layers: if any hold the model, they do."""
    by_memory = np.argsort(-kinds.memory, kind="stable")[: kinds.demand.layers]
    return sorted(node for kind in by_memory for node in kinds.members[kind])


def _in_turn(kinds: Kinds, bound: float) -> Iterator[int]:
    held = kinds.by_best_link.caps(bound).middle[0]
    fullest = np.lexsort((kinds.layer_s, -held))
    fastest = np.argsort(kinds.layer_s, kind="stable")
    largest = np.lexsort((kinds.layer_s, -kinds.memory))
    ways = kinds.links + kinds.links.T
    listed = set[int]()
    orders = [iter(map(int, order)) for order in (fullest, fastest, largest)]
    for order in itertools.cycle(orders):
        anchor = next((kind for kind in order if kind not in listed), None)
        if anchor is None:
            return
        nearest = np.lexsort((kinds.layer_s, ways[anchor]))
        group = [anchor, *map(int, nearest[nearest != anchor][:NEIGHBOURS])]
        listed.update(group)
        yield from group


def part(graph: Graph, nodes: list[int]) -> Graph:
    """The graph of some of the devices."""
    return Graph(
        tuple(graph.nodes[node] for node in nodes),
        tuple(tuple(graph.links[a][b] for b in nodes) for a in nodes),
    )


def in_whole(pipeline: Pipeline, nodes: list[int]) -> Pipeline:
    """A pipeline over a part of the graph, by the indices of the whole graph."""
    return tuple(Stage(nodes[stage.node], stage.layers) for stage in pipeline)
