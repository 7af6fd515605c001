"""Plans how many replicas memory allows, before anything starts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import LOCAL_NODE, Device, Model, OfflineModel, Scaling

# What an engine on a CPU, forked by its node's fork server, and its replica have of their own,
# without weights and KV; measured (docs/placement.md), and a quarter more.
ENGINE_BYTES = 192 * 2**20
# The same on a GPU, of whose memory its context and activations are part: a guess.
GPU_ENGINE_BYTES = 1.25 * 2**30
# Each worker process of a pipeline's engine.
STAGE_BYTES = 0.75 * 2**30
# A computing process with torch and transformers, without weights and KV.
OFFLINE_BYTES = 1.0 * 2**30
# Ray's own processes, the fork server, the controller, and a gateway that serves no model yet.
PLATFORM_BYTES = 2 * 2**30
# Ray's own processes and the fork server on a node that has nothing but engines.
NODE_BYTES = 2**30
# Each process that takes requests, beside the first on the node with the controller.
FRONT_END_BYTES = 0.75 * 2**30
# What each of them keeps for each model that has been asked for, whether or not it is loaded, and
# for each tokenizer, which names of one source share.
SERVED_MODEL_BYTES = 10 * 2**20
TOKENIZER_BYTES = 100 * 2**20


def replica_bytes(model: Model, held_bytes: int, gpus: Collection[str] = ()) -> float:
    """Memory of one replica.

    Args:
        model: the replica's.
        held_bytes: what an engine holds of its weights.
        gpus: the devices that are GPUs.
    """
    stages = len(model.devices) if model.pipeline is not None else 0
    own = ENGINE_BYTES if set(gpus).isdisjoint(model.devices) else GPU_ENGINE_BYTES
    return own + stages * STAGE_BYTES + held_bytes + model.kv_cache_memory


def gpus_of(devices: Iterable[Device]) -> frozenset[str]:
    """The names of those that are GPUs."""
    return frozenset(each.name for each in devices if each.kind == "cuda")


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
    held_bytes: Mapping[str, int],
    available_bytes: float,
    kvstore_bytes: int = 0,
    offline_bytes: float = 0,
    front_ends: int = 1,
    gpus: Collection[str] = (),
    served: Collection[Model] = (),
) -> dict[str, int]:
    """Plan the number of replicas to start for each model, on this machine alone.

    Args:
        models: Those that start with the platform.
        held_bytes: What an engine of each holds of its weights.
        kvstore_bytes: Memory of the KV store.
        offline_bytes: Memory of all offline models.
        front_ends: Processes that take requests.
        gpus: The devices that are GPUs.
        served: All models that may be asked for.

    Raises:
        StartError: the least that the configuration asks for does not fit.
    """
    taken = platform_bytes(front_ends, served) + kvstore_bytes + offline_bytes
    here = NodeMemory(available_bytes, taken, with_store=bool(kvstore_bytes))
    on = {device: LOCAL_NODE for model in models for device in model.devices}
    return plan_on_nodes(models, held_bytes, on, {LOCAL_NODE: here}, gpus)


def platform_bytes(front_ends: int, models: Collection[Model]) -> float:
    """Memory of Ray, of what there is but once, and of so many front ends of all models."""
    return PLATFORM_BYTES + (front_ends - 1) * FRONT_END_BYTES + _served(front_ends, models)


def node_bytes(front_ends: int, models: Collection[Model]) -> float:
    """Memory of Ray on any other node, and of so many front ends of all models."""
    return NODE_BYTES + front_ends * FRONT_END_BYTES + _served(front_ends, models)


def _served(front_ends: int, models: Collection[Model]) -> float:
    sources = {(model.source, model.revision) for model in models}
    each = len(models) * SERVED_MODEL_BYTES + len(sources) * TOKENIZER_BYTES
    return front_ends * each


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
    held_bytes: Mapping[str, int],
    node_of: Mapping[str, str],
    memory: Mapping[str, NodeMemory],
    gpus: Collection[str] = (),
) -> dict[str, int]:
    """Plan the number of replicas to start for each model.

    Every model gets its fewest replicas, on the first of its devices. The memory that is left goes
    to models with ``replicas: auto``, a replica each in turn, up to one a device.

    Args:
        held_bytes: What an engine of each holds of its weights.
        node_of: Each device's node.
        memory: Of each node.
        gpus: The devices that are GPUs.

    Raises:
        StartError: the least that the configuration asks for does not fit on a node.
    """
    wanted = {model.name: least_replicas(model) for model in models}
    cost = {model.name: replica_bytes(model, held_bytes[model.name], gpus) for model in models}
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
    held_bytes: Mapping[str, int],
    replicas: Mapping[str, int],
    devices: Sequence[Device],
) -> None:
    """Check that models that start with the platform fit into what devices may give them.

    Args:
        models: Those that start with it.
        held_bytes: What an engine of each holds of its weights.
        replicas: How many of each.

    Raises:
        StartError: they do not on a device.
    """
    gpus = gpus_of(devices)
    for device in devices:
        there = [
            model
            for model in models
            if device.name
            in model.devices[: len(model.devices) if model.pipeline else replicas[model.name]]
        ]
        needed = sum(
            model.largest_share * replica_bytes(model, held_bytes[model.name], gpus)
            for model in there
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
