"""The Ray that a platform runs on: one of its own on this machine, or a cluster that it joins.

Ray reads its environment when it is imported, so that it is imported within functions.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from loomserve.deployments.forked_worker import preloaded
from loomserve.platform.base.errors import StartError
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.base.plain_reason import first_line
from loomserve.platform.config import Config
from loomserve.platform.devices.gpus import vllm_is_for
from loomserve.platform.devices.shortage import has_quota
from loomserve.platform.engine.process.kept_fork_server import KeptForkServer
from loomserve.platform.fleet.messages import is_ours
from loomserve.platform.nodes.lone_ray import LoneRay, busy
from loomserve.platform.nodes.reaping import reap_orphans
from loomserve.platform.nodes.resources import STATE, name_in, offered_by_devices
from loomserve.platform.nodes.token import read_token, token_path
from loomserve.platform.run.ending import Interrupted, finished, telling
from loomserve.platform.run.folder import RunFolder
from loomserve.platform.run.leftovers import end_guard, end_run, start_guard
from loomserve.platform.run.listening import check_listening
from loomserve.platform.run.ray_environment import driver_environment, set_environment
from loomserve.platform.run.upkeep import RunUpkeep, keep_looking

_LOOK_S = 0.5
# Of the machine's, beside the one that the command itself keeps busy.
_IDLE_CORES = 0.75
# A raylet that has just joined is not known to all parts of Ray at once.
_OWN_NODE_TIMEOUT_S = 20.0
# A command that was told to end may still be ending.
_COMMAND_TIMEOUT_S = 5.0
# Stores first write what is on its way to SSD.
_STORES_TIMEOUT_S = 30.0


Unless = Callable[[], object]
"""Says something once nobody waits any more."""


class OwnRay:
    """A Ray of this machine alone, in a run of its own."""

    def __init__(self, config: Config, keep: Iterable[Path], say: Callable[[str], None]) -> None:
        """``keep`` is shared memory that outlives the run."""
        self._config, self._keep, self._say = config, list(keep), say
        self._run: RunFolder | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._forks: KeptForkServer | None = None
        self._ray: LoneRay | None = None
        self._joined = False
        self._has_idle_core = _idle_cores() >= _IDLE_CORES
        self._ended = threading.Event()

    def start(self, unless: Unless) -> None:
        """Raises StartError if Ray cannot be started, Interrupted once ``unless`` says so."""
        try:
            address = self._start_processes(unless)
        except StartError as error:
            self.kill()
            self._has_idle_core = False
            self._say(f"{error}; starting it once more")
            try:
                address = self._start_processes(unless)
            except StartError as again:
                raise StartError(f"{again}{busy()}") from again
        assert self._run is not None
        forks = self._forks or self._start_forks(self._run)
        try:
            finished(lambda: join(address), lambda: unless() or self.lost(), self._tell)
        except Interrupted:
            if unless() or (name := self.lost()) is None:
                raise
            said = self.last_said(name)
            raise StartError(f"Ray did not start: its {name} has ended ({said}){busy()}") from None
        except Exception as error:  # Ray has no class of its own for that
            raise StartError(f"Ray did not start: {first_line(error)}{busy()}") from error
        self._joined = True
        self._ended = threading.Event()
        looks = (self._ended, forks.look, RunUpkeep(self._run).look)
        threading.Thread(target=keep_looking, args=looks, daemon=True).start()

    def _start_processes(self, unless: Unless) -> str:
        """Start Ray in a new run; returns where it is joined."""
        self._run = run = RunFolder.create()
        set_environment(run)
        # It is held for its pipe, with whose end it ends the run.
        self._guard = start_guard(run, self._keep)
        # It takes seconds, too, in which signals are not waited for.
        threading.Thread(target=importlib.import_module, args=("ray",), daemon=True).start()
        self._ray, look = LoneRay(run), telling(self._tell)
        if self._has_idle_core:
            self._start_forks(run)
        resources = offered_by_devices(self._config.devices)
        return self._ray.start(resources, lambda: look() or unless())

    def _start_forks(self, run: RunFolder) -> KeptForkServer:
        """It takes a core for seconds: beside Ray's own start only where one is idle."""
        self._forks = forks = KeptForkServer(run, os.environ, preloaded(vllm_is_for()))
        forks.start()
        return forks

    def _tell(self, seconds: float) -> None:
        self._say(f"waiting for Ray ({seconds:.0f} s)")

    def make_room(self) -> None:
        """End what an earlier command left deployed: a Ray of its own has nothing yet."""

    def lost(self, wait_s: float = 0.0) -> str | None:
        """A process that this command started, without which nothing goes on, and which has ended,
        for which this waits so long; None: there is none."""
        if wait_s:
            # Ray's processes are this one's children only since others of them have ended.
            reap_orphans({each.pid for each in (self._guard, self._forks) if each is not None})
        return self._ray.ended(wait_s) if self._ray is not None else None

    def last_said(self, name: str) -> str:
        """The last that this process has said."""
        return self._ray.said(name) if self._ray is not None else ""

    def delete_platform(self) -> None:
        """End what is deployed, once running requests have finished; nothing, unless joined."""
        if self._joined:
            from ray import serve

            _delete_ours()
            serve.shutdown()

    def check_listening(self, config: Config) -> None:
        """Raise StartError if a process of the platform listens where others reach it."""
        mine = psutil.Process().children(recursive=True)
        check_listening(mine, config.server.ports)

    def end(self) -> None:
        """Leave Ray, once nothing of the platform runs on it."""
        if self._joined:
            import ray

            ray.shutdown()
        self.kill()

    def kill(self) -> None:
        """Kill every process at once, and give shared memory back, which outlives them."""
        self._ended.set()
        if self._forks is not None:
            self._forks.stop()
        run, guard = self._run, self._guard
        if run is None or guard is None:
            return
        # Those that this process has started before the run are not known by it.
        children = psutil.Process().children(recursive=True)
        end_run(run, children=[each for each in children if each.pid != guard.pid])
        run.release()
        end_guard(guard)
        if self._ray is not None:
            self._ray.close()
        self._run = self._guard = self._ray = self._forks = None


