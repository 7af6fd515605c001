"""A running platform for all end-to-end tests: the command a user runs, with keys switched on.

There are two of it, with the same features: one whose engines compute, and one on simulated engines
for what is claimed of the control plane.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml

from loomserve.platform.access.keys import new_key
from loomserve.platform.base.files import replace_private
from tests.e2e.traced import tracing
from tests.forks import descendants, platforms_environment
from tests.unit.platform.tracing.collector import Collector, grpc_collector
from tests.waiting import PATIENCE_S

START_TIMEOUT_S = 600
LOOMSERVE = str(Path(sys.executable).parent / "loomserve")
"""The command that users have."""
HOT = "smollm2-135m"
COLD = "smollm2-135m-8k"
OFFLINE = "smollm2-135m-offline"


CLIENTS_TIMEOUT = openai.Timeout(600, connect=PATIENCE_S)
"""OpenAI's client would give a busy machine 5 s to connect."""
TRUST = httpx.create_ssl_context()
"""Made once: to read all certificates takes 26 ms of a core, and each look has a client."""


@dataclass(frozen=True)
class Platform:
    url: str
    key: str
    limited_key: str
    admin_token: str
    process: psutil.Process
    log: Path
    narrow_key: str = ""
    """May use one model only; some platforms have no such key."""
    operators_url: str = ""
    """Where operators ask, if they have a port of their own."""

    def client(self, key: str | None = None) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=TRUST)
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=key or self.key,
            max_retries=0,
            http_client=http,
            timeout=CLIENTS_TIMEOUT,
        )

    def http(self, token: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token or self.key}"}
        # A client of a busy machine would else leave its connection for another.
        kept = httpx.Limits(keepalive_expiry=None)
        return httpx.Client(
            base_url=self.url, headers=headers, timeout=60, verify=TRUST, limits=kept
        )

    def admin(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.admin_token}"}
        url = self.operators_url or self.url
        return httpx.Client(base_url=url, headers=headers, timeout=60, verify=TRUST)

    def state(self) -> dict[str, Any]:
        with self.admin() as admin:
            found: dict[str, Any] = admin.get("/admin/v1/state").raise_for_status().json()
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry the labels."""
        return sum(self.samples(name, **labels))

    def in_flight(self, model: str, replica: str) -> float:
        """Requests that the gateway has open on a replica, whose heartbeats know of none that are
        short, as are prompts of which its cache has most."""
        return self.metric("loomserve_requests_in_flight", model=model, replica=replica)

    def samples(self, name: str, **labels: str) -> list[float]:
        with self.admin() as admin:
            page = admin.get("/metrics").raise_for_status().text
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line for line in page.splitlines() if line.split("{")[0].split(" ")[0] == name]
        return [float(line.rsplit(" ", 1)[1]) for line in lines if all(w in line for w in wanted)]


def free_port() -> int:
    """One that nobody gets by chance until it is used, as Ray's processes get each of theirs."""
    low, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    while True:
        port = random.SystemRandom().randrange(10_000, int(low))
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


CORES = [
    {"name": "core0", "kind": "cpu", "cores": [0]},
    {"name": "core1", "kind": "cpu", "cores": [min(1, (os.cpu_count() or 1) - 1)]},
]
ENGINE = {
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "block_size": 32,
    "enforce_eager": True,
    # On every machine, so that a block has one size, and an answer the same tokens.
    "dtype": "float32",
    "enable_prompt_tokens_details": True,
}
# What the platform chooses for the demo model by its template.
TOOLS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
COLD_MODEL = {
    "name": COLD,
    "source": "demo",
    "devices": ["core1"],
    "kv_cache_memory": "512MiB",
    "engine": {**ENGINE, "max_model_len": 8192},
}


