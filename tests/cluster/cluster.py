"""A platform on several nodes: what operators run on each, and the configuration."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import psutil
import pytest
import yaml

from loomserve.platform.access.keys import new_key
from tests.cluster.nodes import Command, Node
from tests.e2e.conftest import ENGINE, TOOLS, Platform
from tests.streams import Answer, Asked, Load
from tests.waiting import PATIENCE_S

MODEL = "smollm2-135m"
PORT, RAY_PORT = 8000, 6379
NODE_UP_S = 240.0
READY_S = 480.0
STOP_S = 90.0
_COMMAND = str(Path(sys.executable).parent / "loomserve")


def until(
    holds: Callable[[], object], timeout_s: float, why_not: Callable[[], str] = lambda: ""
) -> None:
    deadline = time.monotonic() + timeout_s + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:.0f} s\n{why_not()}")
        time.sleep(0.5)


@dataclass
class RunningNode:
    """A node with ``loomserve node`` on it."""

    machine: Node
    folder: Path
    head: str
    """HOST:PORT."""
    is_head: bool = False
    starts: int = 0
    supervisor: Command | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.machine.name}.log"

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def start(self) -> None:
        """Start it, and wait until it has joined."""
        role = ["--head", "--state", str(self.folder / "state")] if self.is_head else []
        command = [_COMMAND, "node", *role, "--address", self.head]
        token = ["--token-file", str(self.folder / "token")]
        self.supervisor = self.machine.start([*command, *token], self.log)
        self.until_up()

    def until_up(self) -> None:
        """Wait until it has joined once more."""
        self.starts += 1
        until(
            lambda: self.said.count(" is up at ") >= self.starts,
            NODE_UP_S,
            lambda: self.said[-2000:],
        )

    def ray_logs(self) -> str:
        """The ends of what Ray and Serve wrote on the node."""
        logs = f"{self.machine.temporary}/loomserve-*/run-*/ray/session_latest/logs"
        script = f"tail -n 15 {logs}/serve/*.log {logs}/worker-*.err {logs}/raylet.out 2>&1"
        return f"--- {self.machine.name}\n" + self.machine.output("sh", "-c", script + " || true")

    def end(self) -> None:
        if self.supervisor is not None:
            self.supervisor.send_signal(signal.SIGTERM)
            self.supervisor.wait(STOP_S)
            self.supervisor = None


@dataclass
class Cluster:
    """Nodes, and the platform on them."""

    nodes: tuple[RunningNode, ...]
    folder: Path
    key: str = ""
    admin_token: str = ""
    _served: list[Command] = field(default_factory=list)

    @property
    def head(self) -> RunningNode:
        return self.nodes[0]

    @property
    def url(self) -> str:
        return f"http://{self.head.machine.address}:{PORT}"

    @property
    def log(self) -> Path:
        return self.folder / "serve.log"

    def write(self, config: dict[str, Any]) -> None:
        """What :meth:`serve` is to serve."""
        self._config_path.write_text(yaml.safe_dump(config, sort_keys=False))

    @property
    def _config_path(self) -> Path:
        return self.folder / "config.yaml"

    def serve(self) -> Platform:
        """Run ``loomserve serve`` on the head, and wait until all replicas are there."""
        self.log.unlink(missing_ok=True)
        command = [_COMMAND, "serve", str(self._config_path)]
        process = self.head.machine.start(command, self.log)
        self._served.append(process)
        platform = Platform(
            url=self.url,
            key=self.key,
            limited_key="",
            admin_token=self.admin_token,
            process=psutil.Process(process.pid),
            log=self.log,
        )

        def ready() -> bool:
            assert process.poll() is None, self.log.read_text()[-3000:]
            return "ready at" in self.log.read_text()

        until(ready, READY_S, lambda: f"{self.log.read_text()}\n{self.ray_logs()}")
        return platform

    def ray_logs(self) -> str:
        return "\n".join(node.ray_logs() for node in self.nodes if node.machine.is_on)

    def end_serve(self) -> int:
        """Ctrl-C; returns the command's status."""
        process = self._served.pop()
        process.send_signal(signal.SIGINT)
        return process.wait(STOP_S)

    def kill_serve(self) -> None:
        """End the command at once; what it has deployed is not told."""
        process = self._served.pop()
        process.send_signal(signal.SIGKILL)
        process.wait(STOP_S)

    def config(self, engines_on: Sequence[str] = ()) -> dict[str, Any]:
        """One model with a replica on a core of each node, or of these alone."""
        (self.key, digest), (self.admin_token, admin) = new_key(), new_key()
        names = engines_on or [node.machine.name for node in self.nodes]
        return {
            "cluster": {
                "address": f"{self.head.machine.address}:{RAY_PORT}",
                "token_file": str(self.folder / "token"),
            },
            "devices": [
                {"name": f"core{at}", "cores": [at], "node": name} for at, name in enumerate(names)
            ],
            "models": [
                {
                    "name": MODEL,
                    "source": "demo",
                    "devices": [f"core{at}" for at in range(len(names))],
                    "replicas": len(names),
                    "kv_cache_memory": "256MiB",
                    "engine": {**ENGINE, **TOOLS},
                }
            ],
            "server": {
                "host": self.head.machine.address,
                "port": PORT,
                "drain_timeout_s": 10,
                "admin_token_hash": admin,
                "audit_log": "audit.log",
                "api_keys": [{"name": "all", "hash": digest}],
            },
        }


@contextmanager
def cluster(machines: tuple[Node, ...], folder: Path) -> Iterator[Cluster]:
    """The machines as nodes of one cluster, of which the first is the head."""
    head = f"{machines[0].address}:{RAY_PORT}"
    nodes = tuple(
        RunningNode(machine, folder, head, is_head=machine is machines[0]) for machine in machines
    )
    running = Cluster(nodes, folder)
    try:
        for node in nodes:
            node.start()
        yield running
    finally:
        while running._served:
            running.end_serve()
        for node in reversed(nodes):
            if node.machine.is_on:
                node.end()


def answers(url: str) -> bool:
    """Whether the platform takes requests."""
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


class Running:
    """Requests as they run."""

    def __init__(self, url: str, key: str, asked: list[Asked]) -> None:
        self.load = Load()
        work = self.load.run(url, asked, key)
        self._thread = Thread(target=lambda: asyncio.run(work))
        self._thread.start()

    def reach(self, tokens: int) -> None:
        until(lambda: self.load.half_have(tokens) or self.load.ended.is_set(), 120)
        assert not self.load.ended.is_set()

    def answers(self) -> list[Answer]:
        self._thread.join(300)
        assert self.load.ended.is_set()
        lost = [one.lost for one in self.load.answers if one.lost]
        assert not lost, lost
        return self.load.answers
