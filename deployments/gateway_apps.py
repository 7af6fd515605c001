"""The gateways' Serve applications: one where the controller is, and in a cluster one a node.

Serve cannot be told which replica of an application is to end, and of a node that is drained it is
that node's.
"""

from __future__ import annotations

from typing import Any

import ray
from ray import serve

from loomserve.deployments.gateway.gateway import Gateway
from loomserve.deployments.serve_options import serve_options, start_apps
from loomserve.deployments.worker_launcher import py_executable
from loomserve.kvstore.server.options import StoreOptions
from loomserve.platform.config import Config
from loomserve.platform.engine.process.environment import GATEWAY_ENVIRONMENT
from loomserve.platform.fleet.messages import GATEWAY_APP, GATEWAY_DEPLOYMENT, KvAccess, gateway_app
from loomserve.platform.nodes.resources import on_node, on_state

# As Ray calls such a worker.
_TITLE = f"ray::ServeReplica:{GATEWAY_APP}:{GATEWAY_DEPLOYMENT}"


def build_gateway_app(
    config: Config, internal_token: str, store: StoreOptions | None, node: str | None
) -> Any:
    """The gateways of one node; None: of the one that keeps the platform's state."""
    deployment = serve.deployment(
        Gateway,
        name=GATEWAY_DEPLOYMENT,
        num_replicas=config.server.front_ends,
        # Requests do not pass through Serve; of batches the lane sends only so many lines.
        max_ongoing_requests=1_000_000,
        # One that replaces another listens beside it before that stops.
        max_surge_percent=100,
        graceful_shutdown_timeout_s=config.server.drain_timeout_s + 15,
        ray_actor_options={
            "num_cpus": 0,
            "resources": on_state() if node is None else on_node(node),
            "runtime_env": {
                "env_vars": GATEWAY_ENVIRONMENT,
                "py_executable": py_executable(_TITLE),
            },
        },
        **serve_options(config.server.log_format),
    )
    several = config.cluster is not None
    access = KvAccess(address=store.address, each_node=several) if store else None
    return deployment.bind(
        config.server.model_dump(mode="json"),
        internal_token,
        access.model_dump(mode="json") if access else None,
        config.isolates_tenants,
        config.batch.model_dump(mode="json") if config.batch else None,
        config.has_gateways_on_each_node,
        config.elastic.model_dump(mode="json"),
    )


@ray.remote(num_cpus=0, max_retries=0, resources=on_state())  # type: ignore[untyped-decorator]
def start_gateway(
    config: Config, internal_token: str, store: StoreOptions | None, node: str
) -> None:
    """Hand a node's gateways to Serve, which starts them in the background."""
    start_apps({gateway_app(node): build_gateway_app(config, internal_token, store, node)})
