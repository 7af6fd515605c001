"""Loomserve under test: its configuration, its server, its admin API and its metrics."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.load import Target
from benchmarks.servers import ENGINE_CORE, OTHER_CORE, Arm, EngineFlags, Server
from loomserve.platform.cli.admin_token import token_for

PROGRAMS = Path(sys.executable).parent
"""Where this checkout's ``loomserve`` is."""
CORES = (ENGINE_CORE, OTHER_CORE)
_LONGEST_ANSWER_S = 180.0


def cores(**more: Any) -> list[dict[str, Any]]:
    """The devices ``core0`` and ``core1`` of a configuration."""
    return [{"name": f"core{core}", "kind": "cpu", "cores": [core], **more} for core in CORES]


def served(
    name: str, source: str, kv_bytes: int | str, engine: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """A model of a configuration, with a replica on each core unless ``more`` says otherwise."""
    return {
        "name": name,
        "source": source,
        "devices": [f"core{core}" for core in CORES],
        "replicas": len(CORES),
        "kv_cache_memory": kv_bytes,
        "engine": engine,
        **more,
    }


def configuration(port: int, *models: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Of a platform on both cores that listens on this port."""
    server = {"host": "127.0.0.1", "port": port}
    return {"devices": cores(), "models": list(models), "server": server, **more}


def _with_token(request: httpx.Request) -> httpx.Request:
    # For each request, since the platform's first start makes the token.
    request.headers["Authorization"] = f"Bearer {token_for(str(request.url))}"
    return request


class Platform:
    """A platform with a configuration, whose file and log are in ``folder``."""

    def __init__(
        self,
        config: Mapping[str, Any],
        folder: Path,
        name: str = "loomserve",
        programs: Path = PROGRAMS,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.config = folder / f"{name}.yaml"
        self.config.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
        port = int(config["server"]["port"])
        self.url = f"http://127.0.0.1:{port}"
        command = [str(programs / "loomserve"), "serve", str(self.config)]
        self.server = Server(name, command, {}, port, "/ready", folder / f"{name}.log")
        self._http = httpx.Client(base_url=self.url, timeout=_LONGEST_ANSWER_S, auth=_with_token)

    def arm(self, *models: str) -> Arm:
        """Its load goes to the first of ``models``, or to both."""
        targets = (Target(self.url, model) for model in models)
        return Arm(self.server.name, [self.server], *targets)

    @contextlib.contextmanager
    def running(self, start_timeout: float) -> Iterator[None]:
        try:
            self.server.start()
            self.server.wait_ready(start_timeout)
            yield
        finally:
            self.server.stop()

    def get(self, path: str) -> Any:
        return self._http.get(f"/admin/v1/{path}").raise_for_status().json()

    def put(self, path: str, body: object) -> Any:
        return self._http.put(f"/admin/v1/{path}", json=body).raise_for_status().json()

    def post(self, path: str, body: object = None) -> httpx.Response:
        return self._http.post(f"/admin/v1/{path}", json=body)

    def models(self) -> dict[str, dict[str, Any]]:
        """Each as the admin API tells of it, by name."""
        return {each["name"]: each for each in self.get("state")["models"]}

    def replicas(self, model: str) -> list[dict[str, Any]]:
        """The states of a model's replicas; one that has ended is among them for a while."""
        return list(self.models().get(model, {"replicas": ()})["replicas"])

    def have(self, model: str, status: str) -> None:
        """Have a model be ``asleep`` or ``unloaded``, and wait until it is.

        Raises:
            TimeoutError: it is not in three minutes.
        """
        verb = {"asleep": "sleep", "unloaded": "unload"}[status]
        # It has its last request for as long as its engine does not say otherwise.
        self.wait(lambda: self.post(f"models/{model}/{verb}").is_success, 180, verb, every_s=0.05)
        self.wait(lambda: self.models()[model]["status"] == status, 180, status, every_s=0.05)

    def wait(
        self, done: Callable[[], bool], seconds: float, what: str, every_s: float = 1.0
    ) -> None:
        """
        Raises:
            TimeoutError: ``done`` returned nothing true for so long.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError, LookupError):
                if done():
                    return
            time.sleep(every_s)
        raise TimeoutError(f"not within {seconds:.0f} s: {what}\n{self.server.tail()}")

    def metrics(self, name: str, label: str | None = None) -> dict[str, float]:
        """The sums of a metric's samples by a label's value, or all under no name."""
        page = self._http.get("/metrics").raise_for_status().text
        found: dict[str, float] = defaultdict(float)
        for line in page.splitlines():
            if line.startswith((f"{name} ", f"{name}{{")):
                value = re.search(rf'{label}="([^"]*)"', line) if label else None
                found[value[1] if value else ""] += float(line.rsplit(" ", 1)[1])
        return found


def engine_process(replica: Mapping[str, Any]) -> psutil.Process:
    """The process that computes for a replica."""
    return psutil.Process(replica["engine_pid"])


def two_models(
    model: str,
    flags: EngineFlags,
    port: int,
    lending: str | None = None,
    engines: int = 2,
    store_bytes: int | None = None,
) -> dict[str, Any]:
    """A configuration: the measured model on one core, and, of two engines, an idle one on the
    other; with a KV store of so much memory, if any.
    """

    names = {"measured": "core0", "idle": "core1"}
    models = [
        served(
            name,
            model,
            flags.kv_cache_memory_bytes,
            flags.options(),
            devices=[device],
            replicas=1,
            **({"lending": lending} if lending else {}),
        )
        for name, device in names.items()
    ]
    store = {} if store_bytes is None else {"kvstore": {"memory": store_bytes}}
    return configuration(port, *models[:engines], **store)
