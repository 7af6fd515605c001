"""Engines and static models together, as one executor."""

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
from loomserve.platform.batch.offline.queue import StaticQueue, refused


class SeveralExecutors:
    """Lines go to the static model of the name that they ask for, if there is one.

    That their keys may use it is checked here; for all other models the engines' executor does.
    """

    def __init__(
        self, engines: LineExecutor, static: Mapping[str, StaticQueue], keys: KnownKeys
    ) -> None:
        self._engines = engines
        self._static = static
        self._keys = keys

    async def models(self) -> Mapping[str, ServedModel | QueuedModel] | None:
        served = await self._engines.models()
        if served is None:
            return None
        return {**served, **{name: queue.model for name, queue in self._static.items()}}

    async def execute(self, call: LineCall) -> LineAnswer:
        model = str(call.body["model"])
        if model not in self._static:
            return await self._engines.execute(call)
        try:
            check_model(self._keys.named(call.owner), model)
        except Forbidden as error:
            return refused(error)
        return await self._static[model].execute(call)
