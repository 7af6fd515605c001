"""What a configuration leaves to the platform, filled in from this machine or a cluster's nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from loomserve.platform.config import LOCAL_NODE, Config, Model, OfflineModel
from loomserve.platform.devices.machine import MachineParts, parts_here
from loomserve.platform.devices.memory import (
    gpus_of,
    is_on_gpus,
    node_bytes,
    offline_bytes,
    platform_bytes,
)
from loomserve.platform.models import catalog
from loomserve.platform.placement import model_files
from loomserve.platform.placement.by_itself import Placed, leaves_something, placed
from loomserve.platform.placement.own_devices import NodeParts

Say = Callable[[str], None]


def placed_here(config: Config, base: Path, say: Say, left_behind: int = 0) -> Placed:
    """The configuration, placed on this machine, which is no node of a cluster. ``left_behind``:
    bytes of an earlier KV store that the next one takes over. Raises ConfigError if a source is
    wrong; StartError if a model fits nowhere, or cannot be fetched."""
    if not leaves_something(config):
        return Placed(config)
    parts = parts_here()
    weights = _weights(config, base, say, [parts])
    taken = _taken_once(config, weights) + _store(config)
    here = NodeParts(parts, taken - left_behind)
    return placed(config, base, {LOCAL_NODE: here}, weights)


def placed_on(
    config: Config, base: Path, say: Say, nodes: Mapping[str, MachineParts], own: str | None
) -> Placed:
    """The same on a cluster's nodes, of which ``own`` has what there is but once."""
    weights = _weights(config, base, say, nodes.values())
    gateways = config.server.front_ends if config.has_gateways_on_each_node else 0
    once = _taken_once(config, weights)
    elsewhere = node_bytes(gateways, config.models)
    there = {
        name: NodeParts(parts, (once if name == own else elsewhere) + _store(config))
        for name, parts in nodes.items()
    }
    return placed(config, base, there, weights)


def said(placed: Placed) -> Iterator[str]:
    """What was decided, a line each."""
    if not placed.assignments:
        return
    for device in placed.config.devices:
        assert device.memory is not None
        host = device.host_memory
        of_host = f", {host / 2**30:.1f} GiB of its host" if host is not None else ""
        yield f"device {device.name}: {device.memory / 2**30:.1f} GiB for models{of_host}"
    for name, assignment in placed.assignments.items():
        yield f"{name}: {assignment.why}"


def _weights(config: Config, base: Path, say: Say, nodes: Iterable[MachineParts]) -> dict[str, int]:
    """What engines hold of all models' weights, which are fetched if need be, and the bytes of
    offline models' on disk; 0 where only the hub knows."""
    found = {}
    gpus = gpus_of(config.devices)
    # What names no devices goes to GPUs, where there are some.
    any_gpus = bool(gpus) if config.devices else any(parts.gpus for parts in nodes)
    models: list[Model | OfflineModel] = [*config.models, *config.offline_models]
    for model in models:
        path = catalog.resolve(model.source, base, progress=say, revision=model.revision)
        if isinstance(model, Model):
            on_gpus = is_on_gpus(model, gpus) if model.is_placed else any_gpus
            found[model.name] = model_files.held_bytes(path, model, on_gpus=on_gpus)
        else:
            found[model.name] = catalog.known_weight_bytes(path)
    return found


def _taken_once(config: Config, weights: Mapping[str, int]) -> float:
    offline = sum(offline_bytes(each, weights[each.name]) for each in config.offline_models)
    return platform_bytes(config.server.front_ends, config.models) + offline


def _store(config: Config) -> int:
    return config.kvstore.memory if config.kvstore is not None else 0
