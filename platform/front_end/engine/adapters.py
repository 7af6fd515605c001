"""A model's adapters: vLLM's serving layer knows them by name, engines by key.

An engine's request names the adapter's key, which contains the digest of its weights: by that name
vLLM tells apart KV blocks and the adapters of one step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest

from loomserve.platform.adapters.messages import AdapterRoute

_NOBODY: frozenset[str] = frozenset()


class AdapterBook:
    """Which adapters there are, and which replicas have each."""

    def __init__(self) -> None:
        self._routes: dict[int, AdapterRoute] = {}
        self._holders: dict[int, frozenset[str]] = {}

    def set(self, routes: Iterable[AdapterRoute]) -> None:
        self._routes = {route.adapter.id: route for route in routes}
        self._holders = {number: frozenset(r.replicas) for number, r in self._routes.items()}

    def serve_by(self, models: Any) -> None:
        """Have vLLM's ``OpenAIServingModels`` find those that clients may ask for."""
        models.lora_requests.clear()
        for route in self._routes.values():
            one = route.adapter
            if not route.leaves:
                models.lora_requests[one.name] = LoRARequest(one.name, one.id, one.source)

    def address(self, request: EngineCoreRequest) -> None:
        """Have a request name its adapter as engines do."""
        asked = request.lora_request
        if asked is not None and (route := self._routes.get(asked.lora_int_id)) is not None:
            one = route.adapter
            request.lora_request = LoRARequest(one.key, one.id, one.source)

    def having(self, request: EngineCoreRequest, replicas: frozenset[str]) -> frozenset[str]:
        """Those of some replicas that have the request's adapter; all, if it asks for none."""
        asked = request.lora_request
        if asked is None:
            return replicas
        return replicas & self._holders.get(asked.lora_int_id, _NOBODY)
