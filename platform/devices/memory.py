"""Plans how many replicas memory allows, before anything starts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import LOCAL_NODE, Device, Model, OfflineModel, Scaling
from loomserve.platform.devices.gpus import Gpu

# What an engine on a CPU, forked by its node's fork server, and its replica have of their own,
# without weights and KV; measured (docs/placement.md), and a quarter more.
ENGINE_BYTES = 192 * 2**20
# The same of a simulated engine, wherever it is.
SIMULATED_BYTES = 168 * 2**20
# The same of an engine on a GPU, once in the GPU's memory, for its context, activations, graphs and
# what is staged on its way to the KV store, and once in the host's. Of an H200's memory an engine
# of Llama-3-8B's shape took 1.48 GiB, and this is a quarter more; of the host's it is a guess.
GPU_ENGINE_BYTES = 1.875 * 2**30
# Of that, CUDA's context and libraries, which torch's allocator does not count: an H200's driver
# counted 0.71 and 0.77 GiB of two engines.
GPU_CONTEXT_BYTES = 768 * 2**20
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
    """Memory of one replica on its devices: the host's, or that of GPUs.

    Args:
        model: the replica's.
        held_bytes: what an engine holds of its weights.
        gpus: the devices that are GPUs.
    """
    if model.is_simulated:
        return SIMULATED_BYTES + model.kv_bytes
    stages = len(model.devices) if model.pipeline is not None else 0
    if is_on_gpus(model, gpus):
        return max(stages, 1) * GPU_ENGINE_BYTES + held_bytes + model.kv_cache_memory
    return ENGINE_BYTES + stages * STAGE_BYTES + held_bytes + model.kv_cache_memory


def host_bytes(model: Model, held_bytes: int, gpus: Collection[str] = ()) -> float:
    """Memory of the host that one replica takes; arguments are as of :func:`replica_bytes`.

    Of a model on GPUs weights are there only while it sleeps.
    """
    if model.is_simulated:
        return SIMULATED_BYTES
    if not is_on_gpus(model, gpus):
        return replica_bytes(model, held_bytes)
    stages = len(model.devices) if model.pipeline is not None else 1
    return stages * GPU_ENGINE_BYTES + (held_bytes if model.idle_rules is not None else 0)


def is_on_gpus(model: Model, gpus: Collection[str]) -> bool:
    """Whether it takes memory of devices that are GPUs."""
    return not model.is_simulated and not set(gpus).isdisjoint(model.devices)


def gpus_of(devices: Iterable[Device]) -> frozenset[str]:
    """The names of those that are GPUs."""
    return frozenset(each.name for each in devices if each.kind == "cuda")


def gpus_there(
    devices: Iterable[Device], on_nodes: Mapping[str, Mapping[int, Gpu]]
) -> dict[str, Gpu]:
    """What there is of each device that is a GPU, by the device's name.

    Args:
        devices: all.
        on_nodes: GPUs by their numbers, by node.
    """
    return {
        each.name: on_nodes.get(each.on, {}).get(each.gpu, Gpu(0, 0))
        for each in devices
        if each.gpu is not None
    }


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
    gpus: Mapping[str, Gpu] | None = None,
    served: Collection[Model] = (),
) -> dict[str, int]:
    """Plan the number of replicas to start for each model, on this machine alone.

    Args:
        models: Those that start with the platform.
        held_bytes: What an engine of each holds of its weights.
        kvstore_bytes: Memory of the KV store.
        offline_bytes: Memory of all offline models.
        front_ends: Processes that take requests.
        gpus: The devices that are GPUs, and what there is of them.
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
    gpus: Mapping[str, Gpu] | None = None,
) -> dict[str, int]:
    """Plan the number of replicas to start for each model.

    Every model gets its fewest replicas, on the first of its devices. The memory that is left goes
    to models with ``replicas: auto``, a replica each in turn, up to one a device. A replica on a
    GPU takes memory of it, and of its node.

    Args:
        held_bytes: What an engine of each holds of its weights.
        node_of: Each device's node.
        memory: Of each node.
        gpus: The devices that are GPUs, and what there is of them.

    Raises:
        StartError: the least that the configuration asks for does not fit on a node or a GPU.
    """
    wanted = {model.name: least_replicas(model) for model in models}
    pools = _Pools(memory, gpus or {}, node_of, held_bytes)
    for model in models:
        for device in model.devices[: wanted[model.name]]:
            pools.take(model, device)
    pools.check()
    growing = [model for model in models if model.replicas == "auto"]
    while growing:
        for model in tuple(growing):
            have = wanted[model.name]
            if have == model.most_replicas or not pools.has(model, model.devices[have]):
                growing.remove(model)
            else:
                wanted[model.name] += 1
                pools.take(model, model.devices[have])
    return wanted


class _Pools:
    """What is left of the memory of nodes and of GPUs."""

    def __init__(
        self,
        memory: Mapping[str, NodeMemory],
        gpus: Mapping[str, Gpu],
        node_of: Mapping[str, str],
        held_bytes: Mapping[str, int],
    ) -> None:
        self._memory, self._gpus, self._node_of, self._held = memory, gpus, node_of, held_bytes
        self._nodes = {
            node: each.available_bytes - each.taken_bytes for node, each in memory.items()
        }
        # Where a driver does not tell, nobody knows.
        self._left = {name: float(gpu.free) for name, gpu in gpus.items() if gpu.total}
        self._on: dict[str, list[str]] = {name: [] for name in self._left}

    def take(self, model: Model, device: str) -> None:
        """Count a replica that is on this device, or begins there."""
        self._nodes[self._node_of[device]] -= self._on_host(model)
        for name, size in self._on_gpus(model, device):
            self._left[name] -= size
            self._on[name].append(model.name)

    def has(self, model: Model, device: str) -> bool:
        """Whether such a replica still fits."""
        return self._on_host(model) <= self._nodes[self._node_of[device]] and all(
            size <= self._left[name] for name, size in self._on_gpus(model, device)
        )

    def check(self) -> None:
        """
        Raises:
            StartError: more was taken than there is.
        """
        for node, left in self._nodes.items():
            if left < 0:
                raise _too_little(node, self._memory[node], left)
        for name, left in self._left.items():
            if left < 0:
                raise _too_little_on_gpu(name, self._gpus[name], left, self._on[name])

    def _on_host(self, model: Model) -> float:
        return host_bytes(model, self._held[model.name], self._gpus)

    def _on_gpus(self, model: Model, device: str) -> Iterator[tuple[str, float]]:
        if model.is_simulated:
            return
        size = model.largest_share * replica_bytes(model, self._held[model.name], self._gpus)
        for name in model.devices if model.pipeline is not None else (device,):
            if name in self._left:
                yield name, size


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


def _too_little_on_gpu(name: str, gpu: Gpu, left: float, models: Sequence[str]) -> StartError:
    return StartError(
        f"{', '.join(models)} need about {(gpu.free - left) / 2**30:.1f} GiB of the memory of "
        f"device {name!r}, and {gpu.free / 2**30:.1f} of its {gpu.total / 2**30:.1f} GiB are free: "
        "lower their kv_cache_memory, give some another device, or set start: on_demand for some"
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
