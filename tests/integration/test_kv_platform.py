"""A platform with tenants that is killed whole, and the next one on the same port."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from loomserve.kvstore.server.options import arena_path
from loomserve.kvstore.storage.arena import ArenaOwner
from loomserve.platform.access.keys import new_key
from tests.e2e.conftest import Platform, free_port, wait_ready

LOOMSERVE = Path(sys.executable).parent / "loomserve"
MODEL = "chat"
TOKENS_A_BLOCK = 32
PROMPT = "Once upon a time there was a fox that lived in the woods. " * 20


@contextmanager
def running(
    config: Path, log: Path, port: int, keys: list[str]
) -> Iterator[tuple[Platform, subprocess.Popen[bytes]]]:
    with log.open("ab") as out:
        process = subprocess.Popen(
            [LOOMSERVE, "serve", config], stdout=out, stderr=out, process_group=0
        )
    platform = Platform(
        url=f"http://127.0.0.1:{port}",
        key=keys[0],
        limited_key=keys[1],
        admin_token=keys[2],
        process=psutil.Process(process.pid),
        log=log,
    )
    try:
        wait_ready(platform, process)
        yield platform, process
    finally:
        kill_whole(process)


def kill_whole(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in children:
            child.kill()
        psutil.wait_procs(children, timeout=10)
    process.wait()


def write_config(folder: Path, kvstore: dict[str, Any], server: dict[str, Any]) -> Path:
    engine = {
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "block_size": TOKENS_A_BLOCK,
        "enforce_eager": True,
        "dtype": "float32",
        "enable_prompt_tokens_details": True,
    }
    model = {
        "name": MODEL,
        "source": "demo",
        "devices": ["core0"],
        "kv_cache_memory": "128MiB",
        "engine": engine,
    }
    devices = [{"name": "core0", "kind": "cpu", "cores": [0]}]
    path = folder / "config.yaml"
    content = {"devices": devices, "models": [model], "kvstore": kvstore, "server": server}
    path.write_text(yaml.safe_dump(content))
    return path


def complete(platform: Platform, key: str) -> tuple[str, int]:
    answer = platform.client(key).completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].text, details.cached_tokens if details else 0


def blocks(platform: Platform) -> int:
    with platform.admin() as admin:
        models = admin.get("/admin/v1/kv").raise_for_status().json()["models"]
    return sum(model["blocks_in_memory"] for model in models)


@pytest.mark.slow
@pytest.mark.engine
def test_tenants_share_no_blocks_and_each_finds_its_own_after_all_was_killed(
    tmp_path: Path,
) -> None:
    keys = [new_key() for _ in range(3)]
    port = free_port()
    api_keys = [
        {"name": name, "hash": digest}
        for name, (_, digest) in zip(("alice", "bob"), keys[:2], strict=True)
    ]
    kvstore = {"memory": "128MiB", "ssd": "1GiB", "ssd_path": "blocks"}
    server = {"port": port, "api_keys": api_keys, "admin_token_hash": keys[2][1]}
    config = write_config(tmp_path, kvstore, server)
    secrets = [key for key, _ in keys]
    alice, bob, _ = secrets
    with running(config, tmp_path / "log", port, secrets) as (platform, process):
        text, cached = complete(platform, alice)
        assert cached == 0
        assert complete(platform, alice)[1] > 0
        assert complete(platform, bob) == (text, 0)
        before = blocks(platform)
        assert before > 10
        kill_whole(process)
        assert arena_path(port).exists()
    with running(config, tmp_path / "log", port, secrets) as (platform, process):
        assert blocks(platform) == before
        again, cached = complete(platform, alice)
        assert again == text
        assert cached > 5 * TOKENS_A_BLOCK
        assert complete(platform, bob) == (text, cached)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert not arena_path(port).parent.exists()
        assert (tmp_path / "blocks" / "spaces.json").exists()


def test_a_store_that_cannot_start_ends_the_start_with_its_own_sentence(tmp_path: Path) -> None:
    port = free_port()
    arena = arena_path(port)
    for folder in (arena.parent.parent, arena.parent):  # a parent's mode is not for mkdir to set
        folder.mkdir(mode=0o700, exist_ok=True)
    owner = ArenaOwner.create(arena, 64 * 2**20, 8 * 2**20)
    try:
        config = write_config(tmp_path, {"memory": "64MiB"}, {"port": port})
        ended = subprocess.run([LOOMSERVE, "serve", config], capture_output=True, timeout=120)
    finally:
        owner.close()
        shutil.rmtree(arena.parent)
    assert ended.returncode == 2
    said = ended.stderr.decode()
    assert f"loomserve: the KV store cannot start: the KV arena {arena} belongs to a" in said
    assert "Traceback" not in said
