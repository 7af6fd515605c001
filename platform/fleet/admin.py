"""The admin API's part for what is served: the platform's state, models and replicas."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.base.errors import UnknownModel
from loomserve.platform.base.reply import Ask
from loomserve.platform.config import Model
from loomserve.platform.fleet.http_options import check_given_over_http
from loomserve.platform.state import ModelEvents, ModelState, NodeState, PlatformState, Presence
from loomserve.platform.state.roles import Role


class ScaleRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    replicas: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        description="How many replicas there should be; auto: as many as the load of a model with "
        "replicas.min and replicas.max asks for, after a number was set."
    )


class DrainRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    draining: bool = Field(description="True: take no new requests; false: take them again.")


class RoleRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Role = Field(description="unified, prefill or decode.")


def build_models_router(ask: Ask) -> APIRouter:
    """The routes ``/state``, ``/events`` and under ``/models``."""
    router = APIRouter()

    @router.get("/state", response_model=PlatformState)
    async def state() -> Any:
        """Devices, models, replicas, their loads, and versions."""
        return await ask("state")

    @router.get("/events", response_model=ModelEvents)
    async def events(
        limit: Annotated[int, Query(ge=1, le=1000, description="Events at most.")] = 100,
    ) -> Any:
        """Which models came, slept and were unloaded, and why; since the controller started."""
        return await ask("model_events", limit)

    @router.get("/models", response_model=list[ModelState])
    async def models() -> Any:
        """The models with their replicas."""
        return (await ask("state")).models

    @router.get("/models/{name:path}", response_model=ModelState)
    async def model(name: str) -> Any:
        """One model with its replicas."""
        known = {each.name: each for each in (await ask("state")).models}
        if name not in known:
            raise UnknownModel(f"there is no model {name!r}; models: {', '.join(known) or 'none'}")
        return known[name]

    @router.post("/models", status_code=202, response_model=PlatformState)
    async def load(model: Model) -> Any:
        """Load a model, written as in the configuration; it serves once its status is ready."""
        check_given_over_http(model.engine)
        return await ask("load", model)

    @router.delete("/models/{name:path}", status_code=202, response_model=PlatformState)
    async def unload(
        name: str,
        timeout_s: Annotated[
            float | None, Query(ge=0, le=86_400, description="Wait this long for requests.")
        ] = None,
    ) -> Any:
        """Unload a model once its running requests have ended or the time is up."""
        return await ask("unload", name, timeout_s)

    @router.post("/models/{name:path}/sleep", response_model=PlatformState)
    async def sleep(name: str) -> Any:
        """Have a model without requests give its KV memory back, until the next request."""
        return await ask("set_presence", name, Presence.ASLEEP)

    @router.post("/models/{name:path}/wake", status_code=202, response_model=PlatformState)
    async def wake(name: str) -> Any:
        """Have a model come that sleeps or has no engine, as a request for it does."""
        return await ask("set_presence", name, Presence.READY)

    @router.post("/models/{name:path}/unload", response_model=PlatformState)
    async def put_away(name: str) -> Any:
        """End the engines of a model without requests; its name stays, and a request loads it."""
        return await ask("set_presence", name, Presence.UNLOADED)

    @router.put("/models/{name:path}/replicas", status_code=202, response_model=PlatformState)
    async def scale(name: str, request: ScaleRequest) -> Any:
        """Change the number of a model's replicas; its load has no say until it is set to auto."""
        return await ask("scale", name, None if request.replicas == "auto" else request.replicas)

    return router


def build_nodes_router(ask: Ask) -> APIRouter:
    """The routes under ``/nodes``."""
    router = APIRouter(prefix="/nodes")

    @router.get("", response_model=list[NodeState])
    async def nodes() -> Any:
        """The nodes, and what they have."""
        return (await ask("state")).nodes

    @router.post("/{name}/drain", status_code=202, response_model=list[NodeState])
    async def drain(name: Annotated[str, Path()]) -> Any:
        """Have what is open on a node go on elsewhere, and start nothing on it any more."""
        return (await ask("drain_node", name, True)).nodes

    @router.delete("/{name}/drain", response_model=list[NodeState])
    async def undrain(name: Annotated[str, Path()]) -> Any:
        """Give a node work again."""
        return (await ask("drain_node", name, False)).nodes

    return router


def build_replicas_router(ask: Ask) -> APIRouter:
    """The routes under ``/replicas``."""
    router = APIRouter(prefix="/replicas")

    @router.put("/{replica_id}/draining", response_model=PlatformState)
    async def drain(replica_id: Annotated[str, Path()], request: DrainRequest) -> Any:
        """Drain a replica: it finishes what it has and takes nothing new, until told otherwise."""
        return await ask("drain", replica_id, request.draining)

    @router.put("/{replica_id}/role", response_model=PlatformState)
    async def role(replica_id: Annotated[str, Path()], request: RoleRequest) -> Any:
        """Change what is sent to a replica; what it has begun it finishes."""
        return await ask("set_role", replica_id, request.role)

    return router
