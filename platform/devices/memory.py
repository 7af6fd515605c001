"""Plans how many replicas memory allows, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import LOCAL_NODE, Device, Model, OfflineModel, Scaling

# An idle CPU engine of a tiny model and its replica take about this without weights and KV;
# measured as proportional set size, rounded up.
ENGINE_BYTES = 1.25 * 2**30
# Each further worker process of a pipeline's engine.
STAGE_BYTES = 0.75 * 2**30
# A computing process with torch and transformers, without weights and KV.
OFFLINE_BYTES = 1.0 * 2**30
# Ray's own processes, the controller, and a gateway with its front ends.
PLATFORM_BYTES = 2 * 2**30
# Ray's own processes on a node that has nothing but engines.
NODE_BYTES = 0.5 * 2**30
# Each process that takes requests, beside the first on the node with the controller.
FRONT_END_BYTES = 0.75 * 2**30


def replica_bytes(model: Model, weight_bytes: int) -> float:
    """Memory of one replica. At its start CPU weights are held twice: as loaded, and packed."""
    further_stages = len(model.devices) - 1 if model.pipeline is not None else 0
    return ENGINE_BYTES + further_stages * STAGE_BYTES + 2 * weight_bytes + model.kv_cache_memory


def offline_bytes(model: OfflineModel, weight_bytes: int) -> float:
    """Memory of an offline model, whose weights may become twice as wide as in the file."""
    return OFFLINE_BYTES + 2 * weight_bytes + model.kv_cache_memory


def least_replicas(model: Model) -> int:
    """The fewest replicas that a model's configuration allows, where it is there at all."""
    if isinstance(model.replicas, Scaling):
        return model.replicas.least
    if model.replicas != "auto":
        return model.replicas
    return 1 if model.roles is None else model.roles.prefill + model.roles.decode


def plan_replicas(
    models: Sequence[Model],
    weight_bytes: Mapping[str, int],
    available_bytes: float,
    kvstore_bytes: int = 0,
    offline_bytes: float = 0,
    front_ends: int = 1,
) -> dict[str, int]:
    """Plan the number of replicas to start for each model, on this machine alone.

    Args:
        kvstore_bytes: Memory of the KV store.
        offline_bytes: Memory of all offline models.
        front_ends: Processes that take requests.

    Raises:
        StartError: the least that the configuration asks for does not fit.
    """
    taken = platform_bytes(front_ends) + kvstore_bytes + offline_bytes
    here = NodeMemory(available_bytes, taken, with_store=bool(kvstore_bytes))
    on = {device: LOCAL_NODE for model in models for device in model.devices}
    return plan_on_nodes(models, weight_bytes, on, {LOCAL_NODE: here})


def platform_bytes(front_ends: int) -> float:
    """Memory of Ray, of what there is but once, and of so many front ends."""
    return PLATFORM_BYTES + (front_ends - 1) * FRONT_END_BYTES


def node_bytes(front_ends: int) -> float:
    """Memory of Ray on any other node, and of so many front ends."""
    return NODE_BYTES + front_ends * FRONT_END_BYTES


@dataclass(frozen=True)
class NodeMemory:
    """
    Attributes:
        available_bytes: What is free on a node.
        taken_bytes: What all else will take of it, before any replica.
        with_store: Whether a KV store is part of that.
    """

    available_bytes: float
    taken_bytes: float
    with_store: bool = False


def plan_on_nodes(
    models: Sequence[Model],
    weight_bytes: Mapping[str, int],
    node_of: Mapping[str, str],
    memory: Mapping[str, NodeMemory],
) -> dict[str, int]:
    """Plan the number of replicas to start for each model.

    Every model gets its fewest replicas, on the first of its devices. The memory that is left goes
    to models with ``replicas: auto``, a replica each in turn, up to one a device.

    Args:
        node_of: Each device's node.
        memory: Of each node.

    Raises:
        StartError: the least that the configuration asks for does not fit on a node.
    """
    wanted = {model.name: least_replicas(model) for model in models}
    cost = {model.name: replica_bytes(model, weight_bytes[model.name]) for model in models}
    left = {node: each.available_bytes - each.taken_bytes for node, each in memory.items()}
    for model in models:
        for device in model.devices[: wanted[model.name]]:
            left[node_of[device]] -= cost[model.name]
    for node, bytes_left in left.items():
        if bytes_left < 0:
            raise _too_little(node, memory[node], bytes_left)
    growing = [model for model in models if model.replicas == "auto"]
    while growing:
        for model in tuple(growing):
            have = wanted[model.name]
            if have == model.most_replicas or cost[model.name] > left[node_of[model.devices[have]]]:
                growing.remove(model)
            else:
                wanted[model.name] += 1
                left[node_of[model.devices[have]]] -= cost[model.name]
    return wanted


def check_budgets(
    models: Sequence[Model],
    weight_bytes: Mapping[str, int],
    replicas: Mapping[str, int],
    devices: Sequence[Device],
) -> None:
    """Check that models that start with the platform fit into what devices may give them.

    Args:
        models: Those that start with it.
        replicas: How many of each.

    Raises:
        StartError: they do not on a device.
    """
    for device in devices:
        there = [
            model
            for model in models
            if device.name
            in model.devices[: len(model.devices) if model.pipeline else replicas[model.name]]
        ]
        needed = sum(
            model.largest_share * replica_bytes(model, weight_bytes[model.name]) for model in there
        )
        if device.memory is not None and needed > device.memory:
            names = ", ".join(model.name for model in there)
            raise StartError(
                f"device {device.name!r} may give models {device.memory / 2**30:.1f} GiB "
                f"(devices.memory), and {names} need about {needed / 2**30:.1f} GiB: raise it, or "
                "set start: on_demand for some"
            )


def _too_little(node: str, memory: NodeMemory, bytes_left: float) -> StartError:
    to_lower = "kv_cache_memory, kvstore.memory" if memory.with_store else "kv_cache_memory"
    where = "" if node == LOCAL_NODE else f" on node {node!r}"
    return StartError(
        f"the configuration needs about {(memory.available_bytes - bytes_left) / 2**30:.1f} GiB of "
        f"memory{where} and {memory.available_bytes / 2**30:.1f} GiB is available: lower "
        f"{to_lower} or replicas, or serve fewer models"
    )


def check_shared_memory(kvstore_bytes: int, left_behind: int) -> None:
    """Check that this machine has the shared memory of a KV store.

    Args:
        kvstore_bytes: what it is to have.
        left_behind: bytes that an earlier one left there, which it takes over.

    Raises:
        StartError: there is less; says how to make room.
    """
    free = psutil.disk_usage("/dev/shm").free + left_behind
    if kvstore_bytes > free:
        raise StartError(
            f"kvstore.memory asks for {kvstore_bytes / 2**20:.0f} MiB and /dev/shm has "
            f"{free / 2**20:.0f} MiB free: lower it, or make /dev/shm larger (docker run "
            "--shm-size, or mount -o remount,size=8G /dev/shm)"
        )
