"""A replica's adapters: their files fetched to its node, and its engine given them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loomserve.deployments.peer_weights import ADAPTER, fetch_from_peers
from loomserve.platform.adapters.messages import (
    Adapter,
    AdapterOrder,
    AdapterReport,
    AdapterReports,
)
from loomserve.platform.adapters.sources import kept_folder, take
from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.engine.core.host import EngineEnded, EngineHost
from loomserve.platform.fleet.messages import ADAPTERS_PATH, DesiredState, EngineSpec

_log = logging.getLogger("ray.serve")

# An engine's step may take long, and adapters are loaded between two.
_TIMEOUT_S = 45.0
# What could not be loaded, or is not wanted and has requests yet, is looked at again after this.
_AGAIN_S = 5.0


class ReplicaAdapters:
    """Keeps an engine's adapters as they are wanted; of a model without any, it does nothing."""

    def __init__(
        self,
        engine: EngineHost,
        spec: EngineSpec,
        is_asleep: Callable[[], bool],
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        """``changed`` is called when :attr:`reports` change. A sleeping engine loads nothing."""
        self.reports: tuple[AdapterReport, ...] = ()
        """Of each adapter that is wanted, and was tried."""
        self.routes = [Route(ADAPTERS_PATH, self._ordered, methods=["PUT"])]
        self._engine, self._spec = engine, spec
        self._is_asleep, self._changed = is_asleep, changed
        self._wanted: tuple[Adapter, ...] = ()
        self._settled = True
        self._new = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()

    def apply(self, desired: DesiredState) -> None:
        """Have the engine load what is desired, soon."""
        if desired.adapters != self._wanted:
            self._want(desired.adapters)

    def look_again(self) -> None:
        """Try at once what could not be done: the engine has woken."""
        self._new.set()

    async def run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(None if self._settled else _AGAIN_S):
                    await self._new.wait()
            except TimeoutError:
                pass
            try:
                await self._settle()
            except (EngineEnded, TimeoutError, RuntimeError) as error:
                # Its end is its replica's; and what takes long is tried again.
                _log.warning("the engine was not given its adapters: %s", error)
                await asyncio.sleep(_AGAIN_S)

    async def _ordered(self, request: Request) -> Response:
        """The controller's order, answered once it is carried out."""
        self._want(AdapterOrder.model_validate_json(await request.body()).adapters)
        await self._settle()
        answer = AdapterReports(reports=self.reports)
        return Response(answer.model_dump_json(), media_type="application/json")

    def _want(self, adapters: tuple[Adapter, ...]) -> None:
        self._wanted, self._settled = adapters, False
        self._new.set()

    async def _settle(self) -> None:
        async with self._one_at_a_time:
            if self._settled or self._is_asleep():
                self._new.clear()
                return
            self._new.clear()
            wanted = self._wanted
            problems = await asyncio.to_thread(self._fetch, wanted)
            refused, left = await self._engine.set_adapters(
                [_told(each) for each in wanted if each.id not in problems], timeout_s=_TIMEOUT_S
            )
            problems |= refused
            reports = tuple(
                AdapterReport(id=each.id, problem=problems.get(each.id, "")) for each in wanted
            )
            # Something else may be wanted by now.
            self._settled = wanted == self._wanted and not problems and not left
            if reports != self.reports:
                self.reports = reports
                asyncio.get_running_loop().create_task(_logged(self._changed()))

    def _fetch(self, adapters: Sequence[Adapter]) -> dict[int, str]:
        """Fetch files of adapters to this node; returns why some cannot be, by adapter id."""
        problems: dict[int, str] = {}
        for each in adapters:
            try:
                self._fetch_one(each)
            except (LoomserveError, OSError) as error:
                problems[each.id] = str(error)
        return problems

    def _fetch_one(self, adapter: Adapter) -> None:
        if kept_folder(adapter.digest).is_dir():
            return
        fetch_from_peers(ADAPTER + adapter.digest)
        if kept_folder(adapter.digest).is_dir():
            return
        there = take(self._spec.model, adapter.source, Path(self._spec.base))
        if there.digest != adapter.digest:
            raise LoomserveError(
                f"{adapter.source} has other weights than when it was loaded: load it again"
            )


def _told(adapter: Adapter) -> dict[str, object]:
    folder = kept_folder(adapter.digest)
    return {"id": adapter.id, "name": adapter.key, "path": str(folder)}


async def _logged(work: Awaitable[None]) -> None:
    try:
        await work
    except Exception as error:
        _log.warning("the controller was not told of adapters: %s", error)
