"""Clusters of several nodes on one machine; without the privileges for that, they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, cluster
from tests.cluster.nodes import Node, network, why_not

_WHY_NOT = why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _WHY_NOT is not None and "tests/cluster/" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason=_WHY_NOT))


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of them, without a platform yet."""
    with (
        network("one", "two") as machines,
        cluster(machines, tmp_path_factory.mktemp("cluster")) as running,
    ):
        yield running


@pytest.fixture
def nodes() -> Iterator[tuple[Node, ...]]:
    """Two nodes."""
    with network("one", "two") as running:
        yield running
