"""Routes to the served models, as the controller gave them last, and who may ask for which."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from loomserve.platform.access.key_models import check_model
from loomserve.platform.base.errors import BadRequest, Unavailable, UnknownModel
from loomserve.platform.config import ApiKey
from loomserve.platform.fleet.messages import ENGINE_DEPLOYMENT, ModelRoute
from loomserve.platform.fleet.registry import unknown_model_message
from loomserve.platform.state import ModelStatus

_SERVING = frozenset({ModelStatus.READY, ModelStatus.DEGRADED})


class ModelRoutes:
    """Routing table of the gateway: each model's route and Serve handle; and its endpoints."""

    def __init__(self, batch_only: Collection[str] = ()) -> None:
        """``batch_only`` names models that no gateway serves, only the batch lane."""
        self._batch_only = batch_only
        self._routes: dict[str, ModelRoute] = {}
        self._handles: dict[str, DeploymentHandle] = {}

    def __iter__(self) -> Iterator[ModelRoute]:
        return iter(self._routes.values())

    def apply(self, routes: Collection[ModelRoute]) -> None:
        """Replace the table; ``routes`` has all models."""
        self._routes = {route.name: route for route in routes}
        self._handles = {
            route.name: self._handles.get(route.name) or _handle(route)
            for route in routes
            if route.replicas
        }

    def handle(self, model: str) -> DeploymentHandle:
        """Serve's handle of a model that :meth:`find` returned."""
        return self._handles[model]

    def find(self, model: object, key: ApiKey | None) -> ModelRoute:
        """The route of the model that a request with this key names.

        Raises:
            BadRequest: no model is named, and there are several.
            UnknownModel: there is no model of this name.
            Forbidden: the key is for other models.
            Unavailable: no replica of the model is ready.
        """
        if model is None and len(self._routes) == 1:
            model = next(iter(self._routes))
        if not isinstance(model, str) or not model:
            raise BadRequest(
                f"say which model, one of: {', '.join(sorted(self._routes))}", param="model"
            )
        route = self._routes.get(model)
        if route is None:
            raise UnknownModel(self._why_unknown(model), param="model")
        check_model(key, model)
        if route.status is ModelStatus.UNLOADING:
            raise UnknownModel(f"The model {model!r} is being unloaded.", param="model")
        if not route.replicas:
            raise Unavailable(
                f"model {model!r} is {route.status}; try again shortly",
                reason="model_not_ready",
                retry_after_s=5,
            )
        return route

    def _why_unknown(self, model: str) -> str:
        if model in self._batch_only:
            return (
                f"The model {model!r} answers batches only: send its requests in a file, to "
                "/v1/batches."
            )
        return unknown_model_message(model, self._routes)

    async def list_models(self, request: Request) -> Response:
        key = request.scope["state"].get("api_key")
        allowed = [
            route
            for route in self
            if route.status is not ModelStatus.UNLOADING
            and (key is None or not key.models or route.name in key.models)
        ]
        return JSONResponse({"object": "list", "data": [_card(route) for route in allowed]})

    async def retrieve_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self._routes:
            raise UnknownModel(self._why_unknown(name), param="model")
        return JSONResponse(_card(self._routes[name]))

    async def ready(self, request: Request) -> Response:
        models = {route.name: route.status for route in self}
        ready = bool(models) and all(status in _SERVING for status in models.values())
        return JSONResponse(
            {"status": "ready" if ready else "not ready", "models": models},
            status_code=200 if ready else 503,
            headers={} if ready else {"Retry-After": "5"},
        )


def _handle(route: ModelRoute) -> DeploymentHandle:
    return serve.get_deployment_handle(ENGINE_DEPLOYMENT, route.app)


def _card(route: ModelRoute) -> dict[str, Any]:
    return {
        "id": route.name,
        "object": "model",
        "created": 0,
        "owned_by": "loomserve",
        "max_model_len": route.max_model_len,
        "status": route.status,
    }
