"""What a replica's engine has of its node: devices and weights."""

from __future__ import annotations

import os
from pathlib import Path

from loomserve.deployments.peer_weights import fetch_from_peers
from loomserve.deployments.ray_node import session_folder
from loomserve.platform.devices.claims import (
    DeviceClaim,
    claim,
    engine_environment,
    pipeline_environment,
)
from loomserve.platform.fleet.messages import EngineSpec
from loomserve.platform.models import catalog
from loomserve.platform.state import StageState


async def claim_device(spec: EngineSpec) -> DeviceClaim:
    """One of the model's devices; processes that this one starts from here on are to run on it."""
    claimed = await claim(
        spec.model.name,
        # A pipeline is its model's only replica, so its first device stands for all.
        spec.devices[:1] if spec.stage_layers else spec.devices,
        session_folder() / "loomserve-devices",
        spec.drain_timeout_s + 15,
    )
    # Engine processes inherit the environment of the replica that starts them.
    os.environ.update(
        pipeline_environment(spec.devices, spec.stage_layers)
        if spec.stage_layers
        else engine_environment(claimed.device)
    )
    return claimed


def weights_here(spec: EngineSpec) -> str:
    """Folder or hub id of the weights, which may have another place on this node.

    Raises:
        LoomserveError: they are not here, and cannot be fetched.
    """
    if not Path(spec.path).is_absolute() or Path(spec.path).exists():
        return spec.path
    model = spec.model
    fetch_from_peers(model.source)
    return str(catalog.resolve(model.source, Path(spec.base), revision=model.revision))


def stages_of(spec: EngineSpec) -> tuple[StageState, ...]:
    """The stages of a pipeline; else none."""
    return tuple(
        StageState(device=device.name, layers=layers)
        for device, layers in zip(
            spec.devices[: len(spec.stage_layers)], spec.stage_layers, strict=True
        )
    )
