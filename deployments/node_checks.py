"""Checks of a cluster's nodes, each by a task on the node itself."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray

from loomserve.deployments.peer_weights import fetch_from_peers
from loomserve.deployments.ray_node import node_address
from loomserve.kvstore.server.options import left_behind
from loomserve.platform.base.errors import LoomserveError, StartError
from loomserve.platform.config import Config, Device
from loomserve.platform.devices.gpus import Gpu, apart_here, check_devices, gpus_here
from loomserve.platform.devices.machine import (
    MachineParts,
    available_memory,
    check_compiler,
    parts_here,
)
from loomserve.platform.devices.memory import check_shared_memory, gpus_of, is_on_gpus
from loomserve.platform.engine.hooks import verify
from loomserve.platform.fleet.lending_pairs import check_reach
from loomserve.platform.models import catalog
from loomserve.platform.nodes.resources import name_in, on_devices, on_node
from loomserve.platform.placement import model_files
from loomserve.platform.run.folder import own_run
from loomserve.platform.run.leftovers import processes_of
from loomserve.platform.run.listening import check_listening

# Weights may have to be fetched.
_CHECK_TIMEOUT_S = 3600.0
_LOOK_TIMEOUT_S = 60.0

T = TypeVar("T")


@dataclass(frozen=True)
class NodeReport:
    """
    Attributes:
        memory: Bytes that are free for engines.
        weights: Bytes of the weights of each model that may run there.
        gpus: By their numbers.
    """

    memory: int
    weights: dict[str, int] = field(default_factory=dict)
    gpus: dict[int, Gpu] = field(default_factory=dict)


def check_nodes(config: Config, base: Path, say: Callable[[str], None]) -> dict[str, NodeReport]:
    """Check each node that has devices, at once, and have weights fetched there. Raises StartError,
    which names node and field, if a node cannot do what the configuration asks of it."""
    _check_devices(config)
    say(f"checking nodes {', '.join(config.nodes)}")
    given = config.model_dump_json(), str(base.resolve())
    return _told_by(config.nodes, _check_node, *given, timeout_s=_CHECK_TIMEOUT_S)


def parts_of_nodes(config: Config) -> dict[str, MachineParts]:
    """What each node has: those that devices name, or else all that are up."""
    up = {name_in(node["Resources"]) for node in ray.nodes() if node["Alive"]}
    names = config.nodes or sorted(name for name in up if name is not None)
    return _told_by(names, _parts, timeout_s=_LOOK_TIMEOUT_S)


def check_nodes_listening(config: Config) -> None:
    """Raise StartError if an engine listens beyond the cluster's network."""
    _told_by(config.nodes, _look_at_listening, config.server.ports, timeout_s=_LOOK_TIMEOUT_S)


def _check_devices(config: Config) -> None:
    """Whether nodes have the cores and GPUs that devices name."""
    there: set[str] = set()
    for node in ray.nodes():
        if node["Alive"]:
            there |= node["Resources"].keys()
    for index, device in enumerate(config.devices):
        missing = [name for name in on_devices([device]) if name not in there]
        if missing:
            kind = "cores" if device.kind == "cpu" else "gpu"
            numbers = ", ".join(name.rpartition(":")[2] for name in missing)
            like = missing[0].rpartition(":")[0] + ":"
            has = sorted(int(name.removeprefix(like)) for name in there if name.startswith(like))
            raise StartError(
                f"devices[{index}].{kind}: node {device.on!r} has no {kind.rstrip('s')} {numbers}, "
                f"of which device {device.name!r} is to consist; it has "
                f"{', '.join(map(str, has)) or 'none'}"
            )


def _told_by(
    nodes: Iterable[str], look: Callable[..., T], *given: object, timeout_s: float
) -> dict[str, T]:
    """What ``look`` returns on each node, which it gets the name of, and what else is given. Raises
    StartError if it has raised a LoomserveError on one of them, or that does not answer in time."""
    asked = {
        name: _look.options(resources=on_node(name)).remote(look, name, *given) for name in nodes
    }
    return {name: _answered(name, work, timeout_s) for name, work in asked.items()}


def _answered(node: str, work: ray.ObjectRef, timeout_s: float) -> Any:
    try:
        found, problem = ray.get(work, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise StartError(f"node {node!r} did not answer within {timeout_s:.0f} s") from None
    except ray.exceptions.RayError as error:
        raise StartError(f"node {node!r} cannot be asked: {str(error).splitlines()[-1]}") from None
    if problem:
        raise StartError(f"node {node!r}: {problem}")
    return found


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def _look(look: Callable[..., object], *given: object) -> tuple[object, str]:
    """On the node: what is found, or what is wrong in one sentence."""
    try:
        return look(*given), ""
    except LoomserveError as error:
        return None, str(error)


def _parts(name: str) -> MachineParts:
    return parts_here()


def _check_node(name: str, config: str, base: str) -> NodeReport:
    return _checked(Config.model_validate(json.loads(config)), name, Path(base))


def _look_at_listening(name: str, server_ports: tuple[int, ...]) -> None:
    ours = [one for one in processes_of(own_run()) if _is_ours(one)]
    check_listening(ours, server_ports, node_address())


def _is_ours(process: psutil.Process) -> bool:
    """Ray's own processes, which ask for the cluster's token, listen on all addresses."""
    with contextlib.suppress(psutil.Error):  # it has just ended
        return any(part.startswith("VLLM::") for part in process.cmdline())
    return False


def _checked(config: Config, name: str, base: Path) -> NodeReport:
    verify("vllm")
    verify("ray")
    mine = [device for device in config.devices if device.on == name]
    names = {device.name for device in mine}
    models = {at: each for at, each in enumerate(config.models) if names & {*each.devices}}
    gpus = gpus_here()
    check_devices(config.devices, name, gpus)
    check_reach(config, name, apart_here())
    check_compiler(models.values())
    _check_affinity(mine)
    weights, gpu_devices = {}, gpus_of(config.devices)
    for index, model in models.items():
        try:
            # The command has it on its own node by now.
            fetch_from_peers(model.source)
            path = catalog.resolve(model.source, base, revision=model.revision)
        except LoomserveError as error:
            raise StartError(f"models[{index}].source: {error}") from None
        on_gpus = is_on_gpus(model, gpu_devices)
        weights[model.name] = model_files.held_bytes(path, model, on_gpus=on_gpus)
    available = available_memory()
    if config.kvstore is not None:
        left = left_behind(config.server.port)
        check_shared_memory(config.kvstore.memory, left)
        available += left
    return NodeReport(available, weights, gpus)


def _check_affinity(devices: list[Device]) -> None:
    allowed = os.sched_getaffinity(0)
    for device in devices:
        if forbidden := set(device.cores) - allowed:
            raise StartError(
                f"device {device.name!r} names core {min(forbidden)}, which processes there may "
                "not use (cpuset)"
            )
