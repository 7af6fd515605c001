"""Places the configured models that are pipelines: the stages that each engine gets."""

from __future__ import annotations

from pathlib import Path

from loomserve.platform.base.errors import ConfigError, StartError
from loomserve.platform.config import Config, Model
from loomserve.platform.models import catalog
from loomserve.platform.placement import device_profile, model_files
from loomserve.platform.placement.policy import explanation, placer
from loomserve.platform.placement.policy.helr import Mode
from loomserve.platform.placement.policy.placer import Wanted


def wanted_of(model: Model, base: Path, mode: Mode) -> Wanted:
    """Build placement's input from a configured model. Raises ConfigError if the model has no
    folder here, or its weights have no layers."""
    folder = catalog.resolve(model.source, base, progress=lambda _: None, revision=model.revision)
    if not isinstance(folder, Path):
        raise ConfigError(
            f"model {model.name!r}: its layers must be known before it starts: download "
            f"{model.source} to a folder and give that as source, or set pipeline.layers"
        )
    return Wanted(
        name=model.name,
        source=model.source,
        shape=model_files.read(folder),
        devices=model.devices,
        kv_bytes=model.kv_cache_memory,
        mode=mode,
        batch=model.pipeline.batch if model.pipeline else 8,
    )


def stages_of(model: Model, base: Path) -> list[tuple[str, int]]:
    """Devices of a model that is a pipeline, in the order of its layers, and their layers. Raises
    ConfigError if the model has neither ``pipeline.layers`` nor a profile of its devices;
    StartError if its devices do not hold the model."""
    assert model.pipeline is not None
    if model.pipeline.layers:
        return list(zip(model.devices, model.pipeline.layers, strict=True))
    written = model.pipeline.profile
    measured = device_profile.load(base / written if written else device_profile.default_path())
    (placed,) = placer.place_models([wanted_of(model, base, model.pipeline.mode)], measured)
    if placed.placement is None:
        raise StartError(f"model {model.name!r}: {explanation.why_not(placed)}")
    return placed.stages


def profile_path(config: Config, base: Path) -> Path:
    """Path of the device profile: the first that a model names, or the default."""
    named = (model.pipeline.profile for model in config.models if model.pipeline is not None)
    written = next((path for path in named if path is not None), None)
    return base / written if written else device_profile.default_path()
