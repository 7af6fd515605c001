"""Divides a model that no single device holds among several of a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import Device, Model
from loomserve.platform.devices.binding import place
from loomserve.platform.placement import device_profile
from loomserve.platform.placement.configured import wanted_of
from loomserve.platform.placement.policy import placer
from loomserve.platform.placement.policy.device_times import (
    DeviceProfile,
    MeasuredDevice,
    MeasuredLink,
)
from loomserve.platform.placement.policy.helr import Mode
from loomserve.platform.placement.policy.placer import PlacedModel

# Of devices that nobody has measured. That they are alike matters, not how fast they are: so layers
# go by memory, and the output head counts for as many layers as it has parameters of.
_CORE_BYTES_PER_S, _CORE_FLOP_PER_S = 8e9, 40e9
_GPU_BYTES_PER_S, _GPU_FLOP_PER_S = 1e12, 100e12
_LINK_LATENCY_S, _LINK_BYTES_PER_S = 50e-6, 5e9
_ITEMSIZE = 2
# The fewest devices: others want some, too.
_MODE: Mode = "he"


def may_be_divided(model: Model) -> bool:
    """Whether nothing of a model's configuration keeps it on one device."""
    asks = ("tensor_parallel_size", "pipeline_parallel_size")
    return (
        model.roles is None
        and model.lending is None
        and model.replicas in ("auto", 1)
        and not any(option in model.engine for option in asks)
    )


def divide(
    model: Model, base: Path, devices: Sequence[Device], memory: Mapping[str, float]
) -> PlacedModel | None:
    """The layers of a model that may be divided, on the fewest devices of one node that hold them;
    None: none do. ``memory``: bytes that each device may give it."""
    found: list[PlacedModel] = []
    for node, kind in dict.fromkeys((device.on, device.kind) for device in devices):
        there = [each for each in devices if (each.on, each.kind) == (node, kind)]
        names = tuple(each.name for each in there if memory[each.name] > 0)
        if len(names) < 2:
            continue
        try:
            wanted = wanted_of(model.model_copy(update={"devices": names}), base, _MODE)
        except ConfigError:
            return None  # what its layers are is not known
        (placed,) = placer.place_models([wanted], _profile(there, memory))
        if placed.placement is not None:
            found.append(placed)
    return min(found, key=lambda each: len(each.stages), default=None)


def _profile(devices: Sequence[Device], memory: Mapping[str, float]) -> DeviceProfile:
    """What was measured of the devices, or else that all are alike, with the memory given."""
    measured = _measured(devices) or _assumed(devices)
    return measured.model_copy(
        update={
            "devices": tuple(
                each.model_copy(update={"memory": max(1, int(memory.get(each.name, 0)))})
                for each in measured.devices
            )
        }
    )


def _measured(devices: Sequence[Device]) -> DeviceProfile | None:
    try:
        profile = device_profile.load(device_profile.default_path())
    except ConfigError:
        return None
    places = {each.name: each.place for each in profile.devices}
    known = all(places.get(device.name) == place(device) for device in devices)
    return profile if known else None


def _assumed(devices: Sequence[Device]) -> DeviceProfile:
    return DeviceProfile(
        measured_at="",
        devices=tuple(_assumed_device(each) for each in devices),
        links=tuple(
            MeasuredLink(
                source=one.name,
                target=other.name,
                latency_s=_LINK_LATENCY_S,
                bytes_per_s=_LINK_BYTES_PER_S,
                measured=False,
            )
            for one, other in permutations(devices, 2)
        ),
    )


def _assumed_device(device: Device) -> MeasuredDevice:
    gpu, cores = device.gpu is not None, len(device.cores)
    return MeasuredDevice(
        name=device.name,
        place=place(device),
        memory=1,
        bytes_per_s=_GPU_BYTES_PER_S if gpu else cores * _CORE_BYTES_PER_S,
        flop_per_s=_GPU_FLOP_PER_S if gpu else cores * _CORE_FLOP_PER_S,
        itemsize=_ITEMSIZE,
    )
