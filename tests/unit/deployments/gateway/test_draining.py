"""Gateways end their requests when their command says so over the run's sockets, without Ray."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from loomserve.deployments.gateway.internal_client import drain_gateways
from loomserve.platform.access.shared_counts import SharedCounts
from loomserve.platform.http.other_gateways import OtherGateways, Part
from loomserve.platform.run.folder import RUN_VARIABLE

NODE = "127.0.0.1"
TIMEOUT_S = 60.0


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        for name in ("tmp", "sockets"):
            Path(folder, name).mkdir()
        monkeypatch.setenv(RUN_VARIABLE, folder)
        yield Path(folder)


async def front_end(place: SharedCounts | None, drained: asyncio.Event) -> OtherGateways:
    async def get(address: str, path: str, timeout_s: float) -> str:
        raise AssertionError("nobody is asked")

    async def parts() -> list[Part]:
        return []

    async def drain() -> None:
        await asyncio.sleep(0.1)  # as a stream does that ends
        drained.set()

    made = OtherGateways(place, "token", NODE, get)
    await made.listen(parts, drain)
    return made


def test_all_gateways_end_their_requests_before_the_command_goes_on(run: Path) -> None:
    async def check() -> None:
        drained = [asyncio.Event(), asyncio.Event()]
        places = [SharedCounts(run / "tmp" / "gateways", 2) for _ in drained]
        made = [await front_end(*each) for each in zip(places, drained, strict=True)]
        await drain_gateways("token", NODE, TIMEOUT_S)
        assert all(event.is_set() for event in drained)
        for each in made:
            await each.close()

    asyncio.run(check())


def test_one_that_is_alone_listens_for_its_command_too(run: Path) -> None:
    async def check() -> None:
        drained = asyncio.Event()
        made = await front_end(None, drained)
        await drain_gateways("another", NODE, TIMEOUT_S)
        assert not drained.is_set(), "only who has the token may"
        await drain_gateways("token", NODE, TIMEOUT_S)
        assert drained.is_set()
        await made.close()

    asyncio.run(check())


@pytest.mark.usefixtures("run")
def test_a_run_without_gateways_is_not_waited_for() -> None:
    asyncio.run(drain_gateways("token", NODE, TIMEOUT_S))
