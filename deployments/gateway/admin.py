"""The admin REST API under ``/admin/v1``; the middleware has checked the operator's token.

Its description is open on loopback, so that a browser can read it and be given the token there.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.security import HTTPBearer
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from loomserve.platform.adapters.admin import build_adapters_router
from loomserve.platform.aliases.admin import build_aliases_router
from loomserve.platform.base.errors import Unavailable
from loomserve.platform.base.reply import Reply
from loomserve.platform.fleet.admin import (
    build_models_router,
    build_nodes_router,
    build_replicas_router,
)
from loomserve.platform.http.ingress import exception_handlers
from loomserve.platform.lending.admin import build_lending_router
from loomserve.platform.rebalancing.admin import build_plans_router


def build_admin_api(controller: DeploymentHandle, *others: APIRouter) -> FastAPI:
    """The API as an ASGI application; the controller carries out all but the other routers."""
    api = FastAPI(
        title="Loomserve admin",
        version="1",
        summary="See and change what is served, while it serves.",
        exception_handlers=exception_handlers,
        # A redirect would be absolute, with the scheme and the host that a proxy asks for.
        redirect_slashes=False,
        # Declares the token in the description; whether it is right, the middleware has checked.
        dependencies=[Depends(HTTPBearer(description="The admin token.", auto_error=False))],
        # Other pages of documentation would need a token that browsers do not send for pages.
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )

    async def ask(method: str, *args: Any) -> Any:
        try:
            reply: Reply[Any] = await getattr(controller, method).remote(*args)
        except (RayError, RayServeException):
            raise Unavailable(
                "the controller is restarting; requests are still served, try again shortly",
                retry_after_s=5,
            ) from None
        return reply.get()

    for build in (
        # First: the names of models may have slashes, so that theirs would take its paths.
        build_adapters_router,
        build_models_router,
        build_replicas_router,
        build_aliases_router,
        build_nodes_router,
        build_lending_router,
        build_plans_router,
    ):
        api.include_router(build(ask))
    for router in others:
        api.include_router(router)
    return api
