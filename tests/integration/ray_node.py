"""Ray on this machine, as a platform's only node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loomserve.platform.nodes.resources import offered


@contextmanager
def ray_node(name: str) -> Iterator[Any]:
    """Ray's module, with one node of this name; its processes have the environment as it is."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        resources=offered(name, (), (), state=True),
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _node_ip_address="127.0.0.1",
    )
    yield ray
    ray.shutdown()
