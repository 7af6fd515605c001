"""How many replicas of each model there shall be, before any engine starts.

Ray is imported within functions, since it reads its environment then.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from loomserve.kvstore.server.options import left_behind
from loomserve.platform.adapters.sources import take_configured
from loomserve.platform.batch.offline.models import check_offline_models
from loomserve.platform.config import LOCAL_NODE, Config, Model
from loomserve.platform.devices.gpus import gpus_here
from loomserve.platform.devices.machine import available_memory
from loomserve.platform.devices.memory import (
    NodeMemory,
    check_budgets,
    gpus_of,
    gpus_there,
    is_on_gpus,
    least_replicas,
    node_bytes,
    plan_on_nodes,
    plan_replicas,
    platform_bytes,
)
from loomserve.platform.lengths.stored import prepare_predictor
from loomserve.platform.models import catalog
from loomserve.platform.placement import model_files
from loomserve.platform.placement.by_itself import Placed, leaves_something
from loomserve.platform.placement.configured import stages_of
from loomserve.platform.placement.own_placement import placed_on

Say = Callable[[str], None]


def plan(config: Config, base: Path, say: Say) -> dict[str, int]:
    """Fetch and check every model, and plan how many replicas of each to start. Raises ConfigError
    if a model's source is wrong; StartError if a model cannot be fetched, or memory does not
    suffice."""
    weights: dict[str, int] = {}
    for offline in config.offline_models:
        prepare_predictor(offline)
    gpus = gpus_of(config.devices)
    for model in config.models:
        prepare_predictor(model)
        path = catalog.resolve(model.source, base, progress=say, revision=model.revision)
        on_gpus = is_on_gpus(model, gpus)
        weights[model.name] = model_files.held_bytes(path, model, on_gpus=on_gpus)
        take_configured(model, base)
        if model.pipeline is not None:
            stages = ", ".join(f"{device} {n}" for device, n in stages_of(model, base))
            say(f"{model.name} is a pipeline; layers: {stages}")
    store = config.kvstore.memory if config.kvstore else 0
    present = present_models(config)
    if config.cluster is not None:
        replicas = _plan_on_nodes(config, base, say)
    else:
        replicas = plan_replicas(
            present,
            weights,
            available_memory() + bytes_left_behind(config),
            store,
            check_offline_models(config, base, say),
            config.server.front_ends,
            gpus_there(config.devices, {LOCAL_NODE: gpus_here()} if gpus else {}),
            config.models,
        )
    check_budgets(present, weights, replicas, config.devices)
    for model in present:
        if model.replicas == "auto" and replicas[model.name] < model.most_replicas:
            say(
                f"memory allows {replicas[model.name]} of {model.most_replicas} replicas of "
                f"{model.name}"
            )
    return {model.name: least_replicas(model) for model in config.models} | replicas


def bytes_left_behind(config: Config) -> int:
    """Bytes of an earlier KV store that the next one takes over."""
    return left_behind(config.server.port) if config.kvstore is not None else 0


def present_models(config: Config) -> list[Model]:
    """Models that are loaded from the start."""
    return [model for model in config.models if model.start != "on_demand"]


def _plan_on_nodes(config: Config, base: Path, say: Say) -> dict[str, int]:
    from loomserve.deployments.node_checks import check_nodes
    from loomserve.deployments.ray_node import own_node

    reports = check_nodes(config, base, say)
    store = config.kvstore.memory if config.kvstore else 0
    # What there is but once runs where the command does.
    once = platform_bytes(config.server.front_ends, config.models)
    once += check_offline_models(config, base, say)
    gateways = config.server.front_ends if config.has_gateways_on_each_node else 0
    elsewhere = node_bytes(gateways, config.models)
    taken = {name: once if name == own_node() else elsewhere for name in reports}
    return plan_on_nodes(
        present_models(config),
        {model: size for report in reports.values() for model, size in report.weights.items()},
        {device.name: device.on for device in config.devices},
        {
            name: NodeMemory(report.memory, taken[name] + store, with_store=bool(store))
            for name, report in reports.items()
        },
        gpus_there(config.devices, {name: report.gpus for name, report in reports.items()}),
    )


def placed_in_cluster(config: Config, base: Path, say: Say) -> Placed:
    """The configuration, with what it leaves to the platform, on the nodes that are up."""
    if not leaves_something(config):
        return Placed(config)
    from loomserve.deployments.node_checks import parts_of_nodes
    from loomserve.deployments.ray_node import own_node

    return placed_on(config, base, say, parts_of_nodes(config), own_node())
