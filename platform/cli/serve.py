"""``loomserve serve``: checks the machine, starts Ray and the applications, and ends them again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil

from loomserve.deployments.kvstore.kv_store import start_store, stop_store, store_plan
from loomserve.deployments.planning import (
    bytes_left_behind,
    placed_in_cluster,
    plan,
    present_models,
)
from loomserve.deployments.ray_start import platform_ray
from loomserve.kvstore.server.options import StoreOptions, arena_path
from loomserve.platform.access.keys import with_given_hashes
from loomserve.platform.base.descriptors import raise_limit
from loomserve.platform.base.errors import RayEnded, StartError
from loomserve.platform.base.reply import Reply
from loomserve.platform.cli.admin_token import with_admin_token
from loomserve.platform.cli.checks.machine import check_machine, check_what_one_has
from loomserve.platform.cli.checks.server import (
    descriptors,
    sizes,
    tenancy,
    trust_of,
    url_of,
    warnings,
    with_absolute_files,
)
from loomserve.platform.config import Config
from loomserve.platform.nodes.lone_ray import LOOPBACK
from loomserve.platform.placement.by_itself import Placed
from loomserve.platform.placement.own_placement import placed_here, said
from loomserve.platform.run.ending import EndSignals, Interrupted, finished, report
from loomserve.platform.run.leftovers import remove_leftovers
from loomserve.platform.state import ModelState, ModelStatus, PlatformState

Say = Callable[[str], None]

_POLL_S = 0.5
# A first start compiles kernels; a second one finds them in vLLM's cache.
_START_TIMEOUT_S = 900.0
_CLAIM_TIMEOUT_S = 5.0
_READY_TIMEOUT_S = 5.0
_TELL_S = 15.0
# So long an end of what has only begun to start may take.
_QUICK_S = 3.0


_UP = frozenset({ModelStatus.READY, ModelStatus.ASLEEP, ModelStatus.UNLOADED})
"""What models are when nothing is to be waited for."""


class Platform:
    """Ray, Serve and Loomserve's applications on this machine."""

    def __init__(self, config: Config, base: Path, say: Say) -> None:
        self._config = config
        self._base = base
        self._store_plan = store_plan(config, base)
        self._store: Any = None
        self.ray = platform_ray(config, base, [arena_path(config.server.port)], say)
        self._internal_token = secrets.token_urlsafe(32)

    def start(self, placed: Placed, replicas: dict[str, int]) -> None:
        """Start everything; engines start in the background."""
        from ray import serve

        self._config = placed.config

        from loomserve.deployments.apps import run_platform

        self._began = time.monotonic()
        self.ray.make_room()
        if self._config.cluster is not None:
            check_what_one_has(self._config, self._base)
        store_options = self._start_stores()
        serve.start(proxy_location="Disabled")
        self._controller = run_platform(
            self._config,
            replicas,
            self._internal_token,
            str(self._base.resolve()),
            store_options,
            {name: each.why for name, each in placed.assignments.items()},
        )

    def _start_stores(self) -> StoreOptions | None:
        """Returns the options of the store here, which differ from the others' in the node only."""
        plan = self._store_plan
        if plan is None:
            return None
        if self._config.cluster is not None:
            from loomserve.deployments.kvstore.node_stores import start_node_stores

            start_node_stores(plan, self._internal_token)
        else:
            self._store = start_store(plan.here())
        return plan.here()

    def state(self) -> PlatformState:
        reply: Reply[PlatformState] = self._controller.state.remote().result(timeout_s=10)
        return reply.get()

    def wait_ready(self, say: Say) -> None:
        """Wait until all models are ready; StartError: one failed, or a process is exposed."""
        told = dict[str, int]()
        said_at = time.monotonic()
        configured = {model.name for model in self._config.models}
        while True:
            models, elapsed_s = self._models_if_told(), time.monotonic() - self._began
            for model in models or ():
                if _tell(model, told, elapsed_s, say):
                    said_at = time.monotonic()
                # What an operator loads meanwhile is no part of the start.
                if model.status is ModelStatus.FAILED and model.name in configured:
                    raise StartError(f"model {model.name!r} did not start: {model.message}")
            ready = models is not None and all(m.status in _UP for m in models)
            if ready and self.answers():
                self.ray.check_listening(self._config)
                return
            if elapsed_s > _START_TIMEOUT_S:
                raise StartError(f"not ready after {_START_TIMEOUT_S:.0f} s; see {self.log_folder}")
            if time.monotonic() - said_at > _TELL_S:
                said_at = time.monotonic()
                late = [m.name for m in models or () if m.status not in _UP] or ["the platform"]
                say(f"waiting for {', '.join(late)} ({elapsed_s:.0f} s)")
            time.sleep(_POLL_S)

    def _models_if_told(self) -> tuple[ModelState, ...] | None:
        """States of the models; None while the controller is too busy to answer."""
        try:
            return tuple(self.state().models)
        except TimeoutError:
            return None

    def answers(self) -> bool:
        """Whether the gateway too takes every model for ready, so that clients may ask."""
        try:
            server = self._config.server
            ready = f"{url_of(server)}/ready"
            with urllib.request.urlopen(ready, timeout=_READY_TIMEOUT_S, context=trust_of(server)):
                return True
        except OSError:
            return False

    @property
    def log_folder(self) -> Path:
        from loomserve.deployments.ray_node import session_folder

        return session_folder() / "logs" / "serve"

    def check_ray(self, wait_s: float = 0.0) -> None:
        """Raises RayEnded if a process of Ray's has ended, for which this waits so long."""
        if lost := self.ray.lost(wait_s):
            raise RayEnded(
                f"Ray's {lost} has ended, so that nothing new is served: "
                f"{self.ray.last_said(lost)}. If it was killed for want of memory, dmesg says so. "
                "Start again"
            )

    def drain(self) -> None:
        """Have the gateways end once their open requests have, without Ray."""
        from loomserve.deployments.gateway.internal_client import drain_gateways

        timeout_s = self._config.server.drain_timeout_s + _CLAIM_TIMEOUT_S
        asyncio.run(drain_gateways(self._internal_token, LOOPBACK, timeout_s))

    def stop(self, *, quickly: bool) -> None:
        """Let running requests finish, then end all processes; ``quickly``: there are none."""
        late = time.monotonic() + _QUICK_S if quickly else math.inf
        with _silence():
            try:
                # Calls of Ray's may wait forever for a raylet that is gone, as when a supervisor
                # has told all processes to end at once.
                finished(self._delete, lambda: self.ray.lost() or time.monotonic() > late)
            except BaseException as error:
                self.ray.kill()
                if not isinstance(error, Interrupted):
                    raise
            else:
                self.ray.end()

    def _delete(self) -> None:
        self.ray.delete_platform()
        if self._store is not None:
            stop_store(self._store)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Hide what Ray prints as actors end, some of which bypasses Python's streams."""
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
    """Serve until SIGINT, SIGTERM or SIGHUP; StartError: it cannot be started."""
    # All that the platform writes is for its user: logs, sockets, what libraries cache.
    os.umask(0o077)
    ends = EndSignals()
    ends.catch()
    try:
        placed, replicas = finished(lambda: _prepared(config, base, say), ends.asked.is_set)
    except Interrupted:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        _leave(0, say)
    platform = Platform(placed.config, base, say)
    ends.at_once = platform.ray.kill
    is_up = False
    try:
        try:
            _start(platform, placed, replicas, base, say, ends)
            is_up = True
            while not ends.asked.is_set():
                platform.check_ray(_POLL_S)
        except Interrupted:
            platform.check_ray()
            # Clients may have seen so before this command has.
            is_up = is_up or platform.answers()
    except RayEnded as error:
        report(error)
        with contextlib.suppress(Exception):
            finished(platform.drain, ends.asked.is_set)
        platform.ray.kill()
        _leave(2, say)
    except BaseException:
        # What cannot be ended in order is ended all the same, and does not hide why.
        with contextlib.suppress(Exception):
            platform.stop(quickly=not is_up)
        raise
    if is_up:
        say("stopping: running requests may finish (Ctrl-C again to cut them)")
    platform.stop(quickly=not is_up)
    _leave(0, say)


