"""Where models go and why, as a person reads it: of a file, or of a platform that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import Model, load
from loomserve.platform.devices.binding import place
from loomserve.platform.devices.memory import least_replicas
from loomserve.platform.models import catalog
from loomserve.platform.models.chat_files import choose_parsers
from loomserve.platform.placement.by_itself import Placed, leaves_something
from loomserve.platform.placement.own_placement import placed_here
from loomserve.platform.state import ChatParsers, PlatformState

_GIVEN = "the configuration says"


@dataclass(frozen=True)
class PlannedDevice:
    """A device; ``memory`` is bytes that models on it may take together, None: no bound."""

    name: str
    place: str
    memory: int | None


@dataclass(frozen=True)
class PlannedModel:
    """A model and the devices of its replicas.

    Attributes:
        start: ``now`` or ``on_demand``; of a platform that runs, the model's status.
        size: Estimated bytes of a replica; None: not asked.
        parsers: Of its tool calls and its reasoning; None: its files are not here.
    """

    name: str
    devices: tuple[str, ...]
    start: str
    size: float | None
    why: str
    parsers: ChatParsers | None


@dataclass(frozen=True)
class PlacementPlan:
    devices: tuple[PlannedDevice, ...]
    models: tuple[PlannedModel, ...]


def plan_of_file(path: Path, say: Callable[[str], None]) -> PlacementPlan:
    """What a platform with this configuration would begin with on this machine. Raises ConfigError
    if the file is wrong, or leaves to the platform what only a cluster's nodes know; StartError if
    a model fits nowhere, or cannot be fetched."""
    config = load(path)
    if config.cluster is not None and leaves_something(config):
        raise ConfigError(
            f"{path}: what the cluster's nodes have is known once loomserve serve has joined it: "
            "ask the platform that runs (loomserve plan)"
        )
    placed = placed_here(config, path.parent, say)
    devices = tuple(
        PlannedDevice(each.name, place(each), each.memory) for each in placed.config.devices
    )
    return PlacementPlan(
        devices, tuple(_planned(each, placed, path.parent) for each in placed.counted.models)
    )


def _planned(model: Model, placed: Placed, base: Path) -> PlannedModel:
    assignment = placed.assignments.get(model.name)
    used = len(model.devices) if model.pipeline else least_replicas(model)
    return PlannedModel(
        name=model.name,
        devices=model.devices[:used],
        start="on_demand" if model.start == "on_demand" else "now",
        size=placed.sizes.get(model.name),
        why=assignment.why if assignment is not None else _GIVEN,
        parsers=_parsers(model, base),
    )


def _parsers(model: Model, base: Path) -> ChatParsers | None:
    here = catalog.files_here(model.source, base)
    if here is None:
        return None
    return choose_parsers(here, model.engine, revision=model.revision)


def plan_of_platform(state: PlatformState) -> PlacementPlan:
    """What a platform that runs has decided."""
    return PlacementPlan(
        tuple(PlannedDevice(each.name, each.place, each.memory) for each in state.devices),
        tuple(
            PlannedModel(
                name=model.name,
                devices=tuple(each.device for each in model.replicas)
                or model.devices[: model.target_replicas],
                start=str(model.status),
                size=None,
                why=model.placement or _GIVEN,
                parsers=model.parsers,
            )
            for model in state.models
        ),
    )
