"""The platform whose models come and go in :mod:`benchmarks.elastic`: started, asked, told to."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.popularity import Answer, Asked, serve
from benchmarks.servers import ENGINE_CORE, OTHER_CORE, EngineFlags, configured_arm
from benchmarks.workload import PrefixRequest
from loomserve.platform.cli.admin_token import token_for

_CORES = (ENGINE_CORE, OTHER_CORE)
_STATE_S = 180.0
_LOOK_S = 0.05
_VERBS = {"asleep": "sleep", "unloaded": "unload"}


@dataclass(frozen=True)
class Models:
    """Names for one source, in turn on each core.

    Attributes:
        start: When each is loaded, now or on_demand, by name.
        memory: Of all models on a core together; None: without a bound.
        kv_cache_memory: Of each.
        lending: Of each; None: none of them lends.
    """

    source: str
    start: Mapping[str, str]
    kv_cache_memory: int
    memory: int | None = None
    lending: str | None = None

    def config(self, flags: EngineFlags, port: int) -> dict[str, Any]:
        """The configuration file's content; nothing sleeps or ends by itself."""
        bound = {} if self.memory is None else {"memory": self.memory}
        stays = {"sleep_after_s": None, "unload_after_s": None}
        return {
            "devices": [{"name": f"core{core}", "cores": [core], **bound} for core in _CORES],
            "models": [
                {
                    "name": name,
                    "source": self.source,
                    "devices": [f"core{_CORES[place % len(_CORES)]}"],
                    "kv_cache_memory": self.kv_cache_memory,
                    "start": start,
                    **({"lending": self.lending} if self.lending else {}),
                    **({"idle": stays} if start == "on_demand" else {}),
                    "engine": flags.options(),
                }
                for place, (name, start) in enumerate(self.start.items())
            ],
            "server": {"host": "127.0.0.1", "port": port},
        }


class ElasticPlatform:
    """A running platform, its admin API, and requests for its models."""

    def __init__(self, config: Mapping[str, object], port: int, name: str, logs: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        (self.server,) = configured_arm(name, config, "", port, logs).servers

    @contextlib.contextmanager
    def running(self, timeout_s: float) -> Iterator[None]:
        try:
            self.server.start()
            self.server.wait_ready(timeout_s)
            yield
        finally:
            self.server.stop()

    def _admin(self) -> httpx.Client:
        token = {"Authorization": f"Bearer {token_for(self.url)}"}
        return httpx.Client(base_url=f"{self.url}/admin/v1", headers=token, timeout=_STATE_S)

    def models(self) -> dict[str, dict[str, Any]]:
        """Each as the admin API tells of it, by name."""
        with self._admin() as client:
            models = client.get("/state").raise_for_status().json()["models"]
        return {each["name"]: each for each in models}

    def statuses(self) -> dict[str, str]:
        return {name: each["status"] for name, each in self.models().items()}

    def have(self, model: str, status: str) -> None:
        """Have a model be ``asleep`` or ``unloaded``, and wait until it is.

        Raises:
            TimeoutError: it is not in three minutes.
        """
        with self._admin() as client:
            # It has its last request for as long as its engine does not say otherwise.
            self._until(lambda: client.post(f"/models/{model}/{_VERBS[status]}").is_success)
        self._until(lambda: self.statuses()[model] == status)

    def _until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _STATE_S
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {_STATE_S:.0f} s\n{self.server.tail()}")
            time.sleep(_LOOK_S)

    def answers(self, load: Sequence[Asked], seed: str) -> list[Answer]:
        """Send all requests when they are due, whatever becomes of those before them."""
        return asyncio.run(serve(self.url, load, seed, time.perf_counter()))

    def first_token_s(self, model: str, seed: str) -> float:
        """Seconds from a request to its first token.

        Raises:
            RuntimeError: the request failed.
        """
        request = PrefixRequest(at_s=0, blocks=(0,), tokens=16, output_tokens=2)
        (answer,) = self.answers([Asked(model, 0, request)], seed)
        if answer.error is not None:
            raise RuntimeError(f"{model}: {answer.error}\n{self.server.tail()}")
        return answer.ttft_s