def _idle_cores() -> float:
    """Of the machine, since this process began; 0 where it may not use all: of a part nobody
    tells."""
    cores = psutil.cpu_count() or 1
    if len(os.sched_getaffinity(0)) < cores or has_quota():
        return 0.0
    return float(psutil.cpu_times_percent().idle) / 100 * cores


def join(address: str) -> None:
    """Join a Ray that is up, in whose environment this process is."""
    # What Ray and Serve say about themselves drowns what the user wants to know.
    logging.disable(logging.INFO)
    import ray

    # It warns that it sets no handler of signals in a thread.
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)


class JoinedRay:
    """A cluster that ``loomserve node`` has started; none of its processes is ever ended here."""

    def __init__(self, config: Config, token_file: Path, say: Callable[[str], None]) -> None:
        assert config.cluster is not None
        self._config, self._say = config, say
        self._cluster = config.cluster
        self._token_file = token_file
        self._lock: FileLock | None = None
        self._began_serve = self._has_room = False

    def start(self, unless: Unless) -> None:
        finished(self._join, unless)

    def _join(self) -> None:
        address = self._cluster.address or os.environ.get("RAY_ADDRESS")
        if address is None:
            raise StartError(
                "cluster.address is missing: give HOST:PORT of the head, or set RAY_ADDRESS"
            )
        read_token(self._token_file)
        self._lock = _only_command(address)
        os.environ.update(driver_environment(str(self._token_file)))
        os.environ.pop("RAY_AUTH_TOKEN", None)
        try:
            join(address)
        except Exception as error:  # Ray has no class of its own for that
            raise StartError(
                f"cannot join the cluster at {address}: {first_line(error)} Is loomserve node up "
                f"on this machine, and is the token the same?{busy()}"
            ) from error
        self._check_own_node()
        self._await_nodes()

    def make_room(self) -> None:
        from ray import serve

        self._began_serve = not _serve_runs()
        if not self._began_serve and any(map(is_ours, serve.status().applications)):
            self._say("ending the platform that an earlier loomserve serve left in the cluster")
            _delete_ours()
        _stop_stores()
        self._has_room = True

    def lost(self, wait_s: float = 0.0) -> str | None:
        """``loomserve node`` starts the cluster's own anew."""
        time.sleep(wait_s)
        return None

    def last_said(self, name: str) -> str:
        return ""

    def delete_platform(self) -> None:
        from ray import serve

        if not self._has_room:
            return  # nothing there is of this command
        _delete_ours()
        _stop_stores()
        if self._began_serve and not serve.status().applications:
            serve.shutdown()

    def check_listening(self, config: Config) -> None:
        from loomserve.deployments.node_checks import check_nodes_listening

        check_nodes_listening(config)

    def end(self) -> None:
        import ray

        ray.shutdown()

    def kill(self) -> None:
        """What is deployed goes on; the next ``loomserve serve`` takes its place."""

    def _check_own_node(self) -> None:
        """What there is but once is checked by this command, in the folders of its machine."""
        import ray

        own, deadline = ray.get_runtime_context().get_node_id(), time.monotonic()
        deadline += _OWN_NODE_TIMEOUT_S
        while True:
            found = [node for node in ray.nodes() if node["NodeID"] == own and node["Alive"]]
            if found and STATE in found[0]["Resources"]:
                return
            if time.monotonic() > deadline:
                raise StartError(
                    "batches, plans and the controller are kept on one node, and this one does not "
                    "offer to: run loomserve serve on the one with loomserve node --state DIR"
                )
            time.sleep(_LOOK_S)

    def _await_nodes(self) -> None:
        deadline, told = time.monotonic() + self._cluster.join_timeout_s, False
        while missing := [name for name in self._config.nodes if name not in _nodes_up()]:
            names = ", ".join(missing)
            if time.monotonic() > deadline:
                index = next(
                    at for at, device in enumerate(self._config.devices) if device.on in missing
                )
                raise StartError(
                    f"devices[{index}].node: the cluster has no node {missing[0]!r}; it has "
                    f"{', '.join(sorted(_nodes_up())) or 'none'}. Start it there with loomserve "
                    f"node --name {missing[0]}, or change the name"
                )
            if not told:
                told = True
                self._say(f"waiting for nodes: {names}")
            time.sleep(_LOOK_S)


