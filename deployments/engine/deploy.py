"""Puts a model's applications on Serve, in a worker process of its own.

Building a model's deployment imports torch, which takes seconds and hundreds of megabytes that
neither the command line nor the controller should keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ray

from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.fleet.messages import EngineSpec
from loomserve.platform.nodes.resources import on_state


@ray.remote(num_cpus=0, max_retries=0, resources=on_state())  # type: ignore[untyped-decorator]
def deploy_model(spec: EngineSpec, devices: Sequence[str], base: str) -> str | None:
    """Check a model and hand it to Serve, which starts its replicas in the background.

    Args:
        spec: the path is the model's source as configured, and a pipeline's stages are missing.
        devices: which of its devices get a replica; of a pipeline, the first stands for all.
        base: folder to which the configuration's paths are relative.

    Returns:
        None, or what is wrong with the model in one sentence.
    """
    from loomserve.deployments.engine.app import build_replica_app, run_replicas
    from loomserve.platform.engine.options.names import check

    try:
        check(spec.model.name, spec.model.engine)
        resolved = _resolved(spec, Path(base))
        run_replicas(resolved, {device: build_replica_app(resolved, device) for device in devices})
    except LoomserveError as error:
        return str(error)
    return None


def _resolved(spec: EngineSpec, base: Path) -> EngineSpec:
    """With the folder of the weights, which are fetched if need be, and a pipeline's stages."""
    from loomserve.platform.models import catalog
    from loomserve.platform.placement.configured import stages_of

    weights = catalog.resolve(spec.path, base, revision=spec.model.revision)
    resolved = spec.model_copy(update={"path": str(weights)})
    if spec.model.pipeline is None:
        return resolved
    stages = stages_of(spec.model, base)
    there = {device.name: device for device in spec.devices}
    return resolved.model_copy(
        update={
            "devices": tuple(there[name] for name, _ in stages),
            "stage_layers": tuple(layers for _, layers in stages),
        }
    )
