"""Measurements of devices and links, and the times of a model's stages by them."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from pydantic import Field

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.base.frozen import Frozen
from loomserve.platform.placement.policy.graph import ModelShape


class StageTimes(Frozen):
    """Times of a decode step of ``batch`` requests on a device, in seconds."""

    batch: int = Field(ge=1)
    layer_s: float = Field(gt=0)
    stage_s: float = Field(0.0, ge=0, description="Inputs and calls, however many layers.")
    first_s: float = Field(0.0, ge=0, description="Embeddings.")
    last_s: float = Field(0.0, ge=0, description="Output head and sampling.")


class ModelTimes(Frozen):
    """Measured stage times of a model on a device."""

    model: str = Field(description="Its source, as configurations name it.")
    times: tuple[StageTimes, ...] = Field(min_length=1, description="By batch, ascending.")


class MeasuredDevice(Frozen):
    """Memory and speed of a device, and the models that were timed on it."""

    name: str
    place: str = Field(description="Its cores or GPU.")
    memory: int = Field(
        gt=0, description="Bytes for engines; the CPU devices of a machine share its memory."
    )
    bytes_per_s: float = Field(gt=0, description="Reading weights.")
    flop_per_s: float = Field(gt=0, description="Multiplying matrices.")
    itemsize: int = Field(ge=1, description="Bytes of a number that it computes with.")
    models: tuple[ModelTimes, ...] = ()


class MeasuredLink(Frozen):
    """Latency and bandwidth from one device to another."""

    source: str
    target: str
    latency_s: float = Field(ge=0)
    bytes_per_s: float = Field(gt=0)
    measured: bool = Field(description="False: what is assumed of such devices.")


class DeviceProfile(Frozen):
    """Measured devices of a configuration, and the links between them."""

    measured_at: str = Field(description="UTC, ISO 8601.")
    devices: tuple[MeasuredDevice, ...] = Field(min_length=1)
    links: tuple[MeasuredLink, ...] = ()

    @cached_property
    def _devices(self) -> dict[str, MeasuredDevice]:
        return {device.name: device for device in reversed(self.devices)}

    @cached_property
    def _links(self) -> dict[tuple[str, str], MeasuredLink]:
        return {(link.source, link.target): link for link in reversed(self.links)}

    def device(self, name: str) -> MeasuredDevice:
        """The measured device of this name. Raises ConfigError if it was not measured."""
        device = self._devices.get(name)
        if device is not None:
            return device
        raise ConfigError(
            f"device {name!r} is not in the profile ({', '.join(d.name for d in self.devices)}): "
            "run loomserve profile devices again"
        )

    def link_s(self, source: str, target: str, nbytes: float) -> float:
        """Seconds that ``nbytes`` take over a link. Raises ConfigError if the link was not
        measured."""
        link = self._links.get((source, target))
        if link is not None:
            return link.latency_s + nbytes / link.bytes_per_s
        raise ConfigError(
            f"the link from {source!r} to {target!r} is not in the profile: "
            "run loomserve profile devices again"
        )


def stage_times(device: MeasuredDevice, model: str, shape: ModelShape, batch: int) -> StageTimes:
    """Stage times of a model: measured ones, interpolated between batches, or predicted ones.
    Beyond the measured batches, times grow in proportion to the batch. Of a model that was not
    measured, bandwidth and arithmetic tell the times."""
    measured = next((each.times for each in device.models if each.model == model), None)
    if measured is None:
        return StageTimes(
            batch=batch,
            layer_s=_multiply_s(device, shape.layer_parameters, batch),
            last_s=_multiply_s(device, shape.head_parameters, batch),
        )
    batches = [each.batch for each in measured]
    beyond = max(1.0, batch / batches[-1])
    figures = {
        name: beyond * float(np.interp(batch, batches, [getattr(each, name) for each in measured]))
        for name in ("layer_s", "stage_s", "first_s", "last_s")
    }
    return StageTimes(batch=batch, **figures)


def _multiply_s(device: MeasuredDevice, parameters: float, batch: int) -> float:
    """Seconds to read the weights once for all requests, and to multiply and add each."""
    return (
        parameters * device.itemsize / device.bytes_per_s
        + 2 * parameters * batch / device.flop_per_s
    )