def platform_config(port: int, hashes: tuple[str, ...]) -> dict[str, Any]:
    """The shared platform's; others take what they need of it."""
    return {
        "devices": CORES,
        "models": [
            {
                "name": HOT,
                "source": "demo",
                "devices": ["core0", "core1"],
                "replicas": 2,
                "kv_cache_memory": "256MiB",
                "engine": ENGINE,
            },
            COLD_MODEL,
        ],
        # Of a block's 1.5 MB this holds 160.
        "kvstore": {"memory": "256MiB"},
        "rebalancing": {
            "folder": "plans",
            "profile": "devices.yaml",
            "settle_s": 5,
            "stale_after_s": 30,
        },
        "batch": {
            "folder": "batch",
            "max_file_bytes": "2MiB",
            "max_lines": 1000,
            # Of a token's 46 KB this holds 1,400.
            "offline_models": [
                {
                    "name": OFFLINE,
                    "source": "demo",
                    "device": "core0",
                    "kv_cache_memory": "64MiB",
                    "batching": {"policy": "wma"},
                }
            ],
        },
        "server": {
            "port": port,
            "max_body": "1MiB",
            "header_timeout_s": 5,
            "drain_timeout_s": 20,
            "audit_log": "audit.log",
            "usage": {"folder": "usage", "interval_s": 1},
            "admin_token_hash": hashes[2],
            "api_keys_file": "keys.yaml",
            "api_keys": [
                {"name": "all", "hash": hashes[0]},
                {"name": "limited", "hash": hashes[1], "models": [HOT], "requests_per_minute": 3},
                {"name": "narrow", "hash": hashes[3], "models": [HOT]},
            ],
        },
    }


def serving(*models: dict[str, Any]) -> Callable[[int, tuple[str, ...]], dict[str, Any]]:
    """The shared platform's configuration with other models, and a key that may use all."""

    def configured(port: int, hashes: tuple[str, ...]) -> dict[str, Any]:
        config = platform_config(port, hashes)
        config["models"] = [*models]
        config["server"]["api_keys"] = config["server"]["api_keys"][:1]
        del config["batch"]
        return config

    return configured


def server_section(port: int, hashes: tuple[str, ...]) -> dict[str, Any]:
    """Of a platform of a test's own: one key that may use all models, and a port for operators."""
    return {
        "port": port,
        "admin_port": free_port(),
        "drain_timeout_s": 20,
        "admin_token_hash": hashes[2],
        "api_keys": [{"name": "all", "hash": hashes[0]}],
    }


