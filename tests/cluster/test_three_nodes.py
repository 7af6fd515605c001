"""A head and two nodes with an engine each: no request is lost with any of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import cluster
from tests.cluster.cut_nodes import HEAD, WORKERS, Nodes
from tests.cluster.nodes import network
from tests.streams import Answer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

AWAY_S, EVERY_S = 33.0, 4.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with (
        network(HEAD, *WORKERS) as machines,
        cluster(machines, tmp_path_factory.mktemp("three")) as running,
    ):
        yield Nodes(running)


@pytest.fixture(scope="module")
def expected(nodes: Nodes) -> dict[str, Answer]:
    return nodes.undisturbed()


@pytest.mark.parametrize("victim", [WORKERS[1], HEAD])
def test_a_node_that_is_cut_costs_no_request_and_comes_back(
    nodes: Nodes, expected: dict[str, Answer], victim: str
) -> None:
    seen = nodes.cut(victim, AWAY_S, EVERY_S, expected)
    print(seen)
    assert seen["requests"] > AWAY_S / EVERY_S
    assert seen["failed_requests"] == seen["lost_streams"] == seen["wrong_answers"] == 0
