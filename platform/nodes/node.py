"""A node of a cluster: Ray's processes in a run of its own, started again whenever they end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from loomserve.platform.base.errors import StartError
from loomserve.platform.devices.gpus import gpus_here
from loomserve.platform.nodes.ray_command import HEAD, RAYLET, ray_command, tell_listen_port
from loomserve.platform.nodes.reaping import adopt_orphans, has_ended, reap_orphans, started
from loomserve.platform.nodes.resources import offered
from loomserve.platform.run.folder import RunFolder
from loomserve.platform.run.leftovers import end_guard, end_run, remove_leftovers, start_guard
from loomserve.platform.run.ray_environment import node_environment
from loomserve.platform.run.upkeep import RunUpkeep, look_after

Say = Callable[[str], None]


class Beside(Protocol):
    """A process that runs beside Ray, and is started again when it ends."""

    @property
    def pid(self) -> int | None: ...

    def start(self) -> None: ...

    def look(self) -> None:
        """Restart it if it has ended."""

    def stop(self) -> None: ...


MakeBeside = Callable[[RunFolder, dict[str, str]], Beside]
"""For a run, and the environment of its processes."""

STATE_VARIABLE = "LOOMSERVE_STATE"
"""Of processes on the node that keeps what there is but once: its folder for that."""

_LOOK_S = 0.2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# A node that has run so long has not failed at its start.
_STEADY_S = 60.0
_STOP_TIMEOUT_S = 15.0
# What ``ray start`` says once the node has joined.
_STARTED = "Ray runtime started"
_TOLD_LINES = 5


@dataclass(frozen=True)
class NodeOptions:
    """
    Attributes:
        name: What the configuration's devices call it.
        head: HOST and PORT of the cluster's head.
        ip: Its own address, at which the other nodes reach it.
        state: Folder of what there is but once; None: another node has it.
        ports: The first and the last port on which Ray's workers listen; None: any.
    """

    name: str
    head: tuple[str, int]
    is_head: bool
    ip: str
    token: str
    state: Path | None = None
    ports: tuple[int, int] | None = None


class SupervisedNode:
    """Keeps a node until it is stopped, with a longer pause each time that it fails early."""

    def __init__(
        self, options: NodeOptions, say: Say, make_beside: MakeBeside, stopped: threading.Event
    ) -> None:
        """
        Args:
            make_beside: what runs beside Ray, once that is up, which goes on without it.
            stopped: set, it has :meth:`run` return.
        """
        self._options, self._say, self._make_beside = options, say, make_beside
        self._stopped = stopped

    def run(self) -> None:
        """Returns once it has been stopped; no process of the node is left then."""
        adopt_orphans()
        pause_s = _FIRST_PAUSE_S
        while not self._stopped.is_set():
            began = time.monotonic()
            said = self._run_once()
            if self._stopped.is_set():
                return
            if time.monotonic() - began > _STEADY_S:
                pause_s = _FIRST_PAUSE_S
            self._say(f"node {self._options.name} has ended{said}; again in {pause_s:.0f} s")
            self._wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _run_once(self) -> str:
        """Returns once Ray has ended; what it said at last, for a sentence's end."""
        remove_leftovers()
        run = RunFolder.create(self._options.token)
        log = run.path / "ray-start.log"
        environment = self._environment(run)
        beside = self._make_beside(run, environment)
        # Should this process be killed, the node's processes end nevertheless.
        guard = start_guard(run, ())
        try:
            with log.open("wb") as out:
                node = subprocess.Popen(
                    start_command(self._options, run.ray),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    # A terminal's Ctrl-C is for the supervisor, who ends it in good order.
                    start_new_session=True,
                )
            self._attend(node, {node.pid, guard.pid}, beside, RunUpkeep(run), log)
            return _last_lines(log)
        finally:
            beside.stop()
            # Replicas that live on without their raylet would serve for a cluster that has given
            # them up.
            end_run(run)
            end_guard(guard)
            reap_orphans(set())
            run.release()

    def _attend(
        self,
        node: subprocess.Popen[bytes],
        own: set[int],
        beside: Beside,
        upkeep: RunUpkeep,
        log: Path,
    ) -> None:
        told, raylet = False, None
        while node.poll() is None and not self._stopped.is_set():
            look_after(self._stopped, beside.look, upkeep.look)
            reap_orphans({*own, beside.pid})
            # Ray's command goes on without its raylet, when that was told to leave the cluster, and
            # waits for one that has ended as it started.
            if raylet is None and (raylet := next(started(node.pid, (RAYLET,)), None)) is not None:
                with contextlib.suppress(psutil.Error):  # it has just ended
                    tell_listen_port(raylet.cmdline())
            if raylet is not None and has_ended(raylet):
                break
            if not told and _STARTED in log.read_text(errors="replace"):
                told = True
                beside.start()
                self._say(f"node {self._options.name} is up at {self._options.ip}")
            self._stopped.wait(_LOOK_S)
        if not told:
            return  # nothing runs on it
        node.terminate()
        try:
            node.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()

    def _environment(self, run: RunFolder) -> dict[str, str]:
        environment, state = node_environment(run), self._options.state
        if state is not None:
            environment[STATE_VARIABLE] = str(state)
            if self._options.is_head:
                # What Ray knows of the cluster outlives the head, and is there when it comes back.
                environment["RAY_gcs_storage"] = "rocksdb"
                environment["RAY_gcs_storage_path"] = str(state / "ray")
        return environment

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._stopped.wait(_LOOK_S):
            reap_orphans(set())


def start_command(options: NodeOptions, temporary: Path) -> list[str]:
    """The command that runs Ray's part of a node until it ends."""
    host, port = options.head
    resources = offered(
        options.name, range(os.cpu_count() or 1), gpus_here(), state=options.state is not None
    )
    where = [*HEAD, f"--port={port}"] if options.is_head else [f"--address={host}:{port}"]
    ports = (
        [f"--min-worker-port={options.ports[0]}", f"--max-worker-port={options.ports[1]}"]
        if options.ports
        else []
    )
    name = f"--node-name={options.name}"
    return ray_command(options.ip, resources, temporary, "--block", name, *where, *ports)


def _last_lines(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f": {' / '.join(lines[-_TOLD_LINES:])}" if lines else ""


def make_state_folder(folder: Path) -> Path:
    """The folder of what there is but once, made if need be; raises StartError."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StartError(f"cannot make {folder} ({error.strerror}): give another --state") from None
    return folder.absolute()
