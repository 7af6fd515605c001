"""On which of its devices a model's replicas are to be. Pure."""

from __future__ import annotations

from collections.abc import Container, Sequence


def places(
    devices: Sequence[str], target: int, there: Sequence[str], up: Container[str]
) -> tuple[str, ...]:
    """The devices that are to have a replica.

    Replicas stay where they are, as long as that node is up; of too many the newest end. One whose
    node is down is given another device, if there is one, and else comes back with its node.

    Args:
        devices: the model's, in the configuration's order.
        target: how many replicas there are to be.
        there: devices that have one, the oldest replica first.
        up: devices whose nodes are up.
    """
    stay = [name for name in there if name in up and name in devices]
    free = [name for name in devices if name in up and name not in there]
    down = [name for name in devices if name not in up]
    chosen = {*[*stay, *free, *down][:target]}
    return tuple(name for name in devices if name in chosen)