def platform_ray(
    config: Config, base: Path, keep: Iterable[Path], say: Callable[[str], None]
) -> OwnRay | JoinedRay:
    """The Ray of a configuration in folder ``base``; ``keep``: shared memory that stays."""
    if config.cluster is None:
        return OwnRay(config, keep, say)
    given = config.cluster.token_file
    return JoinedRay(config, token_path(base / given if given else None), say)


def _only_command(address: str) -> FileLock:
    """Lock the cluster for this process, or raise StartError: it has one platform."""
    path = cache_folder() / f"serve-{re.sub(r'[^A-Za-z0-9.]', '-', address)}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, mode=0o600, fallback_to_soft=False)
    try:
        lock.acquire(timeout=_COMMAND_TIMEOUT_S)
    except Timeout:
        raise StartError(
            f"another loomserve serve runs on the cluster at {address}: end it first, or have its "
            "admin API load and unload models"
        ) from None
    return lock


def _serve_runs() -> bool:
    import ray

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def _delete_ours() -> None:
    """End our applications, each of which ends within the time that its requests have. Serve's own
    calls that wait give up after 30 or 60 s, and its end then cuts those requests."""
    from ray import serve

    # Until the controller has ended it may deploy.
    while ours := [name for name in serve.status().applications if is_ours(name)]:
        for name in ours:
            serve.delete(name, _blocking=False)
        time.sleep(_LOOK_S)


def _stop_stores() -> None:
    from loomserve.deployments.kvstore.node_stores import stop_node_stores

    asyncio.run(stop_node_stores(_STORES_TIMEOUT_S))


def _nodes_up() -> set[str]:
    import ray

    names = (name_in(node["Resources"]) for node in ray.nodes() if node["Alive"])
    return {name for name in names if name is not None}
