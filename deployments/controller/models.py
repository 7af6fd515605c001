"""Carries out on Ray Serve which models there are, and with how many replicas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from loomserve.deployments.controller.replicas import ModelReplicas
from loomserve.deployments.controller.serve_apps import ServeApps
from loomserve.kvstore.server.options import StoreOptions
from loomserve.platform.base.errors import BadRequest, ConfigError, Conflict
from loomserve.platform.base.periodic import every
from loomserve.platform.base.plain_reason import plain_reason, reason_of_traceback
from loomserve.platform.config import Config, Model
from loomserve.platform.devices.memory import least_replicas
from loomserve.platform.engine.options.known import in_fields
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.lending_pairs import lending_options
from loomserve.platform.fleet.messages import EngineSpec, devices_with_replicas, model_app
from loomserve.platform.lengths.stored import prepare_predictor
from loomserve.platform.placement.by_itself import placed_late
from loomserve.platform.scheduling.options import scheduler_options
from loomserve.platform.state import Presence
from loomserve.platform.state.roles import Role

_log = logging.getLogger("ray.serve")

_POLL_S = 0.5
_SERVE_STATUS_PERIOD_S = 3.0
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 15.0
# Replicas learn of it with their next heartbeat; before that, a request may still start.
_UNLOAD_KNOWN_S = 3.0


class ModelLifecycle:
    """Loads, scales and unloads the fleet's models."""

    def __init__(
        self,
        config: Config,
        base: str,
        internal_token: str,
        store: StoreOptions | None,
        fleet: Fleet,
        apps: ServeApps,
        save: Callable[[], Awaitable[None]],
    ) -> None:
        """
        Args:
            base: folder to which the configuration's paths are relative.
            store: the KV store that engines connect to, if there is one.
            save: keeps what operators wish, for the controller after this one.
        """
        self.failure: BaseException | None = None
        """What ended work in the background that should not have ended; None: nothing."""
        self._config = config
        self._base = base
        self._internal_token = internal_token
        self._store = store
        self._fleet = fleet
        self._apps = apps
        self._replicas = ModelReplicas(fleet, apps, self._spec, config.device, base, time.monotonic)
        self._save = save
        self._tasks: set[asyncio.Task[None]] = set()

    def load_configured(self, replicas: dict[str, int], placed: Mapping[str, str]) -> None:
        """Load the configuration's models; ``placed`` says why those are where they are that the
        platform has placed."""
        for model in self._config.models:
            why = placed.get(model.name)
            self._fleet.registry.add(model, replicas[model.name], _first(model), why)
        self._spawn(self._deploy(*self._config.models))

    def resume(self) -> None:
        """Go on with the fleet that an earlier controller left."""
        for record in self._fleet.registry.records:
            if record.unload_deadline is not None:
                self._spawn(self._finish_unload(record.model.name))
        # Of engines that sleep Serve has nothing, and their own heartbeats tell.
        records = self._fleet.registry.records
        there = [each.model for each in records if each.presence is not Presence.ASLEEP]
        self._spawn(self._resume_all(there))

    async def _resume_all(self, models: Collection[Model]) -> None:
        for model in models:
            try:
                await self._replicas.settle(model.name)
            except Exception as error:
                _log.error("Serve was not asked for %s", model.name, exc_info=error)
                self._settle(model.name)

    def set_nodes(self, up: frozenset[str], drained: frozenset[str]) -> None:
        """Keep replicas off nodes that are not up, or drained."""
        if self._replicas.set_nodes(frozenset(self._config.nodes) - up, drained):
            for model in self._fleet.registry.models:
                self._settle(model.name)

    def _settle(self, name: str) -> None:
        self._spawn(self.place(name))

    async def load(self, model: Model) -> None:
        """Load a model, which serves later; one without devices, once it is asked for. Raises
        BadRequest if the configuration would be wrong with it; Conflict if a model or an alias
        of that name is there."""
        self._fleet.aliases.check_model_name(model.name)
        why = None if model.is_placed else "it has not been loaded yet"
        model = placed_late(model, self._config.devices, Path(self._base))
        # The same checks as for the file: devices known, one kind, names apart, lenders there.
        changed = {
            "models": (model, *_lenders_for(model, self._config, self._fleet)),
            "aliases": {},
        }
        try:
            Config.model_validate(self._config.model_copy(update=changed).model_dump())
            await asyncio.to_thread(prepare_predictor, model)
        except (ValueError, ConfigError) as error:
            raise BadRequest(str(error)) from None
        configured = {known.name: known.kvstore_quota for known in self._config.models}
        if model.kvstore_quota != configured.get(model.name):
            raise BadRequest(
                "the KV store learns its quotas when it starts: write kvstore_quota into the "
                "configuration and start again",
                param="kvstore_quota",
            )
        self._fleet.registry.add(model, least_replicas(model), _first(model), why)
        self._spawn(self._deploy(model))

    async def place(self, name: str, pause_s: float = 0.0) -> None:
        """Have Serve start and end a model's replicas until their number is the desired one."""
        await asyncio.sleep(pause_s)
        work = partial(self._replicas.settle, name)
        await self._until_done(f"placing the replicas of {name}", work)

    async def unload(self, name: str, timeout_s: float | None) -> None:
        """Unload a model once its requests have ended, at the latest after ``timeout_s``. Raises
        UnknownModel if there is no such model; Conflict if it is being unloaded already."""
        if timeout_s is None:
            timeout_s = self._config.server.drain_timeout_s
        self._fleet.registry.begin_unload(name, time.monotonic() + timeout_s)
        self._spawn(self._finish_unload(name))

    async def _finish_unload(self, name: str) -> None:
        await asyncio.sleep(_UNLOAD_KNOWN_S)
        while not self._fleet.registry.unload_may_finish(name, time.monotonic()):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        self._apps.stop_deploying(name)
        await self._until_done(f"unloading {name}", partial(self._replicas.end, name))
        self._fleet.registry.remove(name)
        self._fleet.adapters.forget(name)
        # The next controller would unload it once more, and show it meanwhile.
        await self._save()

    async def _until_done(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat what Serve has not done, ever less often."""
        pause_s = _FIRST_RETRY_S
        while True:
            try:
                await work()
            except Exception as error:
                _log.error("%s failed, and is tried again in %.0f s", what, pause_s, exc_info=error)
            else:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_RETRY_S)

    async def scale(self, name: str, replicas: int | None) -> None:
        """Change the number of a model's replicas, which come and go later; None: by its load.
        Raises UnknownModel if there is no such model; BadRequest if its devices allow no such
        number, or it has no bounds for its load."""
        record = self._fleet.registry.record(name)
        _check_replicas(record.model, replicas)
        record.fix(record.model.scaling is not None and replicas is not None)
        if replicas is not None:
            self.set_replicas(name, replicas)

    def set_replicas(self, name: str, replicas: int) -> None:
        """Change the number of a model's replicas; raises UnknownModel."""
        self._fleet.registry.set_target(name, replicas)
        self._settle(name)

    async def set_role(self, replica_id: str, role: Role) -> None:
        """Change what is sent to a replica. Raises NotFound if there is no such replica; Conflict
        if its model keeps nothing in a KV store."""
        model = self._fleet.registry.replica(replica_id).model
        if role is not Role.UNIFIED and self._kv_transfer_config(model) is None:
            raise Conflict(
                f"model {model.name!r} keeps nothing in a KV store, through which prefill replicas "
                "hand over: add a kvstore section to the configuration, and do not set the "
                "model's kvstore to false"
            )
        self._fleet.registry.set_role(replica_id, role)

    async def follow_failures(self) -> None:
        """Ask Serve every few seconds why models have no replicas, until cancelled."""
        await every(
            _SERVE_STATUS_PERIOD_S,
            self._note_failures,
            delay_s=_SERVE_STATUS_PERIOD_S,
            failed=lambda _: None,
        )

    async def _note_failures(self) -> None:
        models = self._fleet.views.models(time.monotonic())
        if not (unready := [model.name for model in models if not model.replicas]):
            return
        statuses = await self._apps.statuses()
        for name in unready:
            for app in devices_with_replicas(name, statuses).values():
                # What is unhealthy Serve starts anew, for which requests wait that can.
                waited_for = self._fleet.registry.record(name).on_demand
                if app.status == "DEPLOY_FAILED" or (app.status == "UNHEALTHY" and not waited_for):
                    self._fleet.registry.set_failure(name, _reason(app))

    async def _deploy(self, *models: Model) -> None:
        # One after the other: to convert weights takes a process of its own, and its memory.
        for model in models:
            try:
                await self._replicas.settle(model.name)
            except Exception as error:
                # The model's own affair, for which no other must wait.
                _log.error("loading %s failed", model.name, exc_info=error)
                reason = plain_reason(str(error) or repr(error))
                self._fleet.registry.set_failure(model.name, reason)
                self._spawn(self.place(model.name, _FIRST_RETRY_S))

    def _spec(self, model: Model) -> EngineSpec:
        kv_transfer_config = self._kv_transfer_config(model)
        return EngineSpec(
            model=model,
            devices=tuple(self._config.device(name) for name in model.devices),
            path=model.source,
            base=self._base,
            internal_token=self._internal_token,
            server=self._config.server,
            kv_transfer_config=kv_transfer_config,
            scheduling=scheduler_options(
                model, self._config.kvstore if kv_transfer_config is not None else None
            ),
            lending=lending_options(model, _lenders_for(model, self._config, self._fleet)),
        )

    def _kv_transfer_config(self, model: Model) -> dict[str, Any] | None:
        if self._store is None or not model.kvstore:
            return None
        return self._store.kv_transfer_config(model.name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("work on models has ended with an error", exc_info=error)
            self.failure = error


def _check_replicas(model: Model, replicas: int | None) -> None:
    """Raises BadRequest if its devices allow no such number, or it has no bounds for its load."""
    if replicas is None and model.scaling is None:
        raise BadRequest(
            f"model {model.name!r} has no replicas.min and replicas.max: ask for a number",
            param="replicas",
        )
    if replicas is not None and not 1 <= replicas <= model.most_replicas:
        raise BadRequest(
            f"model {model.name!r} is one pipeline over its devices: ask for 1 replica"
            if model.pipeline is not None
            else f"model {model.name!r} has {len(model.devices)} devices, one replica each: ask "
            f"for 1 to {len(model.devices)} replicas",
            param="replicas",
        )


def _lenders_for(model: Model, config: Config, fleet: Fleet) -> list[Model]:
    """The other models, loaded or configured, that lend."""
    there = {known.name: known for known in (*config.models, *fleet.registry.models)}
    return [
        known
        for name, known in there.items()
        if model_app(name) != model_app(model.name)
        and known.lending is not None
        and known.lending.lend_memory is not None
    ]


def _first(model: Model) -> Presence:
    """What a model is before anybody has asked for it."""
    return Presence.UNLOADED if model.start == "on_demand" else Presence.READY


def _reason(app: Any) -> str:
    """Serve's message, which may hold whole tracebacks, for a person."""
    messages = [app.message, *(d.message for d in app.deployments.values())]
    told = reason_of_traceback("\n".join(messages))
    return in_fields(told) if told else "it could not start; see Ray Serve's log"
