"""Input of placement: a model's layers, the devices, and the links between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Demand:
    """What a model asks of the devices that its layers are on; bytes."""

    layers: int
    layer_bytes: float
    """Weights and KV of a layer."""
    stage_bytes: float = 0.0
    """Of a stage, whatever it holds: an engine's process."""
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
    """A device, as one model finds it: bytes, and seconds of a step of the configured batch."""

    name: str
    memory: float
    """Free for stages of this model."""
    layer_s: float
    stage_s: float = 0.0
    """Of a stage, whatever it holds: preparing inputs, calls."""
    first_s: float = 0.0
    last_s: float = 0.0

    def seconds(self, layers: int, *, first: bool, last: bool) -> float:
        """Computing, without what the link before it takes."""
        return self.stage_s + layers * self.layer_s + first * self.first_s + last * self.last_s


@dataclass(frozen=True)
class Graph:
    """Devices, and ``links[i][j]``: seconds that a step's activations take from i to j."""

    nodes: tuple[DeviceNode, ...]
    links: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.nodes) for row in (self.links, *self.links)):
            raise ValueError("links must have a row and a column for each node")
        if any(node.layer_s <= 0 for node in self.nodes):
            raise ValueError("layer_s must be more than zero")


@dataclass(frozen=True)
class Stage:
    """Consecutive layers on one device; ``node`` is its place in the graph."""

    node: int
    layers: int


Pipeline = tuple[Stage, ...]
"""In the order of the layers; every device at most once, every stage with a layer at least."""


def busy_s(demand: Demand, graph: Graph, pipeline: Pipeline) -> list[float]:
    """How long a step keeps each stage busy: receiving activations and computing."""
    end = len(pipeline) - 1
    return [
        (graph.links[pipeline[i - 1].node][stage.node] if i else 0.0)
        + graph.nodes[stage.node].seconds(stage.layers, first=i == 0, last=i == end)
        for i, stage in enumerate(pipeline)
    ]


def period_s(demand: Demand, graph: Graph, pipeline: Pipeline) -> float:
    """Between two steps of a full pipeline: its slowest stage."""
    return max(busy_s(demand, graph, pipeline))


def latency_s(demand: Demand, graph: Graph, pipeline: Pipeline) -> float:
    """Of one step through all stages."""
    return sum(busy_s(demand, graph, pipeline))


def stage_bytes(demand: Demand, pipeline: Pipeline) -> list[float]:
    end = len(pipeline) - 1
    return [
        demand.bytes_on(stage.layers, first=i == 0, last=i == end)
        for i, stage in enumerate(pipeline)
    ]


def fits(demand: Demand, graph: Graph, pipeline: Pipeline) -> bool:
    """Whether it is a map of this model at all: every layer once, within every memory."""
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
    """As vLLM divides layers: equally, a rest to the stages before the last."""
    share, rest = divmod(demand.layers, len(nodes))
    layers = [share] * len(nodes)
    for place in range(2, rest + 2):
        layers[-place] += 1
    return tuple(Stage(node, count) for node, count in zip(nodes, layers, strict=True))
