"""A batch lane that waits for its folder in the background, and meanwhile is there without it.

During an upgrade on Kubernetes the clusters of both sides live at once, on one folder: the lane
before it ends only when this side runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from loomserve.deployments.batch.lane import BatchLaneDeployment
from loomserve.platform.base.errors import StartError, Unavailable
from loomserve.platform.batch.folder import BatchFolder
from loomserve.platform.fleet.messages import LanePlace

_log = logging.getLogger("ray.serve")

_CLAIM_TIMEOUT_S = 1.0
_RETRY_S = 1.0


class StandbyBatchLane(BatchLaneDeployment):
    """A :class:`BatchLaneDeployment` that runs before it owns its folder."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, options: dict[str, Any], offline: list[dict[str, Any]], folder: str, *given: Any
    ) -> None:
        begin = partial(super().__init__, options, offline, folder, *given)
        self._opening = asyncio.create_task(self._open(Path(folder), begin))

    async def _open(self, folder: Path, begin: Callable[[], Awaitable[None]]) -> None:
        told = ""
        while True:
            claimed = BatchFolder(folder)
            try:
                await asyncio.to_thread(claimed.claim, _CLAIM_TIMEOUT_S)
            except StartError as error:
                if str(error) != told:
                    told = str(error)
                    _log.warning("the batch lane is on standby: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            claimed.release()
            await begin()
            return

    async def place(self) -> LanePlace:
        self._check_open()
        return await super().place()

    async def check_health(self) -> None:
        if self._opening.done():
            self._opening.result()
            await super().check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_opening"):
            self._opening.cancel()
        await super().__del__()

    def _check_open(self) -> None:
        """Raise Unavailable while another lane has the folder."""
        if not self._opening.done():
            raise Unavailable(
                "the batch lane is on standby: another one still has batch.folder, and this one "
                "goes on where that ends",
                reason="batch_lane_away",
                retry_after_s=5,
            )
