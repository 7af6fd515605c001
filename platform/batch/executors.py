"""Engines and offline models as one executor."""

from __future__ import annotations

from collections.abc import Mapping

from loomserve.platform.access.keys import check_model
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.base.errors import Forbidden, Unavailable
from loomserve.platform.batch.executor import (
    KnownModels,
    LineAnswer,
    LineCall,
    LineExecutor,
    LineOutcome,
)
from loomserve.platform.batch.offline.queue import OfflineQueue


class CombinedExecutor:
    """Executor that sends a line to the offline model of that name, else to the engines. It checks
    that a line's key may use the offline model; for other models the gateway does."""

    def __init__(
        self, engines: LineExecutor, offline: Mapping[str, OfflineQueue], keys: LiveKeys
    ) -> None:
        self._engines, self._offline, self._keys = engines, offline, keys

    async def models(self) -> KnownModels | None:
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
            return LineAnswer.of(error)
        except Unavailable as error:
            return LineAnswer.of(error, LineOutcome.AWAY)
        return await self._offline[model].execute(call)
