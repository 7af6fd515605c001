"""Every policy of the configuration has a router that Ray Serve accepts."""

from __future__ import annotations

from typing import get_args

import pytest
from ray.serve.config import RequestRouterConfig

from loomserve.platform.config import Router
from loomserve.routers.serve.choice import request_router_config

POLICIES = get_args(Router.model_fields["policy"].annotation)


@pytest.mark.parametrize("policy", POLICIES)
def test_serve_accepts_the_router_of_each_policy(policy: str) -> None:
    router = Router.model_validate({"policy": policy, "stale_after_s": 4})
    config = RequestRouterConfig(**request_router_config(router, "m"))
    assert config.request_routing_stats_period_s == 1.0
    assert config.request_router_kwargs["stale_after_s"] == 4
    assert config.request_router_kwargs["policy"] == policy
    assert config.get_request_router_class().__name__ == "LoomRouter"
