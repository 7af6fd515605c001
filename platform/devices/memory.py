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
GATEWAY_BYTES = 0.75 * 2**30
# What each of them keeps for each model that has been asked for, whether or not it is loaded, and
# for each tokenizer, which names of one source share.
SERVED_MODEL_BYTES = 10 * 2**20
TOKENIZER_BYTES = 100 * 2**20


def replica_bytes(model: Model, held_bytes: int, gpus: Collection[str] = ()) -> float:
    """Memory of one replica on its devices: the host's, or that of GPUs. ``held_bytes``: what an
    engine holds of its weights; ``gpus``: the names of devices that are GPUs."""
    if model.is_simulated:
        return SIMULATED_BYTES + model.kv_bytes
    stages = len(model.devices) if model.pipeline is not None else 0
    if is_on_gpus(model, gpus):
        return max(stages, 1) * GPU_ENGINE_BYTES + held_bytes + model.kv_cache_memory
    return ENGINE_BYTES + stages * STAGE_BYTES + held_bytes + model.kv_cache_memory


def host_bytes(model: Model, held_bytes: int, gpus: Collection[str] = ()) -> float:
    """Host memory of one replica; on GPUs, weights are in it only while the model sleeps."""
    if model.is_simulated:
        return SIMULATED_BYTES
    if not is_on_gpus(model, gpus):
        return replica_bytes(model, held_bytes)
    stages = len(model.devices) if model.pipeline is not None else 1
    return stages * GPU_ENGINE_BYTES + (held_bytes if model.idle_rules is not None else 0)


def is_on_gpus(model: Model, gpus: Collection[str]) -> bool:
    return not model.is_simulated and not set(gpus).isdisjoint(model.devices)


def gpus_of(devices: Iterable[Device]) -> frozenset[str]:
    return frozenset(each.name for each in devices if each.kind == "cuda")


def gpus_there(
    devices: Iterable[Device], on_nodes: Mapping[str, Mapping[int, Gpu]]
) -> dict[str, Gpu]:
    """The GPU behind each device that is one; ``on_nodes``: GPUs by number, by node."""
    return {
        each.name: on_nodes.get(each.on, {}).get(each.gpu, Gpu(0, 0))
        for each in devices
        if each.gpu is not None
    }


def offline_bytes(model: OfflineModel, weight_bytes: int) -> float:
    """Memory of an offline model, whose weights may become twice as wide as in the file."""
    return OFFLINE_BYTES + 2 * weight_bytes + model.kv_cache_memory


def least_replicas(model: Model) -> int:
    """The fewest replicas that a model's configuration allows while it is loaded."""
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
    gateways: int = 1,
    gpus: Mapping[str, Gpu] | None = None,
    served: Collection[Model] = (),
) -> dict[str, int]:
    """Plan the number of replicas to start for each model, on this machine alone. ``models`` start
    with the platform, ``served`` may be asked for, ``gateways`` are gateway processes. Raises
    StartError if the least that the configuration asks for does not fit."""
    taken = platform_bytes(gateways, served) + kvstore_bytes + offline_bytes
    here = NodeMemory(available_bytes, taken, with_store=bool(kvstore_bytes))
    on = {device: LOCAL_NODE for model in models for device in model.devices}
    return plan_on_nodes(models, held_bytes, on, {LOCAL_NODE: here}, gpus)


def platform_bytes(gateways: int, models: Collection[Model]) -> float:
    """Memory of Ray, of what there is once, and of the gateway processes beside these."""
    return PLATFORM_BYTES + (gateways - 1) * GATEWAY_BYTES + _served(gateways, models)


def node_bytes(gateways: int, models: Collection[Model]) -> float:
    """Memory of Ray and of the gateway processes on any other node."""
    return NODE_BYTES + gateways * GATEWAY_BYTES + _served(gateways, models)


def _served(gateways: int, models: Collection[Model]) -> float:
    sources = {(model.source, model.revision) for model in models}
    each = len(models) * SERVED_MODEL_BYTES + len(sources) * TOKENIZER_BYTES
    return gateways * each


@dataclass(frozen=True)
class NodeMemory:
    available_bytes: float
    taken_bytes: float
    """What all else will take of it, before any replica."""
    with_store: bool = False
    """Whether a KV store is part of that."""


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
    GPU takes memory of it, and of its node. Raises StartError if the least does not fit.
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
    """Memory left on nodes and GPUs."""

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
        return self._on_host(model) <= self._nodes[self._node_of[device]] and all(
            size <= self._left[name] for name, size in self._on_gpus(model, device)
        )

    def check(self) -> None:
        for node, left in self._nodes.items():
            if left < 0:
                raise _too_little(node, self._memory[node], left)
        for name, left in self._left.items():
            if left < 0:
                gpu, models = self._gpus[name], ", ".join(self._on[name])
                raise StartError(
                    f"{models} need about {(gpu.free - left) / 2**30:.1f} GiB of the memory of "
                    f"device {name!r}, and {gpu.free / 2**30:.1f} of its {gpu.total / 2**30:.1f} "
                    "GiB are free: lower their kv_cache_memory, give some another device, or set "
                    "start: on_demand for some"
                )

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
    """Raises StartError if models that start with the platform exceed a device's ``memory``."""
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
    """Raises StartError if /dev/shm lacks room for the KV store beside what an earlier one left."""
    free = psutil.disk_usage("/dev/shm").free + left_behind
    if kvstore_bytes > free:
        raise StartError(
            f"kvstore.memory asks for {kvstore_bytes / 2**20:.0f} MiB and /dev/shm has "
            f"{free / 2**20:.0f} MiB free: lower it, or make /dev/shm larger (docker run "
            "--shm-size, or mount -o remount,size=8G /dev/shm)"
        )
