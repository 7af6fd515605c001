"""Loads and unloads adapters while their models serve: files first, then engines, then gateways."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from loomserve.deployments.controller.replica_calls import ReplicaCalls, ReplicaUnreachableError
from loomserve.platform.adapters.messages import Adapter
from loomserve.platform.adapters.sources import KeptAdapter, take, take_configured
from loomserve.platform.base.errors import BadRequest, LoomserveError
from loomserve.platform.config import AdapterSource, Config, Model
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.snapshot import ReplicaRecord

_log = logging.getLogger("ray.serve")


class ModelAdapters:
    """Adapters of the fleet's models, as operators want them."""

    def __init__(self, config: Config, base: Path, fleet: Fleet, calls: ReplicaCalls) -> None:
        """``base``: folder to which sources are relative."""
        self._config = config
        self._base = base
        self._fleet = fleet
        self._calls = calls
        self._one_at_a_time = asyncio.Lock()

    async def set(self, model_name: str, name: str, source: str | None) -> None:
        """Load an adapter, have other weights under its name, or unload it (None).

        It returns once replicas have it; those that do not answer get it with their next heartbeat.
        Of one that is unloaded, requests that have begun go on. Raises UnknownModel if there is no
        such model; NotFound if it has no such adapter to unload; Conflict if the name is taken, or
        the model takes no adapter more; BadRequest if there is no such adapter, or the model does
        not take it.
        """
        async with self._one_at_a_time:
            if source is None:
                self._fleet.registry.record(model_name)
                self._fleet.adapters.delete(model_name, name, time.monotonic())
            else:
                await self._put(model_name, name, source)

    async def _put(self, model_name: str, name: str, source: str) -> None:
        model = self._fleet.registry.record(model_name).model
        self._fleet.adapters.check(model, name, self._taken(model), time.monotonic())
        try:
            kept = await asyncio.to_thread(take, model, source, self._base)
        except LoomserveError as error:
            raise BadRequest(str(error), param="source") from None
        self._fleet.registry.record(model_name)  # it may have gone meanwhile
        adapter = self._fleet.adapters.try_out(model_name, name, source, kept.digest, kept.rank)
        if adapter is not None:
            await self._try(adapter)

    async def _try(self, adapter: Adapter) -> None:
        """Give replicas an adapter; it is taken back where one says that it is wrong."""
        try:
            live = self._fleet.registry.live(adapter.model, time.monotonic())
            problems = await asyncio.gather(*(self._give(each, adapter) for each in live))
        except BaseException:
            self._fleet.adapters.give_up()
            raise
        if refused := [problem for problem in problems if problem]:
            self._fleet.adapters.give_up()
            raise BadRequest(f"source {adapter.source!r}: {refused[0]}", param="source")
        self._fleet.adapters.put(adapter, time.monotonic())

    async def _give(self, replica: ReplicaRecord, adapter: Adapter) -> str:
        """Why a replica cannot load an adapter; empty: it has it, or gets it later."""
        if replica.asleep:
            return ""
        wanted = self._fleet.adapters.wanted(adapter.model, time.monotonic())
        try:
            reports = await self._calls.set_adapters(replica.heartbeat.address, wanted)
        except ReplicaUnreachableError as error:
            _log.warning("replica %s was not given adapter %s: %s", replica.id, adapter.key, error)
            return ""
        # Its record may be another by now.
        if (record := self._fleet.registry.find(replica.id)) is not None:
            record.note_adapters(reports)
        return next((each.problem for each in reports if each.id == adapter.id), "")

    async def load_with(self, model: Model, load: Callable[[Model], Awaitable[None]]) -> None:
        """Load a model with its adapters, which its replicas load as they come.

        Raises what ``load`` raises, and:
            Conflict: an adapter or the model has a name that another has.
            BadRequest: an adapter is wrong.
        """
        async with self._one_at_a_time:
            taken = await self._take_all(model)
            await load(model)
            for one, kept in taken:
                self._add(model, one, kept)

    async def _take_all(self, model: Model) -> list[tuple[AdapterSource, KeptAdapter]]:
        self._fleet.adapters.check_free((model.name, *model.adapter_names))
        for name in model.adapter_names:
            self._fleet.adapters.check(model, name, self._taken(model), time.monotonic())
        try:
            return await asyncio.to_thread(take_configured, model, self._base)
        except LoomserveError as error:
            raise BadRequest(str(error), param="adapters.load") from None

    def _add(self, model: Model, one: AdapterSource, kept: KeptAdapter) -> None:
        adapter = self._fleet.adapters.try_out(
            model.name, one.name, one.source, kept.digest, kept.rank
        )
        if adapter is not None:
            self._fleet.adapters.put(adapter, time.monotonic())

    async def load_configured(self) -> None:
        """Load the adapters of the configuration; what is wrong with one is its model's state."""
        for model in self._config.models:
            for one in model.adapters.load if model.adapters is not None else ():
                try:
                    kept = await asyncio.to_thread(take, model, one.source, self._base)
                except LoomserveError as error:
                    _log.error("adapter %s of model %s: %s", one.name, model.name, error)
                    self._fleet.adapters.note_problem(model.name, one.name, one.source, str(error))
                else:
                    async with self._one_at_a_time:
                        self._add(model, one, kept)

    def _taken(self, model: Model) -> dict[str, str]:
        """Names that no adapter may have, each with what has it."""
        models = (*self._config.models, *self._fleet.registry.models, model)
        of_models = {each.name: "a model" for each in models}
        of_models |= {each.name: "an offline model" for each in self._config.offline_models}
        configured = {
            name: f"an adapter of model {each.name!r}"
            for each in self._config.models
            if each.name != model.name
            for name in each.adapter_names
        }
        return configured | dict.fromkeys(self._fleet.aliases, "an alias") | of_models
