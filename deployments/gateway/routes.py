"""Routes to the served models, as the controller gave them last, and who may ask for which."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from loomserve.platform.access.key_models import check_model, may_use
from loomserve.platform.base.errors import BadRequest, Unavailable, UnknownModel
from loomserve.platform.config import ApiKey
from loomserve.platform.fleet.messages import ModelRoute
from loomserve.platform.fleet.registry import unknown_model_message
from loomserve.platform.state import ModelStatus

_SERVING = frozenset({ModelStatus.READY, ModelStatus.DEGRADED})


class ModelRoutes:
    """Routing table of the gateway: each model's route; and its endpoints.

    A client learns the names of those models only that its key may use.
    """

    def __init__(
        self,
        is_set_up: Callable[[str], bool],
        batch_only: Collection[str] = (),
        *,
        with_keys: bool = False,
    ) -> None:
        """
        Args:
            is_set_up: whether this gateway has a model's front end.
            batch_only: models that no gateway serves, only the batch lane.
            with_keys: who has no API key may use no model.
        """
        self._is_set_up = is_set_up
        self._batch_only = batch_only
        self._with_keys = with_keys
        self._routes: dict[str, ModelRoute] = {}
        self.drained = False
        """Whether the node is to get no more clients."""

    def __iter__(self) -> Iterator[ModelRoute]:
        return iter(self._routes.values())

    def apply(self, routes: Collection[ModelRoute]) -> None:
        """Replace the table; ``routes`` has all models."""
        self._routes = {route.name: route for route in routes}

    def find(self, model: object, key: ApiKey | None) -> ModelRoute:
        """The route of the model that a request with this key names.

        Raises:
            BadRequest: no model is named, and there are several.
            UnknownModel: there is no model of this name.
            Forbidden: the key is for other models.
            Unavailable: no replica of the model is ready.
        """
        names = self._names(key)
        if model is None and len(names) == 1:
            model = names[0]
        if not isinstance(model, str) or not model:
            raise BadRequest(f"say which model, one of: {', '.join(names)}", param="model")
        route = self._known(model, key)
        if route.status is ModelStatus.UNLOADING:
            raise UnknownModel(f"The model {model!r} is being unloaded.", param="model")
        if not route.replicas:
            raise Unavailable(
                f"model {model!r} is {route.status}; try again shortly",
                reason="model_not_ready",
                retry_after_s=5,
            )
        return route

    def _names(self, key: ApiKey | None) -> list[str]:
        return sorted(name for name in self._routes if may_use(key, name))

    def _known(self, model: str, key: ApiKey | None) -> ModelRoute:
        # First, so that the answer for a model that the key may not use does not depend on whether
        # there is one.
        check_model(key, model)
        if model in self._routes:
            return self._routes[model]
        if model in self._batch_only:
            raise UnknownModel(
                f"The model {model!r} answers batches only: send its requests in a file, to "
                "/v1/batches.",
                param="model",
            )
        raise UnknownModel(unknown_model_message(model, self._names(key)), param="model")

    async def list_models(self, request: Request) -> Response:
        key = _key(request)
        allowed = [
            route
            for route in self
            if route.status is not ModelStatus.UNLOADING and may_use(key, route.name)
        ]
        return JSONResponse({"object": "list", "data": [_card(route) for route in allowed]})

    async def retrieve_model(self, request: Request) -> Response:
        return JSONResponse(_card(self._known(request.path_params["model"], _key(request))))

    async def ready(self, request: Request) -> Response:
        ready = (
            not self.drained
            and bool(self._routes)
            and all(route.status in _SERVING and self._is_set_up(route.name) for route in self)
        )
        key = _key(request)
        shown = self._names(key) if key is not None or not self._with_keys else ()
        return JSONResponse(
            {
                "status": "ready" if ready else "not ready",
                "models": {name: self._routes[name].status for name in shown},
            },
            status_code=200 if ready else 503,
            headers={} if ready else {"Retry-After": "5"},
        )


def _key(request: Request) -> ApiKey | None:
    key: ApiKey | None = request.scope["state"].get("api_key")
    return key


def _card(route: ModelRoute) -> dict[str, Any]:
    return {
        "id": route.name,
        "object": "model",
        "created": 0,
        "owned_by": "loomserve",
        "max_model_len": route.max_model_len,
        "status": route.status,
    }
