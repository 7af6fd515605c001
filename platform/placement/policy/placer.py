"""Places several models that share devices, one after the other.

The hottest model is placed first and so gets its best map: a cold model hardly slows the devices
that they share. Placing all at once would multiply the states of the search. If a later model then
does not fit, the largest are placed first instead. A placed model takes memory from its devices,
and its ``load`` takes speed: a device that is busy for a share of the time is slower by that share
for later models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loomserve.platform.devices.memory import ENGINE_BYTES, STAGE_BYTES
from loomserve.platform.placement.policy.device_times import DeviceProfile, stage_times
from loomserve.platform.placement.policy.graph import Demand, DeviceNode, Graph, ModelShape
from loomserve.platform.placement.policy.helr import DoesNotFitError, Mode, Placement, place

# Hidden states and the residual beside them, as most architectures pass both on.
_TENSORS_PASSED = 2


@dataclass(frozen=True)
class Wanted:
    """Model to be placed; ``load`` is the share of the time that its slowest stage is busy."""

    name: str
    source: str
    shape: ModelShape
    devices: tuple[str, ...]
    kv_bytes: float
    mode: Mode
    batch: int
    load: float = 0.0

    @property
    def size(self) -> float:
        return self.shape.layers * self.shape.layer_parameters + self.kv_bytes


@dataclass(frozen=True)
class PlacedModel:
    """Model with its placement (None: its devices do not hold it) and the graph that it saw."""

    wanted: Wanted
    demand: Demand
    graph: Graph
    placement: Placement | None

    @property
    def stages(self) -> list[tuple[str, int]]:
        """Devices and their numbers of layers, in the order of the stages."""
        pipeline = self.placement.pipeline if self.placement else ()
        return [(self.wanted.devices[stage.node], stage.layers) for stage in pipeline]


@dataclass
class _Taken:
    """Bytes that placed models take of each device, and the share of the time it is busy."""

    memory: dict[str, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)


def place_models(models: Sequence[Wanted], profile: DeviceProfile) -> list[PlacedModel]:
    """Place all models; the result is in their order. Raises ConfigError if a device or a link was
    not measured."""
    hot_first = _in_order(sorted(models, key=lambda model: -model.load), profile)
    if any(each.placement is None for each in hot_first.values()):
        large_first = _in_order(sorted(models, key=lambda model: -model.size), profile)
        if all(each.placement for each in large_first.values()):
            hot_first = large_first
    return [hot_first[model.name] for model in models]


def _in_order(models: Sequence[Wanted], profile: DeviceProfile) -> Mapping[str, PlacedModel]:
    taken, placed = _Taken(), {}
    for model in models:
        placed[model.name] = _place(model, profile, taken)
    return placed


def _place(model: Wanted, profile: DeviceProfile, taken: _Taken) -> PlacedModel:
    demand, graph = problem(model, profile, taken.memory, taken.busy)
    try:
        placement = place(demand, graph, model.mode)
    except DoesNotFitError:
        return PlacedModel(model, demand, graph, None)
    end = len(placement.pipeline) - 1
    for i, (stage, busy) in enumerate(zip(placement.pipeline, placement.busy_s, strict=True)):
        name = model.devices[stage.node]
        needed = demand.bytes_on(stage.layers, first=i == 0, last=i == end)
        taken.memory[name] = taken.memory.get(name, 0.0) + needed
        share = model.load * busy / placement.period_s
        free = 1 - taken.busy.get(name, 0.0)
        taken.busy[name] = 1 - free * (1 - share)
    return PlacedModel(model, demand, graph, placement)


def problem(
    model: Wanted,
    profile: DeviceProfile,
    memory_taken: Mapping[str, float],
    busy: Mapping[str, float],
) -> tuple[Demand, Graph]:
    """Input of HELR for a model: its demand, and the graph of its devices."""
    devices = [profile.device(name) for name in model.devices]
    shape, itemsize = model.shape, max(device.itemsize for device in devices)
    demand = Demand(
        layers=shape.layers,
        layer_bytes=itemsize * shape.layer_parameters + model.kv_bytes / shape.layers,
        stage_bytes=STAGE_BYTES,
        first_bytes=ENGINE_BYTES + itemsize * shape.embedding_parameters,
        last_bytes=2 * itemsize * shape.head_parameters,
    )
    nodes = []
    for device in devices:
        times = stage_times(device, model.source, shape, model.batch)
        slower = 1 / max(0.05, 1 - busy.get(device.name, 0.0))
        nodes.append(
            DeviceNode(
                device.name,
                memory=max(0.0, device.memory - memory_taken.get(device.name, 0.0)),
                layer_s=times.layer_s * slower,
                stage_s=times.stage_s * slower,
                first_s=times.first_s * slower,
                last_s=times.last_s * slower,
            )
        )
    passed = _TENSORS_PASSED * itemsize * shape.hidden_size * model.batch
    links = tuple(
        tuple(0.0 if a is b else profile.link_s(a.name, b.name, passed) for b in devices)
        for a in devices
    )
    return demand, Graph(tuple(nodes), links)
