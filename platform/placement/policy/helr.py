"""HELR (UELLM, section 3.5): the map of a model's layers to devices.

A map is a pipeline of stages ``s_1 … s_k`` with ``n_1 + … + n_k`` = the model's layers, on distinct
devices, each within its device's memory (weights, KV and the engine's process; embeddings on the
first, the output head on the last stage). A step keeps stage i busy for
``b_i = link(s_{i-1}, s_i) + stage(s_i) + n_i * layer(s_i)``, with the ends' extra work. Then

* the *latency* of a step is ``b_1 + … + b_k``: what a lone request waits for a token;
* the *period* is ``max b_i``: a full pipeline ends a step in every period, so throughput is batch
  over period.

Each mode minimises, in this order (the paper's weights a_1, a_2 leave open what is added):

============ ============================ ============ =========
mode         first                        then         then
============ ============================ ============ =========
``he``       devices                      period       latency
``lr``       latency                      devices
``balanced`` period, up to ``SLACK`` more latency      devices
============ ============================ ============ =========

Bisection over all times that a stage can be busy for finds the least period. Dynamic programming
(:mod:`exact`), or a beam (:mod:`beam`) if there are too many states, finds the least latency within
it. Where there are too many devices that differ, the search is among a shortlist of them. In any
case :mod:`bounds` limits how far a pipeline can be from the best.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, get_args

import numpy as np

from loomserve.platform.placement.policy import beam, bounds, exact
from loomserve.platform.placement.policy.graph import (
    Demand,
    Graph,
    Pipeline,
    Stage,
    busy_s,
    latency_s,
    period_s,
)
from loomserve.platform.placement.policy.kinds import Kinds

Mode = Literal["he", "lr", "balanced"]
MODES: tuple[Mode, ...] = get_args(Mode)

SLACK = 0.02
"""Share of the period that ``balanced`` gives up for latency: within the error of speeds."""

_MOST_WORK = 3e8
"""Additions of the dynamic programme, which take a second or two."""
MOST_KINDS = 160
"""Of more kinds of devices, the search is among a shortlist of so many."""
_SAME = {exact: 1e-9, beam: 1e-3}
"""Periods that differ by no more than this share count as equal."""


class DoesNotFitError(Exception):
    """No pipeline over these devices holds the model."""


@dataclass(frozen=True)
class Placement:
    """Pipeline and its predicted times, in seconds."""

    mode: Mode
    pipeline: Pipeline
    busy_s: tuple[float, ...]
    period_s: float
    latency_s: float
    exact: bool
    """Whether no pipeline is better; False: a beam found it, and others may be."""
    least_period_s: float
    """Bound for all pipelines over these devices; in mode ``he``, over as few devices."""
    least_latency_s: float


def place(demand: Demand, graph: Graph, mode: Mode) -> Placement:
    """Find the best pipeline in this mode. Raises DoesNotFitError if the devices' memory does not
    hold the model."""
    kinds = Kinds.of(demand, graph)
    if len(kinds.members) <= MOST_KINDS:
        return _placed(kinds, mode)
    bound = bounds.least_period_s(kinds, kinds.most_stages)
    for nodes in (shortlist(kinds, bound, MOST_KINDS), largest(kinds)):
        try:
            found = _placed(Kinds.of(demand, part(graph, nodes)), mode)
        except DoesNotFitError:
            continue
        pipeline = in_whole(found.pipeline, nodes)
        most_stages = len(pipeline) if mode == "he" else kinds.most_stages
        least_period = bounds.least_period_s(kinds, most_stages)
        return _placement(kinds, mode, pipeline, least_period, is_exact=False)
    raise DoesNotFitError


def _placed(kinds: Kinds, mode: Mode) -> Placement:
    search: ModuleType = exact if _work(kinds) <= _MOST_WORK else beam
    fewest = search.fewest_stages(kinds, np.inf)
    if fewest is None:
        raise DoesNotFitError
    most_stages = fewest if mode == "he" else kinds.most_stages
    least_period = bounds.least_period_s(kinds, most_stages)
    bound = np.inf
    if mode != "lr":
        bound = least_bound(kinds, search, most_stages, least_period)
        bound *= 1 + (SLACK if mode == "balanced" else 0.0)
    pipeline = search.quickest(kinds, bound, most_stages)
    assert pipeline is not None, "a bound that was kept can be kept again"
    return _placement(kinds, mode, pipeline, least_period, is_exact=search is exact)


def _placement(
    kinds: Kinds, mode: Mode, pipeline: Pipeline, least_period: float, *, is_exact: bool
) -> Placement:
    demand, graph = kinds.demand, kinds.graph
    return Placement(
        mode=mode,
        pipeline=pipeline,
        busy_s=tuple(busy_s(demand, graph, pipeline)),
        period_s=period_s(demand, graph, pipeline),
        latency_s=latency_s(demand, graph, pipeline),
        exact=is_exact,
        least_period_s=least_period,
        least_latency_s=bounds.least_latency_s(kinds),
    )


def _work(kinds: Kinds) -> float:
    kinds_squared, layers_squared = len(kinds.members) ** 2, kinds.demand.layers**2
    return kinds.states * kinds_squared * layers_squared / 2.0


def least_bound(kinds: Kinds, search: ModuleType, most_stages: int, least_period: float) -> float:
    """The least period that a pipeline of at most ``most_stages`` stages can keep."""
    candidates = kinds.bounds()
    low, high = int(np.searchsorted(candidates, least_period)), len(candidates) - 1
    while candidates[low] < candidates[high] * (1 - _SAME[search]):
        middle = (low + high) // 2
        stages = search.fewest_stages(kinds, float(candidates[middle]))
        if stages is not None and stages <= most_stages:
            high = middle
        else:
            low = middle + 1
    return float(candidates[high])


NEIGHBOURS = 7
"""Devices that come with each that is on the list for itself: machines have eight, mostly."""


def shortlist(kinds: Kinds, bound: float, most: int) -> list[int]:
    """Indices of the devices of at most ``most`` kinds, from which a good pipeline can be made. On
    it are those that hold the most layers in a stage of ``bound`` seconds, the fastest and, so that
    the model fits, the largest in turn, each with those to which it has the best links (of equal
    ones the fastest): a pipeline of the best devices alone would cross slow links at each stage."""
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
