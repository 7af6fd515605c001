"""Ray Serve's router configuration for a model."""

from __future__ import annotations

from typing import Any

from loomserve.platform.config import Router

STATS_PERIOD_S = 1.0
"""How often Serve asks a replica for its load."""

STATS_TIMEOUT_S = 5.0


def request_router_config(router: Router, model: str) -> dict[str, Any]:
    """Arguments of ``ray.serve.config.RequestRouterConfig`` for a model's deployment."""
    return {
        "request_router_class": "loomserve.routers.serve.request_router.LoomRouter",
        "request_router_kwargs": {
            "model": model,
            "policy": router.policy,
            "load_limit": router.load_limit,
            "stale_after_s": router.stale_after_s,
        },
        "request_routing_stats_period_s": STATS_PERIOD_S,
        "request_routing_stats_timeout_s": STATS_TIMEOUT_S,
    }
