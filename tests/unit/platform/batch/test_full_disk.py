"""A lane whose disk is full: it loses nothing, leaves nothing behind, and goes on with room."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from loomserve.platform.batch.executor import LineAnswer, LineCall, LineOutcome
from loomserve.platform.batch.policy.objects import BatchStatus
from tests.unit.platform.batch.http.test_api import Api
from tests.unit.platform.batch.test_lane import Bench, Engines, requests, until

pytestmark = pytest.mark.anyio
MIB = 2**20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts a file system of its own")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def filled(disk: Path, left: int = 0) -> Iterator[None]:
    """While it lasts, so many bytes are free."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(b"x" * (64 * 1024))
    os.truncate(filler, max(0, filler.stat().st_size - left))
    try:
        yield
    finally:
        filler.unlink()


def answering(size: int) -> Engines:
    """Engines whose answers have so many bytes."""

    def behave(call: LineCall) -> LineAnswer:
        body = {"echo": call.body["prompt"], "text": "y" * size}
        return LineAnswer(LineOutcome.ANSWERED, 200, json.dumps(body).encode())

    return Engines(behave)


def left_behind(bench: Bench) -> list[Path]:
    return [*bench.folder.incoming("x").parent.iterdir()]


async def whole_after_room(bench: Bench, batch_id: str, lines: int) -> None:
    batch = await bench.ended(batch_id)
    assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, lines)
    output = bench.lines_of(batch.output_file_id)
    assert [line["custom_id"] for line in output] == [f"c{n}" for n in range(lines)]
    assert not left_behind(bench)


async def test_full_while_a_file_is_checked(disk: Path) -> None:
    bench = Bench(disk / "b", answering(10))
    batch_id = bench.submit(requests(300))
    async with bench.running():
        with filled(disk):
            await asyncio.sleep(0.6)
            assert bench.store.batches.get(None, batch_id).status is BatchStatus.VALIDATING
        await whole_after_room(bench, batch_id, 300)


async def test_full_while_answers_come(disk: Path) -> None:
    bench = Bench(disk / "b", answering(20_000), concurrency=16)
    batch_id = bench.submit(requests(200))
    async with bench.running():
        await until(lambda: bench.store.batches.get(None, batch_id).completed > 20)
        with filled(disk):
            await asyncio.sleep(0.5)
            asked = sum(bench.engines.calls.values())
            await asyncio.sleep(0.3)
            assert sum(bench.engines.calls.values()) == asked, "no more than can be kept"
        await whole_after_room(bench, batch_id, 200)
    assert set(bench.engines.calls.values()) == {1}, "no answer was lost"


async def test_full_while_a_batch_ends_and_another_does_not_wait_for_it(disk: Path) -> None:
    bench = Bench(disk / "b", answering(100_000))
    large = bench.submit(requests(160))
    async with bench.running() as lane:
        await until(lambda: bench.store.batches.get(None, large).completed > 40)
        # Room for the answers, and not for a file of them as well.
        with filled(disk, left=22 * MIB):
            await until(
                lambda: bench.store.batches.get(None, large).status is BatchStatus.FINALIZING
            )
            small = bench.submit(requests(5))
            lane.nudge()
            assert (await bench.ended(small)).status is BatchStatus.COMPLETED
            await asyncio.sleep(0.5)
            assert bench.store.batches.get(None, large).status is BatchStatus.FINALIZING
            assert len(left_behind(bench)) <= 2
        await whole_after_room(bench, large, 160)


def test_full_while_a_file_is_uploaded(disk: Path) -> None:
    api = Api(disk / "b", min_free_space="1B")
    with filled(disk, left=MIB):
        refused = api.upload("x" * 4 * MIB)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "batch_folder_full")
        assert not left_behind(api.bench)
        assert not [*api.bench.folder.blob("x").parent.iterdir()]
    api.upload("x" * 4 * MIB).raise_for_status()
