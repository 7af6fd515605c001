"""The chart's values that follow from a configuration. Pure.

Helm cannot do sums with ``512MiB``, so they are done here, and the chart only puts the results in
their places. It refuses values that were made of another configuration than it is given.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import Config, Device, Model
from loomserve.platform.devices.memory import (
    GPU_ENGINE_BYTES,
    least_replicas,
    node_bytes,
    offline_bytes,
    platform_bytes,
    replica_bytes,
)
from loomserve.platform.nodes.resources import offered
from loomserve.platform.run.ray_environment import LOGICAL_CPUS, OBJECT_STORE_BYTES

HEAD = "head"
"""The node of Ray's head in mode rayservice, which has the state and no devices."""

SSD_FOLDER = "/var/lib/loomserve/ssd"
"""Where the chart mounts a pod's SSD."""

_GROUP = re.compile(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?")
# vLLM's message queues and lending's rings, of one engine.
_SHARED_BYTES_OF_ENGINE = 256 * 2**20
# What Ray, its agents and the gateway compute beside the engines' cores.
_PLATFORM_CPUS = 1
_HEAD_CPUS = 2
# An engine on a GPU: its own step, and the gateways' part.
_CPUS_BESIDE_GPU = 2
# A pod that gets SIGTERM leaves its Service meanwhile, of which all endpoints have to hear.
_PRE_STOP_S = 15
# What Serve, Ray and the KV store take to end once requests have ended.
_RAY_ENDS_S = 30
_POD_ENDS_S = 30
_GIB = 2**30


def derived_values(text: str, config: Config, weights: Mapping[str, int]) -> dict[str, Any]:
    """What the chart has under ``derived``; sizes in bytes, times in seconds. ``text`` is the
    configuration's file, ``weights`` bytes of all models, offline ones among them. Raises
    ConfigError if the configuration cannot run on Kubernetes; says why."""
    _check(config, weights)
    in_cluster = config.cluster is not None
    return {
        "config": digest(text),
        "mode": "rayservice" if in_cluster else "node",
        "port": config.server.port,
        "adminPort": config.server.admin_port,
        "batch": config.batch is not None,
        "ssd": (config.kvstore.ssd or 0) if config.kvstore is not None else 0,
        "head": _head(config) if in_cluster else None,
        "nodes": [_node(config, name, weights) for name in config.nodes],
        "times": times(config.server.drain_timeout_s, config.server.request_timeout_s),
    }


def digest(text: str) -> str:
    """By which the chart sees that values belong to a configuration."""
    return hashlib.sha256(text.encode()).hexdigest()


def times(drain_s: float, request_s: float) -> dict[str, int]:
    """Seconds that agree with each other: each step of an end leaves room for the one within it."""
    drain = math.ceil(drain_s)
    ray = drain + _RAY_ENDS_S
    return {
        "preStop": _PRE_STOP_S,
        "rayDrain": ray,
        "grace": _PRE_STOP_S + ray + _POD_ENDS_S,
        # The cluster that was replaced goes on with its streams.
        "clusterDeletionDelay": max(math.ceil(request_s), drain) + _PRE_STOP_S,
    }


def _check(config: Config, weights: Mapping[str, int]) -> None:
    if not config.devices:
        raise ConfigError(
            "devices: list them, since what a pod asks Kubernetes for follows from them"
        )
    if config.server.is_loopback:
        raise ConfigError(
            f"server.host: {config.server.host!r} is reached from within the pod alone: set it to "
            "0.0.0.0"
        )
    if config.server.api_keys_file is not None:
        raise ConfigError(
            "server.api_keys_file: files of a Secret can be read by the pod's group, which such a "
            "file must not be: write the hashes into server.api_keys"
        )
    if config.server.tls is not None:
        raise ConfigError(
            "server.tls: files of a Secret can be read by the pod's group, which a private key "
            "must not be: leave it out, and have TLS end ahead of the pods (docs/tls.md)"
        )
    if config.cluster is not None:
        for index, model in enumerate(config.models):
            if not model.is_placed:
                raise ConfigError(
                    f"models[{index}].devices: name them: a controller that is started anew has to "
                    "find a model where it was"
                )
        if config.offline_models:
            raise ConfigError(
                "batch.offline_models: they run in mode node alone: leave out the section cluster"
            )
        if not config.has_gateways_on_each_node:
            raise ConfigError(
                "cluster.gateways: set it to each_node, since requests go to the pods with devices"
            )
        for name in config.nodes:
            if name == HEAD or not _GROUP.fullmatch(name):
                raise ConfigError(
                    f"devices: node {name!r} is to be a group of KubeRay's: name it with up to 30 "
                    f"small letters, digits and hyphens, and not {HEAD!r}, which is Ray's own"
                )
    kept = config.kvstore
    if kept is not None and kept.ssd and not (kept.ssd_path or "").startswith(f"{SSD_FOLDER}/"):
        raise ConfigError(
            f"kvstore.ssd_path: the pods' SSD is mounted at {SSD_FOLDER}: write a folder in it, "
            f"such as {SSD_FOLDER}/kv"
        )
    names = [model.name for model in config.models]
    names += [model.name for model in config.offline_models]
    if missing := [name for name in names if name not in weights]:
        raise ConfigError(
            f"models: how large are the weights of {missing[0]!r}? They are not on this machine: "
            f"add --weights {missing[0]}=SIZE, such as 16GiB"
        )


def _head(config: Config) -> dict[str, Any]:
    """The pod with what there is but once, its gateway among it."""
    memory = platform_bytes(config.server.front_ends, config.models)
    # KV stores are where engines are.
    return _pod(HEAD, _HEAD_CPUS, (), memory, OBJECT_STORE_BYTES) | {
        "offers": offered(HEAD, (), (), state=True)
    }


def _node(config: Config, name: str, weights: Mapping[str, int]) -> dict[str, Any]:
    devices = [device for device in config.devices if device.on == name]
    names = {device.name for device in devices}
    cores = sorted({core for device in devices for core in device.cores})
    gpus = sorted(device.gpu for device in devices if device.gpu is not None)
    alone = config.cluster is None
    gateways = config.server.front_ends
    platform = platform_bytes if alone else node_bytes
    memory = platform(gateways, config.models)
    engines = 0
    for model in config.models:
        here = _engines_on(model, weights[model.name], devices)
        engines += len(here)
        memory += sum(here)
    for offline in config.offline_models:
        if offline.device in names:
            memory += offline_bytes(offline, weights[offline.name])
    cpus = len(cores) + _CPUS_BESIDE_GPU * len(gpus) + _PLATFORM_CPUS
    made = _pod(name, cpus, gpus, memory, _shared(config, engines))
    return made | {"offers": offered(name, cores, gpus, state=alone), "rayCpus": LOGICAL_CPUS}


def _engines_on(model: Model, weight_bytes: int, devices: Sequence[Device]) -> list[float]:
    """Memory of the host for each of the most engines that a node's devices may have of a model."""
    if model.devices:
        own = [device for device in devices if device.name in model.devices]
        return [_host_bytes(model, weight_bytes, device) for device in own]
    # Where it goes is the platform's to find out: each node needs the room, on whatever takes most.
    each = [_host_bytes(model, weight_bytes, device) for device in devices]
    return sorted(each, reverse=True)[: max(1, least_replicas(model))]


def _host_bytes(model: Model, weight_bytes: int, device: Device) -> float:
    """Of an engine; of one on a GPU, what its weights take on their way there. An engine on CPUs
    may compute in numbers that are twice as wide as those of the files."""
    if device.gpu is not None:
        return GPU_ENGINE_BYTES + weight_bytes
    return replica_bytes(model, 2 * weight_bytes)


def _shared(config: Config, engines: int) -> int:
    kept = config.kvstore.memory if config.kvstore is not None else 0
    return kept + OBJECT_STORE_BYTES + engines * _SHARED_BYTES_OF_ENGINE


def _pod(name: str, cpus: int, gpus: Collection[int], memory: float, shared: int) -> dict[str, Any]:
    """Shared memory counts against the pod's limit, so it is within ``memory``."""
    whole = -(-int(memory + shared) // _GIB) * _GIB
    return {"name": name, "cpus": cpus, "gpus": len(gpus), "memory": whole, "sharedMemory": shared}
