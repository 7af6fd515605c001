"""HELR against every pipeline there is, and where there are too many against what none can beat."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from loomserve.platform.placement.policy import beam, exact
from loomserve.platform.placement.policy.graph import (
    Demand,
    DeviceNode,
    Graph,
    Pipeline,
    Stage,
    even,
    fits,
    latency_s,
    period_s,
    stage_bytes,
)
from loomserve.platform.placement.policy.helr import (
    MODES,
    SLACK,
    DoesNotFitError,
    Mode,
    least_bound,
    place,
)
from loomserve.platform.placement.policy.kinds import Kinds

GRAPHS = 1050


def every_pipeline(demand: Demand, graph: Graph) -> Iterator[Pipeline]:
    for stages in range(1, min(len(graph.nodes), demand.layers) + 1):
        for order in itertools.permutations(range(len(graph.nodes)), stages):
            for cuts in itertools.combinations(range(1, demand.layers), stages - 1):
                edges = (0, *cuts, demand.layers)
                yield tuple(
                    Stage(node, b - a)
                    for node, (a, b) in zip(order, itertools.pairwise(edges), strict=True)
                )


def problem(seed: int, nodes: int | None = None, layers: int | None = None) -> tuple[Demand, Graph]:
    """Of few distinct figures, so that devices are often alike and pipelines often tie."""
    random = np.random.default_rng(seed)
    nodes = nodes or int(random.integers(1, 5))
    layers = layers or int(random.integers(1, 8))
    demand = Demand(
        layers,
        layer_bytes=float(random.integers(1, 4)),
        stage_bytes=float(random.integers(0, 3)),
        first_bytes=float(random.integers(0, 4)),
        last_bytes=float(random.integers(0, 4)),
    )
    alike = random.random() < 0.4
    needed = demand.bytes_on(layers, first=True, last=True)
    links = random.integers(0, 6, size=(nodes, nodes)) / 4
    if alike:
        links = np.full((nodes, nodes), random.integers(0, 6) / 4)
    speeds = random.choice([0.5, 1.0, 3.0], size=2) if alike else random.uniform(0.3, 4, size=nodes)
    graph = Graph(
        tuple(
            DeviceNode(
                f"d{i}",
                memory=float(needed * random.choice([0.3, 0.6, 1.2])),
                layer_s=float(random.choice(speeds)),
                stage_s=0.25 * alike,
                first_s=0.5,
                last_s=1.5,
            )
            for i in range(nodes)
        ),
        tuple(tuple(map(float, row)) for row in links),
    )
    return demand, graph


def best_figures(figures: list[tuple[int, float, float]], mode: Mode) -> tuple[int, float]:
    """Stages and latency of the best of all pipelines' stages, periods and latencies."""
    if mode == "he":
        fewest = min(stages for stages, _, _ in figures)
        figures = [each for each in figures if each[0] == fewest]
    if mode != "lr":
        slack = SLACK if mode == "balanced" else 0.0
        bound = min(period for _, period, _ in figures) * (1 + slack) + 1e-9
        figures = [each for each in figures if each[1] <= bound]
    latency, stages = min((latency, stages) for stages, _, latency in figures)
    return stages, latency


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_finds_the_best_of_all_pipelines_of_small_graphs(mode: Mode) -> None:
    unplaceable = 0
    for seed in range(MODES.index(mode), GRAPHS, len(MODES)):
        demand, graph = problem(seed)
        fitting = [each for each in every_pipeline(demand, graph) if fits(demand, graph, each)]
        if not fitting:
            unplaceable += 1
            with pytest.raises(DoesNotFitError):
                place(demand, graph, mode)
            continue
        figures = [
            # Sums of the same numbers in another order are the same figure.
            (
                len(each),
                round(period_s(demand, graph, each), 9),
                round(latency_s(demand, graph, each), 9),
            )
            for each in fitting
        ]
        stages, latency = best_figures(figures, mode)
        found = place(demand, graph, mode)
        assert found.exact
        assert fits(demand, graph, found.pipeline), seed
        assert len(found.pipeline) == stages, seed
        assert found.latency_s == pytest.approx(latency), seed
        fewest = min(each[0] for each in figures) if mode == "he" else len(graph.nodes)
        least_period = min(each[1] for each in figures if each[0] <= fewest)
        if mode != "lr":
            slack = SLACK if mode == "balanced" else 0.0
            assert found.period_s <= least_period * (1 + slack) + 1e-9, seed
        assert found.least_period_s <= least_period + 1e-9, seed
        assert found.least_latency_s <= min(each[2] for each in figures) + 1e-9, seed
    assert 10 < unplaceable < GRAPHS / len(MODES) / 2


