"""Routes to the served models, as the controller gave them last, and who may ask for which."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from loomserve.platform.access.keys import check_model, may_use, usable_models
from loomserve.platform.aliases.policy.choice import by_client, by_number, present
from loomserve.platform.base.errors import BadRequest, Unavailable, UnknownModel
from loomserve.platform.config import Alias, ApiKey
from loomserve.platform.fleet.messages import ModelRoute
from loomserve.platform.fleet.registry import unknown_model_message
from loomserve.platform.http.engine_errors import model_failed
from loomserve.platform.state import ModelStatus

# By which OpenAI's clients tell their end users apart, the newer one first.
_USERS = ("safety_identifier", "user")
_SERVING = frozenset({ModelStatus.READY, ModelStatus.DEGRADED})


def _uncounted(_: str, __: str) -> None:
    pass


class ModelRoutes:
    """Routes of models, adapters and aliases; clients learn names only that their key may use."""

    def __init__(
        self,
        is_set_up: Callable[[str], bool],
        batch_only: Collection[str] = (),
        *,
        with_keys: bool = False,
        chosen: Callable[[str, str], None] = _uncounted,
        number: Callable[[], float] = random.random,
    ) -> None:
        """
        Args:
            is_set_up: whether this gateway has a model's front end.
            batch_only: models that no gateway serves, only the batch lane.
            with_keys: clients without an API key may use no model.
            chosen: called with the alias and the model of each request for an alias.
            number: a random number from 0 up to but not 1.
        """
        self._is_set_up = is_set_up
        self._batch_only = batch_only
        self._with_keys = with_keys
        self._chosen = chosen
        self._number = number
        self._routes: dict[str, ModelRoute] = {}
        self._adapters: dict[str, ModelRoute] = {}
        """By name of an adapter, the route of its model, which says what was asked for."""
        self._aliases: dict[str, Alias] = {}
        self.drained = False
        """Whether the node is to get no more clients."""
        self._has_settled = False

    def __iter__(self) -> Iterator[ModelRoute]:
        return iter(self._routes.values())

    def apply(
        self, routes: Collection[ModelRoute], aliases: Mapping[str, Alias] | None = None
    ) -> None:
        """Replace the table; ``routes`` has all models, and ``aliases`` all aliases."""
        self._routes = {route.name: route for route in routes}
        self._adapters = {
            each.adapter.name: route.model_copy(update={"adapter": each.adapter.name})
            for route in routes
            for each in route.adapters
            if not each.leaves and each.adapter.name not in self._routes
        }
        taken = self._routes.keys() | self._adapters.keys()
        self._aliases = {n: a for n, a in (aliases or {}).items() if n not in taken}

    def choose(
        self, fields: Mapping[str, Any], key: ApiKey | None, preferred: str | None = None
    ) -> ModelRoute:
        """The route of the model that a request names, or of one that its alias stands for. An
        alias means the ``preferred`` model if it may. Raises what :meth:`find` raises."""
        name = fields.get("model")
        if not isinstance(name, str) or name not in self._aliases:
            return self.find(name, key)
        usable = self._usable(name, key)
        there = present(usable, (self._is_ready, self._has_replicas, self._is_loaded))
        if not there:
            raise Unavailable(
                f"no model of {name!r} is loaded; try again shortly",
                reason="model_not_ready",
                retry_after_s=5,
            )
        if preferred in there:
            model = preferred
        elif (client := _client(self._aliases[name], key, fields)) is not None:
            model = by_client(there, name, client)
        else:
            model = by_number(there, self._number())
        self._chosen(name, model)
        return self._answering(model)

    def _usable(self, name: str, key: ApiKey | None) -> dict[str, int]:
        """Raises Forbidden if the key may use neither the alias nor any of its models."""
        usable = usable_models(key, name, self._aliases[name])
        if not any(usable.values()):
            check_model(key, name)
        return usable

    def _asked(self, name: str) -> ModelRoute | None:
        """The route of a model or an adapter; None: there is none of that name."""
        return self._routes.get(name) or self._adapters.get(name)

    def _is_loaded(self, model: str) -> bool:
        route = self._asked(model)
        return route is not None and route.status is not ModelStatus.UNLOADING

    def _has_replicas(self, model: str) -> bool:
        route = self._asked(model)
        return self._is_loaded(model) and route is not None and bool(route.replicas)

    def _is_ready(self, model: str) -> bool:
        route = self._asked(model)
        if route is None:
            return False
        return self._comes(route) or (self._has_replicas(model) and self._is_set_up(route.name))

    def _comes(self, route: ModelRoute) -> bool:
        """Whether the model is loaded for requests, which wait for it."""
        return (
            route.status is not ModelStatus.UNLOADING
            and route.on_demand
            and route.status is not ModelStatus.FAILED
        )

    def find(self, model: object, key: ApiKey | None) -> ModelRoute:
        """The route of the model that a request with this key names. Raises BadRequest if no model
        is named, and there are several; UnknownModel if there is no model of this name;
        Forbidden if the key is for other models; Unavailable if no replica of the model is
        ready, and requests do not wait for it."""
        names = self._names(key)
        if model is None and len(names) == 1:
            model = names[0]
        if not isinstance(model, str) or not model:
            known = ", ".join(self._all_names(key))
            raise BadRequest(f"say which model, one of: {known}", param="model")
        return self._answering(self._known(model, key).asked)

    def _answering(self, model: str) -> ModelRoute:
        route = self._asked(model)
        assert route is not None
        if route.status is ModelStatus.UNLOADING:
            raise UnknownModel(f"The model {model!r} is being unloaded.", param="model")
        if not route.replicas and not route.on_demand:
            if route.status is ModelStatus.FAILED:
                raise model_failed(model)
            raise Unavailable(
                f"model {model!r} is {route.status}; try again shortly",
                reason="model_not_ready",
                retry_after_s=5,
            )
        return route

    def _names(self, key: ApiKey | None) -> list[str]:
        return sorted(name for name in self._routes if may_use(key, name))

    def _all_names(self, key: ApiKey | None) -> list[str]:
        adapters = sorted(name for name in self._adapters if may_use(key, name))
        return [*self._names(key), *adapters, *self._alias_cards(key)]

    def _known(self, model: str, key: ApiKey | None) -> ModelRoute:
        # First, so that the answer for a model that the key may not use does not depend on whether
        # there is one.
        check_model(key, model)
        if (route := self._asked(model)) is not None:
            return route
        if model in self._batch_only:
            raise UnknownModel(
                f"The model {model!r} answers batches only: send its requests in a file, to "
                "/v1/batches.",
                param="model",
            )
        raise UnknownModel(unknown_model_message(model, self._all_names(key)), param="model")

    async def list_models(self, request: Request) -> Response:
        key = _key(request)
        allowed = [
            route
            for route in (*self, *self._adapters.values())
            if route.status is not ModelStatus.UNLOADING and may_use(key, route.asked)
        ]
        cards = [*map(_card, allowed), *self._alias_cards(key).values()]
        return JSONResponse({"object": "list", "data": cards})

    async def retrieve_model(self, request: Request) -> Response:
        name, key = request.path_params["model"], _key(request)
        if (card := self._alias_cards(key).get(name)) is not None:
            return JSONResponse(card)
        return JSONResponse(_card(self._known(name, key)))

    def _alias_cards(self, key: ApiKey | None) -> dict[str, dict[str, Any]]:
        """Those that a key may use, with the models that it gets of them."""
        usable = {name: usable_models(key, name, alias) for name, alias in self._aliases.items()}
        return {
            name: {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "loomserve",
                "models": models,
                "sticky": self._aliases[name].sticky,
            }
            for name, models in usable.items()
            if any(models.values())
        }

    def _takes_requests(self, route: ModelRoute) -> bool:
        # For one that comes and goes they wait.
        is_set_up = route.status in _SERVING and self._is_set_up(route.name)
        return is_set_up or (route.on_demand and route.status is not ModelStatus.FAILED)

    async def takes_clients(self, request: Request) -> Response:
        """For load balancers: whether to send clients here. Like :meth:`ready` until all models
        have begun to serve, or failed to. Then one that answers is enough: that an operator loads
        another is no reason to take all others away."""
        serving = [self._takes_requests(route) for route in self]
        self._has_settled |= bool(serving) and all(
            takes or route.status is ModelStatus.FAILED
            for takes, route in zip(serving, self, strict=True)
        )
        if self._has_settled and any(serving) and not self.drained:
            return PlainTextResponse("success")
        return PlainTextResponse("not ready", status_code=503, headers={"Retry-After": "5"})

    async def ready(self, request: Request) -> Response:
        ready = (
            not self.drained
            and bool(self._routes)
            and all(self._takes_requests(route) for route in self)
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


def _client(alias: Alias, key: ApiKey | None, fields: Mapping[str, Any]) -> str | None:
    """Whose requests all get one model of the alias; None: each request chooses for itself."""
    if alias.sticky is None:
        return None
    tenant = key.name if key is not None else None
    if alias.sticky == "user":
        users = (fields.get(field) for field in _USERS)
        user = next((user for user in users if isinstance(user, str) and user), None)
        if user is not None:
            return json.dumps([tenant, user])
    return tenant


def _key(request: Request) -> ApiKey | None:
    key: ApiKey | None = request.scope["state"].get("api_key")
    return key


def _card(route: ModelRoute) -> dict[str, Any]:
    of_adapter = {}
    for each in route.adapters if route.adapter is not None else ():
        if each.adapter.name == route.adapter and not each.leaves:
            # As vLLM's own server has them.
            of_adapter = {"root": each.adapter.source, "parent": route.name}
    return {
        "id": route.asked,
        "object": "model",
        "created": 0,
        "owned_by": "loomserve",
        "max_model_len": route.max_model_len,
        "status": route.status,
        **of_adapter,
    }
