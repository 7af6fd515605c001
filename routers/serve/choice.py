"""Ray Serve's router configuration for each routing policy."""

from __future__ import annotations

from typing import Any

from loomserve.platform.config import Router

STATS_PERIOD_S = 1.0
"""How often Serve asks a replica for its load."""

STATS_TIMEOUT_S = 5.0

IMBALANCED_THRESHOLD = 16
"""Prefix-aware: above this difference of queue lengths prefixes no longer count. Ray's default,
infinity, lets one popular prefix pile up on one replica."""


def request_router_config(router: Router, model: str) -> dict[str, Any]:
    """Arguments of ``ray.serve.config.RequestRouterConfig`` for a model's deployment."""
    kwargs: dict[str, Any] = {"model": model, "stale_after_s": router.stale_after_s}
    if router.policy == "prefix_aware":
        path = "loomserve.routers.serve.prefix_aware.PrefixAwareRouter"
        kwargs["imbalanced_threshold"] = IMBALANCED_THRESHOLD
    else:
        path = "loomserve.routers.serve.request_router.LoomRouter"
        kwargs |= {"policy": router.policy, "load_limit": router.load_limit}
    return {
        "request_router_class": path,
        "request_router_kwargs": kwargs,
        "request_routing_stats_period_s": STATS_PERIOD_S,
        "request_routing_stats_timeout_s": STATS_TIMEOUT_S,
    }