def cluster(seed: int, nodes: int, layers: int, hosts: int) -> tuple[Demand, Graph]:
    """Devices of three types on hosts; links are quick within a host and slow between hosts."""
    random = np.random.default_rng(seed)
    demand = Demand(layers, layer_bytes=1.0, stage_bytes=0.5, first_bytes=1.0, last_bytes=1.0)
    types = random.uniform([2, 0.5], [8, 3], size=(3, 2))
    of_host = random.integers(3, size=hosts)
    host = np.arange(nodes) * hosts // nodes
    between = random.uniform(0.2, 1.0, size=(hosts, hosts))
    links = np.where(host[:, None] == host, 0.05, between[host][:, host])
    return demand, Graph(
        tuple(
            DeviceNode(f"d{i}", *map(float, types[of_host[host[i]]]), 0.05, 0.2, 0.8)
            for i in range(nodes)
        ),
        tuple(tuple(map(float, row)) for row in links),
    )


def test_the_beam_comes_near_the_optimum_where_that_is_known() -> None:
    periods, latencies = [], []
    for seed in range(15):
        demand, graph = cluster(seed, nodes=8, layers=12, hosts=8)
        kinds = Kinds.of(demand, graph)
        assert beam.fewest_stages(kinds, np.inf) == exact.fewest_stages(kinds, np.inf)
        best = exact.quickest(kinds, np.inf, kinds.most_stages)
        found = beam.quickest(kinds, np.inf, kinds.most_stages)
        if best is None:
            assert found is None
            continue
        assert found is not None
        assert fits(demand, graph, found)
        latencies.append(latency_s(demand, graph, found) / latency_s(demand, graph, best))
        least, by_beam = (least_bound(kinds, each, 8, 0.0) for each in (exact, beam))
        periods.append(by_beam / least)
    assert len(periods) > 7
    assert np.mean(periods) < 1.01
    assert max(periods) < 1.1
    assert np.mean(latencies) < 1.01
    assert max(latencies) < 1.1


@pytest.mark.parametrize("hosts", [4, 16])
def test_a_model_over_64_devices_is_near_what_nothing_can_beat(hosts: int) -> None:
    demand, graph = cluster(0, nodes=64, layers=80, hosts=hosts)
    balanced = place(demand, graph, "balanced")
    assert fits(demand, graph, balanced.pipeline)
    assert not balanced.exact
    assert balanced.least_period_s <= balanced.period_s < 1.35 * balanced.least_period_s
    lr = place(demand, graph, "lr")
    assert fits(demand, graph, lr.pipeline)
    assert lr.latency_s < 1.2 * lr.least_latency_s


def test_64_devices_of_few_kinds_are_placed_exactly() -> None:
    nodes = tuple(DeviceNode(f"d{i}", 10.0 + 5 * (i % 2), 1.0 + i % 2) for i in range(64))
    links = tuple((0.1,) * 64 for _ in range(64))
    found = place(Demand(40, 1.0), Graph(nodes, links), "balanced")
    assert found.exact
    # 32 quick devices and a slow one hold two layers or one each, less a link, in 2.1 s.
    assert found.period_s == pytest.approx(2.1)


def test_layers_are_divided_evenly_as_vllm_does() -> None:
    demand = Demand(30, 1.0)
    assert [s.layers for s in even(demand, [0, 1, 2, 3])] == [7, 8, 8, 7]
    assert even(demand, [1, 0]) == (Stage(1, 15), Stage(0, 15))
    assert stage_bytes(demand, even(demand, [1, 0])) == [15, 15]


def test_a_stage_without_layers_and_a_device_used_twice_are_no_maps() -> None:
    demand = Demand(2, 1.0)
    graph = Graph((DeviceNode("a", 9, 1), DeviceNode("b", 9, 1)), ((0, 0), (0, 0)))
    assert fits(demand, graph, (Stage(0, 1), Stage(1, 1)))
    assert not fits(demand, graph, (Stage(0, 1), Stage(0, 1)))
    assert not fits(demand, graph, (Stage(0, 2), Stage(1, 0)))
    assert not fits(demand, graph, (Stage(0, 1),))


@pytest.mark.parametrize("mode", MODES)
def test_a_device_of_a_third_of_the_speed_gets_a_third_of_the_work(mode: Mode) -> None:
    # As measured of a small model: the output head is worth eight layers.
    nodes = (DeviceNode("quick", 100, 1.0, last_s=8.0), DeviceNode("slow", 100, 3.0, last_s=24.0))
    found = place(Demand(30, 1.0), Graph(nodes, ((0, 0.1), (0.1, 0))), mode)
    if mode == "balanced":
        # The slow one first: 9 layers of 3 s, against 21 of 1 s and the head.
        assert [(s.node, s.layers) for s in found.pipeline] == [(1, 9), (0, 21)]
        assert found.period_s == pytest.approx(29.1)
    else:
        assert found.pipeline == (Stage(0, 30),)