def write_files(path: Path, config: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    replace_private(path.parent / "keys.yaml", "api_keys: []")


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with grpc_collector() as collecting:
        yield collecting


def simulated(model: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The model without weights, and about as fast as the demo model on a core."""
    return {**model, "source": "simulated", "simulated": {"step_ms": 20, **options}}


def simulated_config(port: int, hashes: tuple[str, ...]) -> dict[str, Any]:
    """The shared platform's, without weights."""
    config = platform_config(port, hashes)
    config["models"] = [simulated(model) for model in config["models"]]
    del config["batch"]["offline_models"]
    return config


@pytest.fixture(scope="package")
def real_platform(
    collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Platform]:
    with shared(platform_config, collector, tmp_path_factory.mktemp("platform")) as running:
        yield running


@pytest.fixture(scope="package")
def simulated_platform(
    collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Platform]:
    with shared(simulated_config, collector, tmp_path_factory.mktemp("simulated")) as running:
        yield running


@contextmanager
def shared(
    configured: Callable[[int, tuple[str, ...]], dict[str, Any]], collector: Collector, folder: Path
) -> Iterator[Platform]:
    def traced(port: int, hashes: tuple[str, ...]) -> dict[str, Any]:
        config = configured(port, hashes)
        config["server"]["tracing"] = tracing(collector)
        return config

    with started(folder, traced) as running:
        yield running


@pytest.fixture(scope="module")
def platform(request: pytest.FixtureRequest) -> Platform:
    """The one of all files that are marked ``simulated``, or of all others."""
    is_simulated = request.node.get_closest_marker("simulated") is not None
    found: Platform = request.getfixturevalue(
        "simulated_platform" if is_simulated else "real_platform"
    )
    return found


def stream(platform: Platform, model: str, prompt: str, tokens: int) -> str:
    """A greedy answer's text, taken as it comes, with no event that is an error."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    text, ended = "", None
    with platform.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                text, ended = text + choice["text"], choice["finish_reason"] or ended
    assert ended == "length"
    return text


def lives(process: psutil.Process) -> bool:
    """Whether it still runs; who has ended and was not yet reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# When the process of tests is killed, the platform ends in good order. A function that Popen calls
# in the child would have it forked with whatever threads of gRPC's hold there.
_END_WITH_TESTS = """
import os, signal, sys
from loomserve.platform.run.fate import end_with
end_with(int(sys.argv[1]), signal.SIGTERM)
os.execv(sys.argv[2], sys.argv[2:])
"""


@contextmanager
def started(
    folder: Path,
    configured: Callable[[int, tuple[str, ...]], dict[str, Any]],
    *,
    fork: bool = True,
) -> Iterator[Platform]:
    """A platform of its own, ready; ``configured`` gives its configuration for a port and keys.

    With ``fork`` its fork server is forked where tests are, and has not its run's environment.
    """
    keys = [new_key() for _ in range(4)]
    port = free_port()
    config = configured(port, tuple(digest for _, digest in keys))
    write_files(folder / "config.yaml", config)
    log = folder / "serve.log"
    command = [LOOMSERVE, "serve", str(folder / "config.yaml")]
    command = [sys.executable, "-c", _END_WITH_TESTS, str(os.getpid()), *command]
    forks = platforms_environment() if fork else {}
    with log.open("wb") as out:
        # In this session: Linux shares cores among sessions, and may let ours wait for seconds.
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            process_group=0,
            # It must not count what a user has set for Ray elsewhere.
            env={**os.environ, **forks, "RAY_AUTH_MODE": "disabled"},
        )
    running = Platform(
        url=f"http://127.0.0.1:{port}",
        key=keys[0][0],
        limited_key=keys[1][0],
        admin_token=keys[2][0],
        narrow_key=keys[3][0],
        operators_url=f"http://127.0.0.1:{config['server'].get('admin_port', port)}",
        process=psutil.Process(process.pid),
        log=log,
    )
    try:
        wait_ready(running, process)
        yield running
    finally:
        own = running.process.children(recursive=True) if process.poll() is None else []
        forked = set(descendants(running.process)) - {*own} if own else set()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(90)
        finally:
            left = [child for child in own if lives(child)]
            # They end with their fork server, and that with who stood in for it.
            left += psutil.wait_procs(forked, PATIENCE_S)[1]
            for child in left:
                child.kill()
            process.kill()
    assert not left, f"processes were left behind: {left}"
    assert process.returncode == 0, log.read_text()[-2000:]


def wait_ready(platform: Platform, process: subprocess.Popen[bytes] | None = None) -> None:
    """Until every model has all its replicas, but for those that sleep or nobody has asked for."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            pytest.fail(f"loomserve serve ended: {platform.log.read_text()[-3000:]}")
        try:
            ready = httpx.get(f"{platform.url}/ready", verify=TRUST).status_code == 200
            if ready and all(
                model["status"] in {"ready", "asleep", "unloaded"}
                for model in platform.state()["models"]
            ):
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.25)
    pytest.fail(f"not ready in {START_TIMEOUT_S} s: {platform.log.read_text()[-3000:]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What the platform said stands below a test that failed."""
    report = yield
    platform = getattr(item, "funcargs", {}).get("platform")
    if report.failed and platform is not None:
        report.sections.append(("serve.log", platform.log.read_text()[-5000:]))
    return report


@pytest.fixture(autouse=True)
def _whole_again(platform: Platform) -> Iterator[None]:
    """A test that breaks or changes something leaves the platform as it found it."""
    yield
    wait_ready(platform)
