"""Engines and offline models together, as one executor."""

from __future__ import annotations

from collections.abc import Mapping

from loomserve.platform.access.key_models import KnownKeys, check_model
from loomserve.platform.base.errors import Forbidden
from loomserve.platform.batch.executor import (
    LineAnswer,
    LineCall,
    LineExecutor,
    QueuedModel,
    ServedModel,
)
from loomserve.platform.batch.offline.queue import OfflineQueue, refused


class SeveralExecutors:
    """Lines go to the offline model of the name that they ask for, if there is one.

    That their keys may use it is checked here; for all other models the engines' executor does.
    """

    def __init__(
        self, engines: LineExecutor, offline: Mapping[str, OfflineQueue], keys: KnownKeys
    ) -> None:
        self._engines = engines
        self._offline = offline
        self._keys = keys

    async def models(self) -> Mapping[str, ServedModel | QueuedModel] | None:
        served = await self._engines.models()
        if served is None:
            return None
        return {**served, **{name: queue.model for name, queue in self._offline.items()}}

    async def execute(self, call: LineCall) -> LineAnswer:
        model = str(call.body["model"])
        if model not in self._offline:
            return await self._engines.execute(call)
        try:
            check_model(self._keys.named(call.owner), model)
        except Forbidden as error:
            return refused(error)
        return await self._offline[model].execute(call)
