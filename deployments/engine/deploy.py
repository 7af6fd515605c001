"""Hands a model's applications to Serve."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve

from loomserve.deployments.engine.app import (
    begin,
    build_replica_app,
    front_end_of,
    order_of,
    run_replicas,
)
from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.engine.options.model_check import check_model, check_options
from loomserve.platform.fleet.messages import EngineSpec, FrontEndSpec
from loomserve.platform.models import catalog
from loomserve.platform.models.chat_files import choose_parsers, fetch_from_hub
from loomserve.platform.nodes.resources import on_state

_ONE_AT_A_TIME = threading.Lock()
"""In CPython 3.11 two threads that parse Python at once may fail (``AST constructor recursion
depth``)."""
_PICKLES = threading.Lock()
"""Serve notes for the whole process what it pickles by value while it makes a deployment's
configuration, as it does for each that it has when it tells their states; a second thread that
makes one then fails with "is not registered for pickle by value"."""


@dataclass(frozen=True)
class Handed:
    """What came of handing a model to Serve.

    Attributes:
        problem: What is wrong with the model in one sentence; None: nothing.
    """

    front_end: FrontEndSpec | None = None
    problem: str | None = None


def takes_long(spec: EngineSpec) -> bool:
    """Whether weights are to be fetched or converted first, or layers to be divided.

    That imports torch, for seconds and hundreds of megabytes that the controller should not keep.
    """
    return spec.model.pipeline is not None or not catalog.is_here(spec.path)


def hand_to_serve(spec: EngineSpec, devices: Sequence[str], base: str) -> Handed:
    """Check a model and hand it to Serve, which starts its replicas in the background.

    Args:
        spec: its path is the model's source as configured, and a pipeline's stages are missing.
        devices: which of its devices get a replica; of a pipeline, the first stands for all.
        base: folder to which the configuration's paths are relative.
    """
    if isinstance(here := catalog.files_here(spec.path, Path(base)), str):
        fetch_from_hub(here, spec.model.revision)  # no other model waits for the hub
    try:
        with _ONE_AT_A_TIME:
            resolved = _resolved(spec, Path(base))
            orders = {device: order_of(resolved, device) for device in devices}
        begin(orders.values())
        with _ONE_AT_A_TIME, _PICKLES:
            apps = {device: build_replica_app(order) for device, order in orders.items()}
            run_replicas(resolved, apps)
    except LoomserveError as error:
        return Handed(problem=str(error))
    return Handed(front_end_of(resolved))


def applications() -> Mapping[str, Any]:
    """All of Serve's applications with their states, by name."""
    with _PICKLES:
        found: Mapping[str, Any] = serve.status().applications
    return found


hand_to_serve_elsewhere = ray.remote(num_cpus=0, max_retries=0, resources=on_state())(hand_to_serve)
"""The same in a process of its own."""


def _resolved(spec: EngineSpec, base: Path) -> EngineSpec:
    """With the folder of the weights, which are fetched if need be, the parsers of what the model
    writes, and a pipeline's stages."""
    check_options(spec.model)  # before anything is fetched
    weights = catalog.resolve(spec.path, base, revision=spec.model.revision)
    on_cpu = all(device.kind == "cpu" for device in spec.devices)
    check_model(spec.model, weights, on_cpu=on_cpu)
    parsers = choose_parsers(weights, spec.model.engine, revision=spec.model.revision)
    resolved = spec.model_copy(update={"path": str(weights), "parsers": parsers})
    if spec.model.pipeline is None:
        return resolved
    from loomserve.platform.placement.configured import stages_of  # it imports torch

    stages = stages_of(spec.model, base)
    there = {device.name: device for device in spec.devices}
    return resolved.model_copy(
        update={
            "devices": tuple(there[name] for name, _ in stages),
            "stage_layers": tuple(layers for _, layers in stages),
        }
    )
