"""``loomserve serve``: checks the machine, starts Ray and the applications, and ends them again."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from loomserve.deployments.kvstore.kv_store import start_store, stop_store, store_plan
from loomserve.deployments.planning import (
    bytes_left_behind,
    placed_in_cluster,
    plan,
    present_models,
)
from loomserve.deployments.ray_start import platform_ray
from loomserve.kvstore.server.options import StoreOptions, arena_path, left_behind
from loomserve.platform.access.given_hashes import with_given_hashes
from loomserve.platform.base.errors import RayEnded, StartError
from loomserve.platform.base.reply import Reply
from loomserve.platform.batch.folder import BatchFolder, batch_folder
from loomserve.platform.cli.admin_token import with_admin_token
from loomserve.platform.cli.own_server import (
    tenancy,
    trust_of,
    url_of,
    warnings,
    with_absolute_files,
)
from loomserve.platform.config import LOCAL_NODE, Config
from loomserve.platform.devices.compiler import check_compiler
from loomserve.platform.devices.gpus import check_devices, gpus_here
from loomserve.platform.devices.memory import check_shared_memory
from loomserve.platform.engine.hooks import verify
from loomserve.platform.http.server import listen
from loomserve.platform.placement.by_itself import Placed
from loomserve.platform.placement.own_placement import placed_here, said
from loomserve.platform.rebalancing.plans.store import PlanStore, StoreError, plans_folder
from loomserve.platform.run.leftovers import remove_leftovers
from loomserve.platform.state import ModelState, ModelStatus, PlatformState

Say = Callable[[str], None]

_POLL_S = 0.5
# A first start compiles kernels; a second one finds them in vLLM's cache.
_START_TIMEOUT_S = 900.0
_CLAIM_TIMEOUT_S = 5.0
# One machine is all there is, so all that talks to itself stays on it, wherever the server listens.
_NODE_ADDRESS = "127.0.0.1"


def check_machine(config: Config, base: Path) -> None:
    """Check the machine, to fail now rather than at the first request.

    Raises:
        StartError: a busy port, a core, a GPU, a compiler or a folder that is not there, or a vLLM
            or Ray that lacks what Loomserve builds on; says what to do.
    """
    verify("vllm")
    verify("ray")
    if config.cluster is not None:
        return  # its nodes are checked by themselves, once it is joined
    check_what_one_has(config, base)
    there = os.cpu_count() or 1
    for device in config.devices:
        for core in device.cores:
            if core >= there:
                raise StartError(
                    f"device {device.name!r} names core {core}, but this machine has cores 0 to "
                    f"{there - 1}"
                )
    check_devices(config.devices, LOCAL_NODE, gpus_here())
    if config.kvstore is not None:
        check_shared_memory(config.kvstore.memory, left_behind(config.server.port))
    check_compiler(config.models)


def check_what_one_has(config: Config, base: Path) -> None:
    """Check what only one platform at a time can have: its ports, its folders.

    Raises:
        StartError: another has it.
    """
    for name, port in zip(("port", "admin_port"), config.server.ports, strict=False):
        _check_port(name, config.server.host, port)
    _check_batch_folder(config, base)
    _check_plans_folder(config, base)


def _check_port(name: str, host: str, port: int) -> None:
    try:
        listen(host, port).close()
    except OSError as error:
        raise StartError(
            f"cannot listen on {error.strerror}; stop what uses it, or set server.{name}"
        ) from None


def _check_batch_folder(config: Config, base: Path) -> None:
    path = batch_folder(config, base)
    if path is not None:
        folder = BatchFolder(path)
        # A platform that was killed a moment ago may still be ending.
        folder.claim(_CLAIM_TIMEOUT_S)
        folder.release()


def _check_plans_folder(config: Config, base: Path) -> None:
    if config.rebalancing.controller == "off":
        return
    store = PlanStore(plans_folder(config, base))
    deadline = time.monotonic() + _CLAIM_TIMEOUT_S
    try:
        while not store.claim():
            if time.monotonic() > deadline:
                raise StartError(
                    f"another platform keeps its plans in {plans_folder(config, base)}: set "
                    "rebalancing.folder"
                )
            time.sleep(_POLL_S)
        store.load()
    except StoreError as error:
        raise StartError(str(error)) from None
    store.release()


_UP = frozenset({ModelStatus.READY, ModelStatus.ASLEEP, ModelStatus.UNLOADED})
"""What models are when nothing is to be waited for."""


class Platform:
    """Ray, Serve and Loomserve's applications on this machine."""

    def __init__(self, config: Config, base: Path, say: Say) -> None:
        self._config = config
        self._base = base
        self._store_plan = store_plan(config, base)
        self._store: Any = None
        self._ray = platform_ray(config, base, [arena_path(config.server.port)], say)

    def join(self) -> None:
        """Start Ray, or join the cluster."""
        self._ray.start()

    def start(self, placed: Placed, replicas: dict[str, int]) -> None:
        """Start everything; engines start in the background."""
        from ray import serve

        self._config = placed.config

        from loomserve.deployments.apps import run_platform

        self._began = time.monotonic()
        self._ray.make_room()
        if self._config.cluster is not None:
            check_what_one_has(self._config, self._base)
        internal_token = secrets.token_urlsafe(32)
        store_options = self._start_stores(internal_token)
        serve.start(proxy_location="Disabled")
        self._controller = run_platform(
            self._config,
            replicas,
            internal_token,
            str(self._base.resolve()),
            store_options,
            {name: berth.why for name, berth in placed.berths.items()},
        )

    def _start_stores(self, internal_token: str) -> StoreOptions | None:
        """Returns the options of the store here, which are those of the others but for its node."""
        plan = self._store_plan
        if plan is None:
            return None
        if self._config.cluster is not None:
            from loomserve.deployments.kvstore.node_stores import start_node_stores

            start_node_stores(plan, internal_token)
        else:
            self._store = start_store(plan.here())
        return plan.here()

    def state(self) -> PlatformState:
        reply: Reply[PlatformState] = self._controller.state.remote().result(timeout_s=10)
        return reply.get()

    def wait_ready(self, say: Say) -> None:
        """Wait until all models are ready, and tell ``say`` of each.

        Raises:
            StartError: a model failed, they took too long, or a process listens to other machines.
        """
        told = dict[str, int]()
        while True:
            models = self._models_if_told()
            for model in models or ():
                _tell(model, told, time.monotonic() - self._began, say)
                if model.status is ModelStatus.FAILED:
                    raise StartError(f"model {model.name!r} did not start: {model.message}")
            ready = models is not None and all(m.status in _UP for m in models)
            if ready and self._answers():
                self._ray.check_listening(self._config)
                return
            if time.monotonic() - self._began > _START_TIMEOUT_S:
                raise StartError(f"not ready after {_START_TIMEOUT_S:.0f} s; see {self.log_folder}")
            time.sleep(_POLL_S)

    def _models_if_told(self) -> tuple[ModelState, ...] | None:
        """States of the models; None while the controller is too busy, as when engines start."""
        try:
            return tuple(self.state().models)
        except TimeoutError:
            return None

    def _answers(self) -> bool:
        """Whether the gateway too knows that every model is ready."""
        try:
            server = self._config.server
            ready = f"{url_of(server)}/ready"
            with urllib.request.urlopen(ready, timeout=5, context=trust_of(server)):
                return True
        except OSError:
            return False

    @property
    def log_folder(self) -> Path:
        from loomserve.deployments.ray_node import session_folder

        return session_folder() / "logs" / "serve"

    def lost(self) -> str | None:
        """A process of Ray's that has ended, so that nothing goes on; None: there is none."""
        return self._ray.lost()

    def stop(self) -> None:
        """Let running requests finish, then end every process that the platform has."""
        with _silence():
            try:
                # Calls of Ray's may wait forever for a raylet that is gone, as when a supervisor
                # has told all processes to end at once; others would start another Ray.
                _do(self._delete, unless=self.lost)
            finally:
                if self.lost():
                    self._ray.kill()
                else:
                    self._ray.end()

    def _delete(self) -> None:
        self._ray.delete_platform()
        if self._store is not None:
            stop_store(self._store)

    def kill(self) -> None:
        """End at once what this command has started."""
        self._ray.kill()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Let nobody see what Ray prints as actors end, some of which goes past Python's streams."""
    sys.stdout.flush()
    sys.stderr.flush()
    streams = (1, 2)
    kept = [os.dup(stream) for stream in streams]
    with open(os.devnull, "wb") as nothing:
        for stream in streams:
            os.dup2(nothing.fileno(), stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, before in zip(streams, kept, strict=True):
            os.dup2(before, stream)
            os.close(before)


def run(config: Config, base: Path, say: Say) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        StartError: it cannot be started.
        RayEnded: it cannot go on.
    """
    # All that the platform writes is for its user: logs, sockets, what libraries cache.
    os.umask(0o077)
    config = with_absolute_files(config, base)
    if config.cluster is None:
        remove_leftovers(keep=[arena_path(config.server.port)])
    check_machine(config, base)
    for line in (*warnings(config.server), *tenancy(config)):
        say(line)
    config = with_admin_token(with_given_hashes(config), say)
    placed = Placed(config)
    if config.cluster is None:
        placed = placed_here(config, base, say, bytes_left_behind(config))
    stopped = threading.Event()
    platform = Platform(placed.config, base, say)
    _catch_signals(stopped, platform)
    if config.cluster is None:
        replicas = plan(placed.counted, base, say)
        say("starting Ray")
    else:
        say("joining the cluster")
    try:
        platform.join()
        _catch_signals(stopped, platform)  # Ray has put its own handlers there
        if config.cluster is not None:
            placed = placed_in_cluster(config, base, say)
            replicas = plan(placed.counted, base, say)
        config = placed.config
        for line in said(placed):
            say(line)
        for model in present_models(config):
            used = len(model.devices) if model.pipeline else replicas[model.name]
            where = ", ".join(model.devices[:used])
            say(f"loading {model.name} on {where}")
        platform.start(placed, replicas)
        _do(lambda: platform.wait_ready(say), unless=lambda: stopped.is_set() or platform.lost())
        if not (stopped.is_set() or platform.lost()):
            _greet(config, say)
        while not stopped.wait(_POLL_S):
            _check_ray(platform)
    finally:
        if not platform.lost():
            say("stopping: running requests may finish (Ctrl-C again to cut them)")
        platform.stop()
        say("stopped")


def _check_ray(platform: Platform) -> None:
    if lost := platform.lost():
        raise RayEnded(
            f"Ray's {lost} has ended, so that nothing is served any more. If it was killed for "
            f"want of memory, dmesg says so; else see {platform.log_folder.parent}. Start again"
        )


def _do(work: Callable[[], None], unless: Callable[[], object]) -> None:
    """Do it, but go on without it as soon as ``unless`` says something, or do not begin."""
    if unless():
        return
    failure: list[BaseException] = []

    def doing() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=doing, daemon=True)
    thread.start()
    while thread.is_alive() and not unless():
        thread.join(0.2)
    if failure and not unless():
        raise failure[0]


def _tell(model: ModelState, told: dict[str, int], elapsed_s: float, say: Say) -> None:
    live = len(model.replicas)
    if live > told.get(model.name, 0):
        told[model.name] = live
        say(f"{model.name}: {live} of {model.target_replicas} replicas ready ({elapsed_s:.0f} s)")


def _greet(config: Config, say: Say) -> None:
    url = url_of(config.server)
    say(f"ready at {url}/v1")
    if config.server.tls is not None:
        say("clients ask for a name in its certificate, and trust it (--cacert, SSL_CERT_FILE)")
    if not config.models:
        return
    say("models: " + ", ".join(model.name for model in config.models))
    body = json.dumps(
        {
            "model": config.models[0].name,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 32,
            "temperature": 0,
        }
    )
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.server.asks_for_keys else ""
    headers = f"{key} -H 'Content-Type: application/json'"
    say(f"try it:\n  curl {url}/v1/chat/completions{headers} \\\n    -d '{body}'")
    if not config.server.asks_for_keys:
        say(_first_answer(url, body, trust_of(config.server)))
    admin = url_of(config.server, config.server.operators_port)
    console = f"{admin}/console   ·   " if config.server.console else ""
    say(f"see it work: {console}loomserve status --watch --url {admin}   ·   stop: Ctrl-C")


def _first_answer(url: str, body: str, trust: ssl.SSLContext | None = None) -> str:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=body.encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120, context=trust) as response:
            return f"which answers:\n  {json.load(response)['choices'][0]['message']['content']}"
    except urllib.error.HTTPError as error:
        # A model without a chat template, say; the platform serves nevertheless.
        return f"which it does not answer: {error.read().decode(errors='replace')}"
    except OSError as error:
        return f"which it has not answered: {error}"


def _catch_signals(stopped: threading.Event, platform: Platform) -> None:
    def on_signal(number: int, frame: Any) -> None:
        if stopped.is_set():
            # The second one: do not wait for anything.
            platform.kill()
            os._exit(130)
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
