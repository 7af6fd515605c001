"""What one key may take of the lane, and all keys together."""

from __future__ import annotations

import asyncio
import gc
import shutil
import time
from collections import namedtuple
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from loomserve.platform.batch.http.api import BatchApi
from loomserve.platform.batch.policy.objects import BatchStatus
from loomserve.platform.config import Batch
from tests.unit.platform.batch.http.test_api import TOKEN, Api, SignedBy
from tests.unit.platform.batch.test_lane import Bench, Engines, requests, until

Disk = namedtuple("Disk", "total used free")


def create(api: Api, file_id: str, owner: str = "alice") -> httpx.Response:
    asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    return api.ask("POST", "/v1/batches", owner, json=asked)


def test_a_key_has_so_many_batches_at_once_and_others_have_theirs(tmp_path: Path) -> None:
    api = Api(tmp_path / "b")
    files = {owner: api.upload(requests(2), owner).json()["id"] for owner in ("alice", "bob")}
    made = [create(api, files["alice"]).raise_for_status().json()["id"] for _ in range(10)]
    refused = create(api, files["alice"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_batches")
    assert "batch.max_batches_per_key" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) > 0
    create(api, files["bob"], "bob").raise_for_status()
    # A place is free again once a batch has ended.
    api.bench.store.batches.fail(made[0], (), 1)
    create(api, files["alice"]).raise_for_status()
    assert create(api, files["alice"]).status_code == 429


def test_all_batches_together_have_so_many_lines(tmp_path: Path) -> None:
    api = Api(tmp_path / "b", max_lines=4, max_unended_lines=4)
    file_id = api.upload(requests(4)).json()["id"]
    bench = api.bench

    async def begin() -> None:
        bench.engines.there = False
        async with bench.running():
            await until(lambda: bench.store.batches.unended_lines() == 4)

    create(api, file_id).raise_for_status()
    asyncio.run(begin())
    refused = create(api, file_id)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_lines")


def test_a_keys_files_have_so_many_bytes_to_the_byte(tmp_path: Path) -> None:
    api = Api(tmp_path / "b", max_bytes_per_key="1KiB")
    first = api.upload("x" * 1000).raise_for_status().json()["id"]
    refused = api.upload("x" * 25)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "file_quota_exceeded")
    assert "batch.max_bytes_per_key" in refused.json()["error"]["message"]
    api.upload("x" * 24).raise_for_status()
    assert api.upload("x").status_code == 413
    api.upload("x" * 1000, owner="bob").raise_for_status()
    api.ask("DELETE", f"/v1/files/{first}").raise_for_status()
    api.upload("x" * 1000).raise_for_status()
    # What was refused is gone from the disk.
    kept = api.bench.folder.blob("x").parent
    assert sorted(path.stat().st_size for path in kept.iterdir()) == [24, 1000, 1000]
    assert not [*api.bench.folder.incoming("x").parent.iterdir()]


def test_uploads_at_once_have_no_more_than_one_after_the_other(tmp_path: Path) -> None:
    api = Api(tmp_path / "b", max_bytes_per_key="1KiB")

    async def all_at_once() -> list[int]:
        transport = httpx.ASGITransport(api.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://lane", auth=SignedBy("alice")
        ) as client:
            given: dict[str, Any] = {"data": {"purpose": "batch"}}
            asked = [
                client.post("/v1/files", files={"file": ("f", "x" * 500)}, **given)
                for _ in range(8)
            ]
            return sorted([answer.status_code for answer in await asyncio.gather(*asked)])

    assert asyncio.run(all_at_once()) == [200] * 2 + [413] * 6
    assert len([*api.bench.folder.blob("x").parent.iterdir()]) == 2


def test_an_upload_that_leaves_too_little_room_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api(tmp_path / "b", min_free_space="100MiB")
    looks = 0

    def usage(path: Path) -> Disk:
        nonlocal looks
        looks += 1
        return Disk(0, 0, (103 - 2 * looks) * 2**20)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    api.upload("x").raise_for_status()
    refused = api.upload("x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "batch_folder_full")
    assert "batch.min_free_space" in refused.json()["error"]["message"]
    # Also in its midst.
    looks = -3
    head = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'

    async def slowly() -> AsyncIterator[bytes]:
        yield head
        for _ in range(30):
            yield b"x" * 2**20

    kind = {"content-type": "multipart/form-data; boundary=b"}
    refused = api.ask("POST", "/v1/files", content=slowly(), headers=kind)
    assert (refused.status_code, looks) == (503, 2)
    assert not [*api.bench.folder.incoming("x").parent.iterdir()]
    assert len([*api.bench.folder.blob("x").parent.iterdir()]) == 1


@pytest.mark.slow
def test_a_thousand_batches_of_one_key_cost_little_memory_and_a_restart_is_quick(
    tmp_path: Path,
) -> None:
    given: dict[str, Any] = {"max_batches_per_key": 1000, "max_unended_lines": 100_001}

    async def creations() -> float:
        bench = Bench(tmp_path / "b", Engines(delay_s=60), **given)
        lane = bench.make()
        app = BatchApi(lane, bench.store, bench.folder, bench.options).app(TOKEN)
        running = asyncio.create_task(lane.run())
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://lane", auth=SignedBy("alice")
        ) as client:
            upload: dict[str, Any] = {"files": {"file": ("f", requests(2000))}}
            file = await client.post("/v1/files", data={"purpose": "batch"}, **upload)
            asked = {"input_file_id": file.json()["id"], "completion_window": "24h"}
            asked |= {"endpoint": "/v1/completions"}
            gc.collect()
            before = psutil.Process().memory_info().rss
            for _ in range(1000):
                (await client.post("/v1/batches", json=asked)).raise_for_status()
            assert (await client.post("/v1/batches", json=asked)).status_code == 429
        await until(lambda: bench.store.batches.unended_lines() == 100_000)
        gc.collect()
        taken = psutil.Process().memory_info().rss - before
        running.cancel()
        await asyncio.wait((running,))
        bench.store.close()
        bench.folder.release()
        return taken / 2**20

    async def restart() -> float:
        began = time.monotonic()
        bench = Bench(tmp_path / "b", Engines(delay_s=60), **given)
        bench.folder.sweep(bench.store.files.ids())
        async with bench.running() as lane:
            await until(lambda: bench.engines.now > 0)
            state = await lane.state()
            took = time.monotonic() - began
        assert len(state.batches) == 1000
        assert state.by_status[BatchStatus.IN_PROGRESS] == 50
        return took

    assert asyncio.run(creations()) < 50
    assert asyncio.run(restart()) < 10


def test_one_batch_fits_into_the_bound_of_all_lines() -> None:
    with pytest.raises(ValueError, match="would never begin"):
        Batch(max_lines=10, max_unended_lines=9)
