"""Graphs of many devices: short ways are as the long ones, and a shortlist loses little."""

from __future__ import annotations

import numpy as np
import pytest

from loomserve.platform.placement.policy import beam, bounds, helr
from loomserve.platform.placement.policy.graph import Demand, DeviceNode, Graph, fits
from loomserve.platform.placement.policy.helr import (
    MODES,
    NEIGHBOURS,
    DoesNotFitError,
    Mode,
    place,
    shortlist,
)
from loomserve.platform.placement.policy.kinds import Ints, Kinds
from tests.unit.platform.placement.policy.test_placement import cluster, problem


def exchangeable(graph: Graph, a: int, b: int) -> bool:
    """Whether nothing changes when the two change places."""
    swapped = np.arange(len(graph.nodes))
    swapped[[a, b]] = b, a
    links = np.array(graph.links)
    same = links[np.ix_(swapped, swapped)] == links
    np.fill_diagonal(same, True)
    one, other = graph.nodes[a], graph.nodes[b]
    figures = ("memory", "layer_s", "stage_s", "first_s", "last_s")
    return bool(same.all()) and all(getattr(one, f) == getattr(other, f) for f in figures)


def test_devices_of_a_kind_are_those_that_can_all_be_exchanged() -> None:
    sizes = set()
    for seed in range(200):
        demand, graph = problem(seed) if seed % 2 else cluster(seed, 12, 8, 3)
        members: list[list[int]] = []
        for node in range(len(graph.nodes)):
            for kind in members:
                if all(exchangeable(graph, node, other) for other in kind):
                    kind.append(node)
                    break
            else:
                members.append([node])
        assert Kinds.of(demand, graph).members == tuple(map(tuple, members))
        sizes |= {len(kind) for kind in members}
    assert {1, 2, 4} <= sizes


def test_the_least_period_by_best_links_is_that_by_all_links() -> None:
    for seed in range(100):
        kinds = Kinds.of(*problem(seed))
        every = kinds.bounds()
        enough = [
            bound
            for bound in every
            if bounds._room(kinds, float(bound), kinds.most_stages) >= kinds.demand.layers
        ]
        expected = min(enough, default=np.inf)
        assert bounds.least_period_s(kinds, kinds.most_stages) == pytest.approx(expected, rel=1e-9)


def grown(kinds: Kinds, caps: Ints, partial: beam._Partial) -> beam._Partial:
    """All partial pipelines of one stage more are made, and the best are kept."""
    none = np.zeros(len(kinds.members))
    rows, following, placed, latency = beam._next(kinds, caps, partial, none)
    used = partial.used[rows].copy()
    used[np.arange(len(rows)), following] += 1
    best: dict[tuple[int, ...], int] = {}
    for row in range(len(rows)):
        key = (*used[row], following[row])
        if key not in best or (-placed[row], latency[row]) < (
            -placed[best[key]],
            latency[best[key]],
        ):
            best[key] = row
    kept = np.array(sorted(best.values()))
    left = np.maximum(0, kinds.demand.layers - placed[kept])
    fastest = np.where(used[kept] < kinds.counts, kinds.layer_s, np.inf).min(axis=1)
    expected = latency[kept] + np.where(left > 0, left * fastest, 0.0)
    half = beam.WIDTH // 2
    by_layers = np.lexsort((latency[kept], -placed[kept]))[:half]
    by_latency = np.argsort(expected, kind="stable")[:half]
    kept = kept[np.union1d(by_layers, by_latency)]
    order = np.column_stack([partial.order[rows[kept]], following[kept]])
    return beam._Partial(order, used[kept], placed[kept], latency[kept])


def test_a_step_of_the_beam_keeps_the_best_of_all_that_there_are() -> None:
    for seed in range(8):
        kinds = Kinds.of(*cluster(seed, nodes=24, layers=40, hosts=12))
        caps = kinds.caps(np.inf)
        step = beam._started(kinds, caps)
        for _ in range(4):
            plain, step = grown(kinds, caps.middle, step), beam._grown(kinds, caps, step)
            assert sorted(step.latency) == sorted(plain.latency)
            assert sorted(step.placed) == sorted(plain.placed)
            assert (step.used.sum(axis=1) == step.order.shape[1]).all()
            assert (step.used <= kinds.counts).all()


def unlike(seed: int, machines: int, layers: int = 40) -> tuple[Demand, Graph]:
    """Machines of eight devices, no two of one speed."""
    random = np.random.default_rng(seed)
    nodes, machine = 8 * machines, np.arange(8 * machines) // 8
    types = random.uniform([4, 0.5], [12, 3], size=(4, 2))[random.integers(4, size=machines)]
    figures = types[machine] * random.uniform(0.95, 1.05, size=(nodes, 2))
    links = np.where(machine[:, None] == machine, 0.05, random.choice([0.3, 1.0]))
    demand = Demand(layers, layer_bytes=1.0, stage_bytes=0.5, first_bytes=1.0, last_bytes=1.0)
    return demand, Graph(
        tuple(
            DeviceNode(f"d{node}", *map(float, figures[node]), 0.05, 0.2, 0.8)
            for node in range(nodes)
        ),
        tuple(tuple(map(float, row)) for row in links),
    )


def test_the_fastest_and_the_largest_are_on_the_list_with_their_machines() -> None:
    kinds = Kinds.of(*unlike(0, 10))
    bound = bounds.least_period_s(kinds, kinds.most_stages)
    listed = shortlist(kinds, bound, 3 * (NEIGHBOURS + 1))
    assert len(listed) == 3 * (NEIGHBOURS + 1)
    for best in (int(kinds.layer_s.argmin()), int(kinds.memory.argmax())):
        machine = best // 8
        assert set(range(8 * machine, 8 * machine + 8)) <= set(listed)


@pytest.mark.parametrize("mode", MODES)
def test_a_pipeline_over_a_shortlist_is_nearly_the_best(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(3):
        demand, graph = unlike(seed, 10)
        of_all = place(demand, graph, mode)
        monkeypatch.setattr(helr, "MOST_KINDS", 56)
        found = place(demand, graph, mode)
        monkeypatch.undo()
        assert not found.exact
        assert fits(demand, graph, found.pipeline)
        # Whatever is searched among, bounds are of all devices.
        assert found.least_latency_s == of_all.least_latency_s
        if len(found.pipeline) == len(of_all.pipeline) or mode != "he":
            assert found.least_period_s == of_all.least_period_s
        if mode == "he":
            assert len(found.pipeline) == len(of_all.pipeline)
        elif mode == "lr":
            assert found.latency_s <= of_all.latency_s * 1.02
        else:
            assert found.period_s <= of_all.period_s * 1.03


def test_a_model_that_a_shortlist_does_not_hold_is_looked_for_on_the_largest_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    demand, graph = unlike(0, 8, layers=300)
    monkeypatch.setattr(helr, "MOST_KINDS", 20)
    assert len(shortlist(Kinds.of(demand, graph), np.inf, 20)) == 20
    found = place(demand, graph, "balanced")
    assert fits(demand, graph, found.pipeline)
    assert len({stage.node for stage in found.pipeline}) > 20
    with pytest.raises(DoesNotFitError):
        place(Demand(3_000, 1.0), graph, "balanced")


def test_a_thousand_devices_that_all_differ_are_placed_within_the_bounds() -> None:
    demand, graph = unlike(0, 125, layers=80)
    found = place(demand, graph, "balanced")
    assert fits(demand, graph, found.pipeline)
    assert found.least_period_s <= found.period_s < 1.35 * found.least_period_s
