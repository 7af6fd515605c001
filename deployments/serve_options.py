"""What all deployments tell Serve: how replicas are watched and end, and what they log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.schema import LoggingConfig

from loomserve.platform.base.request_logs import add_request
from loomserve.platform.config import Config, LogFormat
from loomserve.platform.nodes.resources import on_state

_SERVE = "ray.serve"
# Their lines would go to the standard error stream, of which Serve's log takes none.
_OTHERS = ("loomserve", "opentelemetry")


def serve_options(log_format: LogFormat) -> dict[str, Any]:
    """Options of every deployment."""
    return {
        # Serve ends what has not answered three checks in a row. Processes that have ended are seen
        # without, and what is slow answers at last: these end only what neither runs nor ends.
        "health_check_period_s": 2,
        "health_check_timeout_s": 60,
        # How long Serve waits before it looks, and looks again, whether calls through Serve still
        # run on a replica that ends. Its own 2 s are for callers that hear of the end late, and
        # ours do at once; requests of clients do not pass through Serve, and each deployment waits
        # for them itself.
        "graceful_shutdown_wait_loop_s": 0.25,
        "logging_config": serve_logging(log_format),
    }


def single(what: type, name: str, config: Config) -> Any:
    """A deployment with one replica, on the node that keeps the platform's state."""
    return serve.deployment(
        what,
        name=name,
        num_replicas=1,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0, "resources": on_state()},
        **serve_options(config.server.log_format),
    )


def start_apps(apps: Mapping[str, Any]) -> None:
    """Hand applications to Serve by name, which starts them in the background."""
    serve.run_many(
        [serve.RunTarget(app, name=name, route_prefix=None) for name, app in apps.items()],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def serve_logging(log_format: LogFormat) -> LoggingConfig:
    """Warnings and errors alone."""
    encoding = "JSON" if log_format == "json" else "TEXT"
    return LoggingConfig(log_level="WARNING", enable_access_log=False, encoding=encoding)


def log_requests(log_format: LogFormat) -> None:
    """Send the platform's log lines to this replica's log; in JSON each names its request."""
    handlers = logging.getLogger(_SERVE).handlers
    for handler in handlers if log_format == "json" else ():
        # The last of its filters, for Serve's own writes ids of its calls.
        handler.addFilter(add_request)
    for name in _OTHERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = handlers
        logger.propagate = False
        logger.setLevel(logging.WARNING)


async def ended_with_caller(call: Any) -> Any:
    """Answer to a call that is cancelled with its caller: a replica's end waits for its calls."""
    try:
        return await call
    except asyncio.CancelledError:
        call.cancel()
        raise
