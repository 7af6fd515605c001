"""Models' applications on Ray Serve."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client

from loomserve.deployments.engine.deploy import deploy_model
from loomserve.platform.fleet.messages import ENGINE_DEPLOYMENT, EngineSpec, model_app


class ServeApps:
    """The applications, each named after its model."""

    def __init__(self) -> None:
        self._deploying: dict[str, Any] = {}

    async def deploy(self, spec: EngineSpec, replicas: int, base: str) -> str | None:
        """Hand a model to Serve, as :func:`deploy_model` does; returns what is wrong with it."""
        name = spec.model.name
        self._deploying[name] = work = deploy_model.remote(spec, replicas, base)
        try:
            problem: str | None = await work
        except ray.exceptions.RayError as error:
            return str(error).splitlines()[-1]
        finally:
            del self._deploying[name]
        return problem

    def stop_deploying(self, name: str) -> None:
        """Hand the model to Serve no more, if it is not done yet."""
        if name in self._deploying:
            ray.cancel(self._deploying[name], force=True)

    async def delete(self, name: str) -> None:
        """End a model's application, and wait for it.

        Raises:
            Exception: Serve did not do it, or not in a minute.
        """
        await asyncio.to_thread(serve.delete, model_app(name), _blocking=True)

    async def scale(self, name: str, replicas: int) -> None:
        """Change the number of a model's replicas.

        Raises:
            Exception: Serve did not do it.
        """
        await _get_global_client()._controller.update_deployment_replicas.remote(
            DeploymentID(name=ENGINE_DEPLOYMENT, app_name=model_app(name)), replicas
        )

    async def statuses(self) -> Mapping[str, Any]:
        """Serve's overview of each application, by its name."""
        applications: Mapping[str, Any] = (await asyncio.to_thread(serve.status)).applications
        return applications
