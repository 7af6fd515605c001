"""Plans how many replicas memory allows, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Model, OfflineModel

# An idle CPU engine of a tiny model and its replica take about this without weights and KV;
# measured as proportional set size, rounded up.
ENGINE_BYTES = 1.25 * 2**30
# Each further worker process of a pipeline's engine.
STAGE_BYTES = 0.75 * 2**30
# A computing process with torch and transformers, without weights and KV.
OFFLINE_BYTES = 1.0 * 2**30
# Ray's own processes, the controller, and a gateway with its front ends.
PLATFORM_BYTES = 2 * 2**30
# Each further process that takes requests.
FRONT_END_BYTES = 0.75 * 2**30


def replica_bytes(model: Model, weight_bytes: int) -> float:
    """Memory of one replica. At its start CPU weights are held twice: as loaded, and packed."""
    further_stages = len(model.devices) - 1 if model.pipeline is not None else 0
    return ENGINE_BYTES + further_stages * STAGE_BYTES + 2 * weight_bytes + model.kv_cache_memory


def offline_bytes(model: OfflineModel, weight_bytes: int) -> float:
    """Memory of an offline model, whose weights may become twice as wide as in the file."""
    return OFFLINE_BYTES + 2 * weight_bytes + model.kv_cache_memory


def least_replicas(model: Model) -> int:
    """The fewest replicas that a model's configuration allows."""
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
    """Plan the number of replicas to start for each model.

    Every model gets its fewest replicas. The memory that is left goes to models with
    ``replicas: auto``, a replica each in turn, up to one a device.

    Args:
        kvstore_bytes: Memory of the KV store.
        offline_bytes: Memory of all offline models.
        front_ends: Processes that take requests.

    Raises:
        StartError: the least that the configuration asks for does not fit.
    """
    wanted = {model.name: least_replicas(model) for model in models}
    cost = {model.name: replica_bytes(model, weight_bytes[model.name]) for model in models}
    left = available_bytes - PLATFORM_BYTES - kvstore_bytes - offline_bytes
    left -= (front_ends - 1) * FRONT_END_BYTES
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
