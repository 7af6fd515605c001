"""The admin REST API under ``/admin/v1``; the middleware has checked the operator's token."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Path, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from loomserve.platform.base.errors import Unavailable, UnknownModel
from loomserve.platform.config import Model
from loomserve.platform.http.ingress import exception_handlers
from loomserve.platform.lending.admin import build_lending_router
from loomserve.platform.rebalancing.admin import build_plans_router
from loomserve.platform.state import ModelState, PlatformState
from loomserve.platform.state.roles import Role


class ScaleRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    replicas: int = Field(ge=1, description="How many replicas there should be.")


class DrainRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    draining: bool = Field(description="True: take no new requests; false: take them again.")


class RoleRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Role = Field(description="unified, prefill or decode.")


def build_admin_api(controller: DeploymentHandle, *parts: APIRouter) -> FastAPI:
    """The API as an ASGI app; all but the given parts is carried out by the controller."""
    api = FastAPI(
        title="Loomserve admin",
        version="1",
        summary="See and change what is served, while it serves.",
        exception_handlers=exception_handlers,
    )

    async def ask(method: str, *args: Any) -> Any:
        try:
            answer = await getattr(controller, method).remote(*args)
        except (RayError, RayServeException):
            raise Unavailable(
                "the controller is restarting; requests are still served, try again shortly",
                retry_after_s=5,
            ) from None
        if "error" in answer:
            return JSONResponse({"error": answer["error"]}, status_code=answer["status"])
        return answer

    @api.get("/state", response_model=PlatformState)
    async def state() -> Any:
        """Devices, models, replicas, their loads, and versions."""
        return await ask("state")

    @api.get("/models", response_model=list[ModelState])
    async def models() -> Any:
        """The models with their replicas."""
        return (await ask("state"))["models"]

    @api.get("/models/{name:path}", response_model=ModelState)
    async def model(name: str) -> Any:
        """One model with its replicas."""
        known = {m["name"]: m for m in (await ask("state"))["models"]}
        if name not in known:
            raise UnknownModel(f"there is no model {name!r}; models: {', '.join(known) or 'none'}")
        return known[name]

    @api.post("/models", status_code=202, response_model=PlatformState)
    async def load(model: Model) -> Any:
        """Load a model, written as in the configuration; it serves once its status is ready."""
        return await ask("load", model.model_dump(mode="json"))

    @api.delete("/models/{name:path}", status_code=202, response_model=PlatformState)
    async def unload(
        name: str,
        timeout_s: Annotated[
            float | None, Query(ge=0, le=86_400, description="Wait this long for requests.")
        ] = None,
    ) -> Any:
        """Unload a model once its running requests have ended or the time is up."""
        return await ask("unload", name, timeout_s)

    @api.put("/models/{name:path}/replicas", status_code=202, response_model=PlatformState)
    async def scale(name: str, request: ScaleRequest) -> Any:
        """Change the number of a model's replicas."""
        return await ask("scale", name, request.replicas)

    @api.put("/replicas/{replica_id}/draining", response_model=PlatformState)
    async def drain(replica_id: Annotated[str, Path()], request: DrainRequest) -> Any:
        """Drain a replica: it finishes what it has and takes nothing new, until told otherwise."""
        return await ask("drain", replica_id, request.draining)

    @api.put("/replicas/{replica_id}/role", response_model=PlatformState)
    async def role(replica_id: Annotated[str, Path()], request: RoleRequest) -> Any:
        """Change what is sent to a replica; what it has begun it finishes."""
        return await ask("set_role", replica_id, request.role)

    api.include_router(build_lending_router(ask))
    api.include_router(build_plans_router(ask))
    for part in parts:
        api.include_router(part)
    return api
