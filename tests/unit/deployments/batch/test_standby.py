"""A batch lane on standby: it runs without its folder, and opens it once the other has let go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from loomserve.deployments.batch.lane import BatchLaneDeployment
from loomserve.deployments.batch.standby import StandbyBatchLane
from loomserve.platform.base.errors import Unavailable
from loomserve.platform.batch.folder import BatchFolder
from loomserve.platform.fleet.messages import LanePlace
from tests.waiting import PATIENCE_S

PLACE = LanePlace("here", 0.0)


@pytest.fixture(autouse=True)
def opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane itself needs Serve; what it opens of the folder is its own matter."""

    async def opened(self: Any, options: Any, offline: Any, folder: str, *rest: Any) -> None:
        self.folder = BatchFolder(Path(folder))
        self.folder.claim(0.0)

    async def place(self: Any) -> LanePlace:
        return PLACE

    monkeypatch.setattr(BatchLaneDeployment, "__init__", opened)
    monkeypatch.setattr(BatchLaneDeployment, "place", place)
    monkeypatch.setattr(BatchLaneDeployment, "check_health", place)


async def lane_on(folder: Path) -> Any:
    lane: Any = StandbyBatchLane.__new__(StandbyBatchLane)
    await lane.__init__({}, [], str(folder), {}, "token")
    return lane


def test_it_is_healthy_without_the_folder_and_refuses_until_it_has_it(tmp_path: Path) -> None:
    other = BatchFolder(tmp_path / "batch")
    other.claim(0.0)

    async def upgrade() -> None:
        lane = await lane_on(other.path)
        await asyncio.sleep(1.5)
        await lane.check_health()
        with pytest.raises(Unavailable, match="standby"):
            await lane.place()
        reply = await lane.state()
        with pytest.raises(Unavailable, match="standby"):
            reply.get()

        other.release()
        async with asyncio.timeout(PATIENCE_S):
            await lane._opening
        assert await lane.place() == PLACE
        await lane.check_health()

    asyncio.run(upgrade())


def test_one_that_cannot_open_its_folder_is_not_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(BatchLaneDeployment, "__init__", broken)

    async def look() -> None:
        lane = await lane_on(tmp_path / "batch")
        with pytest.raises(OSError, match="disk"):
            await lane._opening
        with pytest.raises(OSError, match="disk"):
            await lane.check_health()

    asyncio.run(look())
