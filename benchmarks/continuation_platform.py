"""The platform whose engines end in :mod:`benchmarks.continuation`: started, asked, disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.servers import Server
from loomserve.platform.cli.admin_token import token_for

MODEL = "demo"
CORES = (0, 1)
# Of the demo model's KV in float32.
_BYTES_A_TOKEN = 46_080
_READY_S = 600.0
_CONNECTED_S = 2.0
_LOOK_S = 0.05


def configuration(
    port: int, max_model_len: int, tokens_at_once: int, batched_tokens: int | None
) -> dict[str, Any]:
    """Two replicas, each on its core, with the KV store between them.

    Args:
        port: that it listens on.
        max_model_len: of a request.
        tokens_at_once: of all requests that run; each replica, and the store, can hold them alone.
        batched_tokens: of a step; None: vLLM's default.
    """
    kv_bytes = max(tokens_at_once * _BYTES_A_TOKEN, 256 * 2**20)
    engine: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_num_seqs": 64,
        "block_size": 32,
        "enforce_eager": True,
        # Answers do not depend on who is computed with whom.
        "dtype": "float32",
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    }
    if batched_tokens is not None:
        engine["max_num_batched_tokens"] = batched_tokens
    return {
        "devices": [{"name": f"core{core}", "kind": "cpu", "cores": [core]} for core in CORES],
        "models": [
            {
                "name": MODEL,
                "source": "demo",
                "devices": [f"core{core}" for core in CORES],
                "replicas": len(CORES),
                "kv_cache_memory": kv_bytes,
                "engine": engine,
            }
        ],
        "kvstore": {"memory": kv_bytes},
        "server": {"host": "127.0.0.1", "port": port},
    }


class DisturbedPlatform:
    """A running platform and its admin API."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        port = int(config["server"]["port"])
        self.url = f"http://127.0.0.1:{port}"
        command = [str(Path(sys.executable).parent / "loomserve"), "serve", str(path)]
        self.server = Server("loomserve", command, {}, port, "/ready", folder / "serve.log")

    @contextlib.contextmanager
    def running(self, start_timeout: float) -> Iterator[None]:
        try:
            self.server.start()
            self.server.wait_ready(start_timeout)
            asyncio.run(self.whole())
            yield
        finally:
            self.server.stop()

    async def _get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as client:
            return (await client.get(self.url + path, headers=self._token())).raise_for_status()

    def _token(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {token_for(self.url)}"}

    async def model(self) -> dict[str, Any]:
        state = (await self._get("/admin/v1/state")).json()
        return next(one for one in state["models"] if one["name"] == MODEL)

    async def metrics(self, name: str, label: str | None = None) -> dict[str, float]:
        """The sums of a metric's samples by a label's value, or all under no name."""
        page = (await self._get("/metrics")).text
        found: dict[str, float] = defaultdict(float)
        for line in page.splitlines():
            if line.startswith((f"{name} ", f"{name}{{")):
                value = re.search(rf'{label}="([^"]*)"', line) if label else None
                found[value[1] if value else ""] += float(line.rsplit(" ", 1)[1])
        return found

    async def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        return (await self.metrics(name))[""]

    async def set_draining(self, replica_id: str, draining: bool) -> None:
        path = f"{self.url}/admin/v1/replicas/{replica_id}/draining"
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"draining": draining}
            (await client.put(path, json=body, headers=self._token())).raise_for_status()

    async def busiest(self) -> dict[str, Any]:
        """The replica that has most requests."""
        replicas = (await self.model())["replicas"]
        return dict(max(replicas, key=lambda one: one["in_flight"]))

    async def whole(self, without: str | None = None) -> None:
        """Return once all replicas take requests, ``without`` being none of them.

        Raises:
            TimeoutError: they do not.
        """

        def is_whole(model: dict[str, Any]) -> bool:
            ids = [one["id"] for one in model["replicas"]]
            return model["status"] == "ready" and len(ids) == len(CORES) and without not in ids

        await self._until(is_whole, 0.5, "all replicas are back")
        # Gateways connect to what the controller knows of.
        await asyncio.sleep(_CONNECTED_S)

    async def until_left(self, replica_id: str) -> None:
        """Return once the state shows no request on a replica.

        Raises:
            TimeoutError: it goes on showing some.
        """

        def is_empty(model: dict[str, Any]) -> bool:
            return not sum(one["in_flight"] for one in model["replicas"] if one["id"] == replica_id)

        await self._until(is_empty, _LOOK_S, f"replica {replica_id} is empty")

    async def _until(
        self, done: Callable[[dict[str, Any]], bool], every_s: float, what: str
    ) -> None:
        until = time.monotonic() + _READY_S
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError, LookupError, StopIteration):
                if done(await self.model()):
                    return
            await asyncio.sleep(every_s)
        raise TimeoutError(f"not within {_READY_S:.0f} s: {what}\n{self.server.tail()}")


def engine_process(replica: dict[str, Any]) -> psutil.Process:
    """The process that computes for a replica."""
    return psutil.Process(replica["engine_pid"])
