"""Deployments of what there is but once."""

from __future__ import annotations

from typing import Any

from ray import serve

from loomserve.deployments.ending import EMPTY_LOOK_S, HEALTH_CHECKS
from loomserve.deployments.serve_logging import serve_logging
from loomserve.platform.config import Config
from loomserve.platform.nodes.resources import on_state


def single(what: type, name: str, config: Config) -> Any:
    """A deployment with one replica, on the node that keeps the platform's state."""
    return serve.deployment(
        what,
        name=name,
        num_replicas=1,
        max_ongoing_requests=1000,
        **HEALTH_CHECKS,
        graceful_shutdown_wait_loop_s=EMPTY_LOOK_S,
        ray_actor_options={"num_cpus": 0, "resources": on_state()},
        logging_config=serve_logging(config.server.log_format),
    )
