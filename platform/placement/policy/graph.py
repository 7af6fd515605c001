"""Input of placement: a model's layers, the devices, and the links between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Layers of a model and numbers of parameters; their bytes depend on the device."""

    layers: int
    hidden_size: int
    layer_parameters: float
    """Average of the layers."""
    embedding_parameters: int
    head_parameters: int
    """Those of the embeddings if the two are tied, as the last stage needs its own copy."""


_ROUNDING = 1e-9


@dataclass(frozen=True)
class Demand:
    """Memory that a model needs on the devices of its layers, in bytes."""

    layers: int
    layer_bytes: float
    """Weights and KV of a layer."""
    stage_bytes: float = 0.0
    """Engine process of a stage, however many layers it has."""
    first_bytes: float = 0.0
    """Embeddings, on the first stage."""
    last_bytes: float = 0.0
    """The output head, on the last stage."""

    def __post_init__(self) -> None:
        if self.layers < 1 or self.layer_bytes <= 0:
            raise ValueError("a model has layers, and they take memory")

    def bytes_on(self, layers: int, *, first: bool, last: bool) -> float:
        return (
            self.stage_bytes
            + layers * self.layer_bytes
            + first * self.first_bytes
            + last * self.last_bytes
        )


@dataclass(frozen=True)
class DeviceNode:
    """Device in the graph of one model: free bytes, and seconds of a step of the model's batch."""

    name: str
    memory: float
    """Free for stages of this model."""
    layer_s: float
    stage_s: float = 0.0
    """Preparing inputs and calls, however many layers the stage has."""
    first_s: float = 0.0
    last_s: float = 0.0

    def seconds(self, layers: int, *, first: bool, last: bool) -> float:
        """Seconds that a stage computes, without the link before it."""
        return self.stage_s + layers * self.layer_s + first * self.first_s + last * self.last_s


@dataclass(frozen=True)
class Graph:
    """Devices and links; ``links[i][j]`` is seconds of a step's activations from i to j."""

    nodes: tuple[DeviceNode, ...]
    links: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.nodes) for row in (self.links, *self.links)):
            raise ValueError("links must have a row and a column for each node")
        if any(node.layer_s <= 0 for node in self.nodes):
            raise ValueError("layer_s must be more than zero")


@dataclass(frozen=True)
class Stage:
    """Consecutive layers on one device; ``node`` is the device's index in the graph."""

    node: int
    layers: int


Pipeline = tuple[Stage, ...]
"""Stages in the order of the layers, each with at least one layer, on distinct devices."""


def busy_s(demand: Demand, graph: Graph, pipeline: Pipeline) -> list[float]:
    """Seconds that a step keeps each stage busy, receiving activations and computing."""
    end = len(pipeline) - 1
    return [
        (graph.links[pipeline[i - 1].node][stage.node] if i else 0.0)
        + graph.nodes[stage.node].seconds(stage.layers, first=i == 0, last=i == end)
        for i, stage in enumerate(pipeline)
    ]


def period_s(demand: Demand, graph: Graph, pipeline: Pipeline) -> float:
    """Seconds between two steps of a full pipeline: those of its slowest stage."""
    return max(busy_s(demand, graph, pipeline))


def latency_s(demand: Demand, graph: Graph, pipeline: Pipeline) -> float:
    """Seconds of a step through all stages."""
    return sum(busy_s(demand, graph, pipeline))


def stage_bytes(demand: Demand, pipeline: Pipeline) -> list[float]:
    end = len(pipeline) - 1
    return [
        demand.bytes_on(stage.layers, first=i == 0, last=i == end)
        for i, stage in enumerate(pipeline)
    ]


def fits(demand: Demand, graph: Graph, pipeline: Pipeline) -> bool:
    """Whether the pipeline has every layer once, and fits into its devices' memory."""
    used = [stage.node for stage in pipeline]
    return (
        len(set(used)) == len(used)
        and all(stage.layers >= 1 for stage in pipeline)
        and sum(stage.layers for stage in pipeline) == demand.layers
        and all(
            needed <= graph.nodes[stage.node].memory * (1 + _ROUNDING)
            for needed, stage in zip(stage_bytes(demand, pipeline), pipeline, strict=True)
        )
    )


def even(demand: Demand, nodes: Sequence[int]) -> Pipeline:
    """The even split of vLLM: equal stages, and a rest for the stages before the last."""
    share, rest = divmod(demand.layers, len(nodes))
    layers = [share] * len(nodes)
    for place in range(2, rest + 2):
        layers[-place] += 1
    return tuple(Stage(node, count) for node, count in zip(nodes, layers, strict=True))
