"""Names of what nodes offer to Ray, which places by them what runs on a device. Pure.

A node offers its cores and GPUs under its own name, whatever the configuration makes devices of.
What runs on a device asks for a small share of each of the device's cores, or of its GPU: so Ray
knows where it belongs, and several models may still share a device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from loomserve.platform.config import Device

STATE = "loomserve_state"
"""Of the node that keeps what there is but once: controller, plans, batches."""
SHARE = 0.001
"""What one asks for; a thousand may have the same."""

_NODE = "loomserve_node:"


def node_resource(node: str) -> str:
    return f"{_NODE}{node}"


def offered(node: str, cores: Iterable[int], gpus: Iterable[int], *, state: bool) -> dict[str, int]:
    """What a node of this name offers."""
    names = [
        node_resource(node),
        *(_place(node, "core", core) for core in cores),
        *(_place(node, "gpu", gpu) for gpu in gpus),
        *([STATE] if state else []),
    ]
    return dict.fromkeys(names, 1)


def offered_by_devices(devices: Collection[Device]) -> dict[str, int]:
    """What the one node of a platform offers that is no cluster."""
    places = {name: 1 for device in devices for name in places_of(device)}
    return offered(next(iter(devices)).on, (), (), state=True) | places


def places_of(device: Device) -> list[str]:
    """What a device consists of, as its node offers it."""
    if device.gpu is not None:
        return [_place(device.on, "gpu", device.gpu)]
    return [_place(device.on, "core", core) for core in device.cores]


def on_devices(devices: Iterable[Device]) -> dict[str, float]:
    """What a process on these devices of one node asks for."""
    return {name: SHARE for device in devices for name in places_of(device)}


def on_node(node: str) -> dict[str, float]:
    """What work on a node asks for."""
    return {node_resource(node): SHARE}


def on_state() -> dict[str, float]:
    """What runs but once asks for."""
    return {STATE: SHARE}


def name_in(resources: Mapping[str, float]) -> str | None:
    """The name of the node that offers these resources; None: it is none of the platform's."""
    return next((name.removeprefix(_NODE) for name in resources if name.startswith(_NODE)), None)


def _place(node: str, kind: str, number: int) -> str:
    return f"loomserve_{kind}:{node}:{number}"
