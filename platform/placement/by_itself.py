"""Fills in what a configuration leaves to the platform: devices, their memory, where models go.

What it says itself stays. Without anything left out the configuration comes back as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from loomserve.platform.base.errors import ConfigError, StartError
from loomserve.platform.config import Config, Device, Idle, Lending, Model, Pipeline
from loomserve.platform.devices.machine import may_lend
from loomserve.platform.devices.memory import gpus_of, least_replicas, replica_bytes
from loomserve.platform.models import catalog
from loomserve.platform.placement.division_of_model import divide, may_be_divided
from loomserve.platform.placement.own_devices import NodeParts, own_devices, with_memory
from loomserve.platform.placement.policy.assignments import (
    DeviceAssignment,
    Newcomer,
    Spot,
    Taken,
    first_assignments,
    unplaced,
)
from loomserve.platform.placement.policy.graph import stage_bytes


@dataclass(frozen=True)
class Placed:
    """A configuration with nothing left out. By model: the devices that the platform assigned, and
    the bytes of a replica on all its devices together."""

    config: Config
    assignments: Mapping[str, DeviceAssignment] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)

    @property
    def counted(self) -> Config:
        """The configuration, with the number of replicas that each placed model begins with."""
        models = tuple(
            model.model_copy(update={"replicas": self.assignments[model.name].replicas})
            if model.name in self.assignments
            else model
            for model in self.config.models
        )
        return self.config.model_copy(update={"models": models})


def leaves_something(config: Config) -> bool:
    """Whether a configuration leaves anything to the platform."""
    return not config.devices or any(not model.is_placed for model in config.models)


def placed(
    config: Config, base: Path, nodes: Mapping[str, NodeParts], weights: Mapping[str, int]
) -> Placed:
    """The configuration with all that it leaves out; ``weights``: what an engine of each model
    holds of its weights. Raises StartError, which names the field, if a model fits nowhere or a
    node has no memory for any; ConfigError if the configuration would be wrong with it."""
    devices = config.devices or own_devices(nodes)
    if not devices:
        raise StartError(
            "devices: nothing was found that engines could run on: list the devices, or install "
            "for those that are there (DEVICE=cpu or DEVICE=cuda make install)"
        )
    devices = with_memory(devices, nodes)
    planner = _Planner(config, base, devices, weights)
    models, assignments = planner.models()
    changed = config.model_copy(update={"devices": devices, "models": models})
    try:
        checked = Config.model_validate(changed.model_dump())
    except ValidationError as error:
        what = "; ".join(str(each["msg"]) for each in error.errors())
        raise ConfigError(f"as the platform would place it: {what}") from None
    return Placed(checked, assignments, planner.sizes)


def placed_late(model: Model, devices: Sequence[Device], base: Path) -> Model:
    """A model that comes to a platform that runs; one without devices, once it is asked for. Where
    it comes is decided then; until then it may use all devices of a kind."""
    if model.is_placed:
        return model
    there = _of_one_kind(devices)
    return _filled(
        model, there, base, devices=tuple(each.name for each in there), start="on_demand"
    )


def _of_one_kind(devices: Sequence[Device]) -> list[Device]:
    """Those that a model may come to which names none: GPUs, where there are some."""
    return [each for each in devices if each.kind == "cuda"] or list(devices)


def _filled(model: Model, there: Sequence[Device], base: Path, **update: Any) -> Model:
    """The model, which is to be on one of these devices, with all that it leaves out."""
    if model.idle is None and not model.pinned and "idle" not in model.model_fields_set:
        update["idle"] = Idle()
    if there[0].kind != "cpu":
        return model.model_copy(update=update)
    # It comes and goes, and to compile it takes longer than all else of its start.
    update["engine"] = {"enforce_eager": True, **model.engine}
    model = model.model_copy(update=update)
    return with_lending(model, base) if len(there) > 1 else model


class _Planner:
    """Places the models of one configuration on its devices."""

    def __init__(
        self, config: Config, base: Path, devices: tuple[Device, ...], weights: Mapping[str, int]
    ) -> None:
        self._config, self._base, self._devices = config, base, devices
        self._spots = [_spot(each) for each in devices]
        gpus = gpus_of(devices)
        anywhere = {"devices": tuple(each.name for each in _of_one_kind(devices))}
        self.sizes = {
            model.name: replica_bytes(
                model if model.is_placed else model.model_copy(update=anywhere),
                weights.get(model.name, 0),
                gpus,
            )
            for model in config.models
        }
        self._taken = Taken()
        self._divided: dict[str, tuple[Model, DeviceAssignment]] = {}

    def models(self) -> tuple[tuple[Model, ...], dict[str, DeviceAssignment]]:
        """All models with their devices, and the assignments of those that were placed."""
        for model in self._config.models:
            if model.is_placed:
                self._take(model)
        own = [model for model in self._config.models if not model.is_placed]
        most = max(each.memory for each in self._spots)
        for model in own:
            if self.sizes[model.name] > most and may_be_divided(model):
                self._divide(model)
        whole = [model for model in own if model.name not in self._divided]
        newcomers = [self._newcomer(model) for model in whole]
        assignments = first_assignments(newcomers, self._spots, self._taken)
        self._refuse(unplaced(assignments))
        found = {
            name: assignment
            for name, assignment in assignments.items()
            if isinstance(assignment, DeviceAssignment)
        }
        models = {model.name: self._settled(model, found[model.name]) for model in whole}
        for name, (model, assignment) in self._divided.items():
            models[name], found[name] = model, assignment
        for model in own:
            if model.lending is None and models[model.name].lending is not None:
                assignment = found[model.name]
                found[model.name] = replace(assignment, why=f"{assignment.why}; lending: auto")
        return tuple(models.get(each.name, each) for each in self._config.models), found

    def _refuse(self, unplaced: Mapping[str, Any]) -> None:
        problems = [
            f"models[{index}].{unplaced[model.name].field}: model {model.name!r} cannot be "
            f"placed: {unplaced[model.name].why}"
            for index, model in enumerate(self._config.models)
            if model.name in unplaced
        ]
        if problems:
            raise StartError("\n".join(problems))

    def _take(self, model: Model) -> None:
        """Note what a model takes whose devices the configuration names."""
        starts = model.start != "on_demand"
        size = self.sizes[model.name]
        if model.pipeline is not None:
            size, used = size / len(model.devices), len(model.devices)
        else:
            used = len(model.devices) if model.replicas == "auto" else least_replicas(model)
        for device in model.devices[:used]:
            self._taken.add(device, size, starts=starts)

    def _newcomer(self, model: Model) -> Newcomer:
        least = least_replicas(model)
        replicas = least if model.replicas != "auto" or least > 1 else None
        return Newcomer(model.name, self.sizes[model.name], model.start, replicas)

    def _divide(self, model: Model) -> None:
        """Place a model that no device holds on several, if they do."""
        whole = {each.name: each.memory for each in self._spots}
        free = {name: size - self._taken.memory.get(name, 0.0) for name, size in whole.items()}
        now = None if model.start == "on_demand" else self._division(model, free)
        division = now or (None if model.start == "now" else self._division(model, whole))
        if division is None:
            return
        stages, sizes = division
        for (device, _), size in zip(stages, sizes, strict=True):
            self._taken.add(device, size, starts=now is not None)
        assignment = DeviceAssignment(
            devices=tuple(device for device, _ in stages),
            replicas=1,
            starts=now is not None,
            why=f"no device holds its {self.sizes[model.name] / 2**30:.1f} GiB; layers: "
            + ", ".join(f"{device} {layers}" for device, layers in stages),
        )
        pipeline = Pipeline(mode="he", layers=tuple(layers for _, layers in stages))
        # The store does not keep blocks of stages.
        update = {"pipeline": pipeline, "kvstore": False, "kvstore_quota": None}
        self._divided[model.name] = self._settled(model, assignment, **update), assignment

    def _division(
        self, model: Model, memory: Mapping[str, float]
    ) -> tuple[list[tuple[str, int]], list[float]] | None:
        found = divide(model, self._base, self._devices, memory)
        if found is None or found.placement is None:
            return None
        return found.stages, stage_bytes(found.demand, found.placement.pipeline)

    def _settled(self, model: Model, assignment: DeviceAssignment, **update: Any) -> Model:
        kinds = {each.name: each.kind for each in self._devices}
        kind = kinds[assignment.devices[0]]
        return _filled(
            model,
            [each for each in self._devices if each.kind == kind],
            self._base,
            devices=assignment.devices,
            start="now" if assignment.starts else "on_demand",
            **update,
        )


def _spot(device: Device) -> Spot:
    assert device.memory is not None
    cores = len(device.cores) if device.kind == "cpu" else None
    return Spot(device.name, float(device.memory), cores)


def with_lending(model: Model, base: Path) -> Model:
    """The model with ``lending: auto`` if it leaves ``lending`` out and nothing speaks against it.
    It must run on a CPU device that is not the only one, and there be a compiler for its task ring.
    Replicas with roles hand their KV over to each other, and do not lend by themselves; nor does a
    model that is not on this machine, of which nobody knows what attention it has."""
    if "lending" in model.model_fields_set or model.roles is not None or not may_lend():
        return model
    try:
        folder = catalog.folder_here(model.source, base)
        if folder is None or not catalog.has_plain_attention(folder):
            return model
        lends = model.model_copy(update={"lending": Lending(auto=True)})
        # Its own checks know which options go with lending.
        Model.model_validate(lends.model_dump(exclude_unset=True))
    except (ConfigError, ValidationError):
        return model
    return lends