def _leave(status: int, say: Say) -> NoReturn:
    """End this process, in which threads may still wait for what has been ended."""
    say("stopped")
    sys.stdout.flush()
    os._exit(status)


def _prepared(config: Config, base: Path, say: Say) -> tuple[Placed, dict[str, int]]:
    """What is to run, once all is checked that can be before Ray is up; raises StartError."""
    config = with_absolute_files(config, base)
    if config.cluster is None:
        remove_leftovers(keep=[arena_path(config.server.port)])
    check_machine(config, base)
    raise_limit()
    server = config.server
    for line in (*warnings(server), *descriptors(server), *sizes(config), *tenancy(config)):
        say(line)
    config = with_admin_token(with_given_hashes(config), say)
    if config.cluster is not None:
        return Placed(config), {}  # planned once its nodes are there
    placed = placed_here(config, base, say, bytes_left_behind(config))
    return placed, plan(placed.counted, base, say)


def _start(
    platform: Platform,
    placed: Placed,
    replicas: dict[str, int],
    base: Path,
    say: Say,
    ends: EndSignals,
) -> None:
    """Start the platform, and wait until it answers. Raises StartError if it cannot be started;
    Interrupted if an end was asked for, or a process of Ray's has ended."""

    def unless() -> object:
        return ends.asked.is_set() or platform.ray.lost()

    config = placed.config
    if config.cluster is None:
        say("starting Ray")
    else:
        say("joining the cluster")
    platform.ray.start(ends.asked.is_set)
    if config.cluster is not None:
        placed = finished(lambda: placed_in_cluster(config, base, say), unless)
        replicas = finished(lambda: plan(placed.counted, base, say), unless)
    for line in said(placed):
        say(line)
    for model in present_models(placed.config):
        used = len(model.devices) if model.pipeline else replicas[model.name]
        where = ", ".join(model.devices[:used])
        say(f"loading {model.name} on {where}")
    finished(
        lambda: platform.start(placed, replicas),
        unless,
        lambda seconds: say(f"waiting for controller and gateways ({seconds:.0f} s)"),
    )
    finished(lambda: platform.wait_ready(say), unless)
    finished(lambda: _greet(placed.config, say), unless)


def _tell(model: ModelState, told: dict[str, int], elapsed_s: float, say: Say) -> bool:
    """Report new replicas of the model; returns whether there were any."""
    # One that has not given its first answer is not ready.
    live = len(model.replicas) if model.status is not ModelStatus.LOADING else 0
    if live <= told.get(model.name, 0):
        return False
    told[model.name] = live
    say(f"{model.name}: {live} of {model.target_replicas} replicas ready ({elapsed_s:.0f} s)")
    return True


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
