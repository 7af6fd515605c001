"""How many replicas memory allows: a plan made before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Model, OfflineModel

# An idle CPU engine of a tiny model (front end, EngineCore, worker) takes about this without
# weights and KV; measured as proportional set size, rounded up.
ENGINE_BYTES = 2 * 2**30
# Each further worker process of an engine that is a pipeline.
STAGE_BYTES = 0.75 * 2**30
# A process with torch and transformers, without weights and KV, computing.
OFFLINE_BYTES = 1.0 * 2**30
# Ray's own processes, the gateway and the controller.
PLATFORM_BYTES = 1.5 * 2**30


def replica_bytes(model: Model, weight_bytes: int) -> float:
    """Memory of one replica: CPU weights are held packed beside the loaded ones for a while."""
    further_stages = len(model.devices) - 1 if model.pipeline is not None else 0
    return ENGINE_BYTES + further_stages * STAGE_BYTES + 2 * weight_bytes + model.kv_cache_memory


def offline_bytes(model: OfflineModel, weight_bytes: int) -> float:
    """Memory of an offline model; what it computes in may be twice as wide as its file."""
    return OFFLINE_BYTES + 2 * weight_bytes + model.kv_cache_memory


def least_replicas(model: Model) -> int:
    """The replicas that a model's configuration insists on."""
    if model.replicas != "auto":
        return model.replicas
    return 1 if model.roles is None else model.roles.prefill + model.roles.decode


def plan_replicas(
    models: Sequence[Model],
    weight_bytes: Mapping[str, int],
    available_bytes: float,
    kvstore_bytes: int = 0,
    offline_bytes: float = 0,
) -> dict[str, int]:
    """The number of replicas to start for each model, beside a KV store of so many bytes and
    offline models of so many.

    Every model gets the replicas it insists on (at least one); what is left goes to the models with
    ``replicas: auto``, one each in turn, up to one a device.

    Raises:
        StartError: the least that the configuration asks for does not fit.
    """
    wanted = {model.name: least_replicas(model) for model in models}
    cost = {model.name: replica_bytes(model, weight_bytes[model.name]) for model in models}
    left = available_bytes - PLATFORM_BYTES - kvstore_bytes - offline_bytes
    left -= sum(wanted[model.name] * cost[model.name] for model in models)
    if left < 0:
        to_lower = "kv_cache_memory, kvstore.memory" if kvstore_bytes else "kv_cache_memory"
        raise StartError(
            f"the configuration needs about {(available_bytes - left) / 2**30:.1f} GiB of memory "
            f"and {available_bytes / 2**30:.1f} GiB is available: lower {to_lower} or replicas, or "
            "serve fewer models"
        )
    growing = [model for model in models if model.replicas == "auto"]
    while growing:
        for model in tuple(growing):
            if wanted[model.name] == model.most_replicas or cost[model.name] > left:
                growing.remove(model)
            else:
                wanted[model.name] += 1
                left -= cost[model.name]
    return wanted
