"""Describes a layer map: its stages, its bottleneck, and what other maps would do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from loomserve.platform.placement.policy.graph import (
    Pipeline,
    Stage,
    even,
    fits,
    latency_s,
    period_s,
    stage_bytes,
)
from loomserve.platform.placement.policy.helr import MODES, SLACK, Placement, place
from loomserve.platform.placement.policy.placer import PlacedModel

_WHAT = {
    "he": "the fewest devices, then the shortest step",
    "lr": "the least latency of a step",
    "balanced": f"the shortest slowest stage; within {SLACK:.0%} of it, the least latency",
}


class Alternative(NamedTuple):
    """Another map; ``period_s`` and ``latency_s`` are None if it does not fit."""

    name: str
    pipeline: Pipeline
    period_s: float | None
    latency_s: float | None


def alternatives(placed: PlacedModel) -> list[Alternative]:
    """Other maps: the other modes', the even split both ways round, and each device alone."""
    assert placed.placement is not None
    chosen = placed.placement.pipeline
    seen, others = {chosen}, []
    for name, pipeline in _others(placed):
        if pipeline not in seen:
            seen.add(pipeline)
            fitting = fits(placed.demand, placed.graph, pipeline)
            others.append(
                Alternative(
                    name,
                    pipeline,
                    period_s(placed.demand, placed.graph, pipeline) if fitting else None,
                    latency_s(placed.demand, placed.graph, pipeline) if fitting else None,
                )
            )
    return others


def _others(placed: PlacedModel) -> Iterator[tuple[str, Pipeline]]:
    demand, graph = placed.demand, placed.graph
    assert placed.placement is not None
    for mode in MODES:
        if mode != placed.placement.mode:
            yield f"mode {mode}", place(demand, graph, mode).pipeline
    nodes = range(len(graph.nodes))
    if len(nodes) <= demand.layers:
        yield "even split", even(demand, nodes)
        yield "even split, reversed", even(demand, nodes[::-1])
    for node in nodes:
        yield f"all on {graph.nodes[node].name}", (Stage(node, demand.layers),)


def rows(placed: PlacedModel) -> Iterator[dict[str, str]]:
    """A row for each stage, by column; the last says which is the bottleneck."""
    placement = placed.placement
    assert placement is not None
    needed = stage_bytes(placed.demand, placement.pipeline)
    for i, ((device, layers), nbytes, busy) in enumerate(
        zip(placed.stages, needed, placement.busy_s, strict=True)
    ):
        bottleneck = "bottleneck" if busy == placement.period_s else ""
        free = placed.graph.nodes[placement.pipeline[i].node].memory
        memory = f"{nbytes / 2**30:.1f} of {free / 2**30:.1f} GiB"
        yield {
            "stage": str(i),
            "device": device,
            "layers": str(layers),
            "memory": memory,
            "busy a step": _ms(busy),
            "": bottleneck,
        }


def summary(placed: PlacedModel) -> list[str]:
    placement = placed.placement
    assert placement is not None
    batch, stages = placed.wanted.batch, len(placement.pipeline)
    return [
        f"predicted for {batch} requests a step: a step every {_ms(placement.period_s)} "
        f"({batch / placement.period_s:.0f} tokens/s with {stages * batch} requests), "
        f"{_ms(placement.latency_s)} from first to last stage",
        f"chosen for {_WHAT[placement.mode]}; {_proof(placement)}",
        "to keep it: devices: [{}], pipeline: {{layers: [{}]}}".format(
            ", ".join(device for device, _ in placed.stages),
            ", ".join(str(layers) for _, layers in placed.stages),
        ),
    ]


def _proof(placement: Placement) -> str:
    if placement.exact:
        return "no other map of these devices is better by these times"
    return (
        f"too many maps to try all: its period is at most "
        f"{placement.period_s / placement.least_period_s - 1:.0%}, its latency "
        f"{placement.latency_s / placement.least_latency_s - 1:.0%} above the best there can be"
    )


def other_row(placed: PlacedModel, other: Alternative) -> dict[str, str]:
    placement = placed.placement
    assert placement is not None
    layers = ", ".join(
        f"{placed.graph.nodes[stage.node].name}:{stage.layers}" for stage in other.pipeline
    )
    period, latency, slower = "-", "-", "does not fit in memory"
    if other.period_s is not None and other.latency_s is not None:
        period, latency = _ms(other.period_s), _ms(other.latency_s)
        slower = f"{other.period_s / placement.period_s:.2f} x the period, "
        slower += f"{other.latency_s / placement.latency_s:.2f} x the latency"
    return {
        "instead": other.name,
        "layers": layers,
        "step every": period,
        "latency": latency,
        "": slower,
    }


def why_not(placed: PlacedModel) -> str:
    """Why a model has no placement, and what to do."""
    demand = placed.demand
    needed = demand.bytes_on(demand.layers, first=True, last=True)
    free = ", ".join(f"{n.name} {n.memory / 2**30:.1f}" for n in placed.graph.nodes)
    return (
        f"does not fit: it needs {needed / 2**30:.1f} GiB on one device, or "
        f"{demand.stage_bytes / 2**30:.1f} GiB more for each further stage, and there is "
        f"({free} GiB): lower kv_cache_memory, or give it more devices"
    )


def as_dict(placed: PlacedModel) -> dict[str, Any]:
    """The same as JSON, in seconds and bytes."""
    result: dict[str, Any] = {"model": placed.wanted.name, "batch": placed.wanted.batch}
    placement = placed.placement
    if placement is None:
        return result | {"fits": False, "problem": why_not(placed)}
    needed = stage_bytes(placed.demand, placement.pipeline)
    return result | {
        "fits": True,
        "mode": placement.mode,
        "stages": [
            {"device": device, "layers": layers, "memory": round(nbytes), "busy_s": busy}
            for (device, layers), nbytes, busy in zip(
                placed.stages, needed, placement.busy_s, strict=True
            )
        ],
        "period_s": placement.period_s,
        "latency_s": placement.latency_s,
        "exact": placement.exact,
        "least_period_s": placement.least_period_s,
        "least_latency_s": placement.least_latency_s,
        "alternatives": [
            {
                "name": other.name,
                "stages": [
                    {"device": placed.graph.nodes[stage.node].name, "layers": stage.layers}
                    for stage in other.pipeline
                ],
                "fits": other.period_s is not None,
                "period_s": other.period_s,
                "latency_s": other.latency_s,
            }
            for other in alternatives(placed)
        ],
    }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
