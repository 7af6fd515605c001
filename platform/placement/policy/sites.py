"""Chooses the device of a model that is about to be loaded, from what there is to do on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Below that, how busy devices were in the last minute says little of the next.
_STEP = 0.05


@dataclass(frozen=True)
class Site:
    """A device on which a model may be loaded.

    Attributes:
        heat: Share of the time that models there have lately had requests.
        loss: Share of the time that others will wait since they make room; 0: there is room; None:
            nobody can go.
        free: Bytes that nobody will have, once the model is there.
    """

    device: str
    heat: float
    loss: float | None
    free: float


def best_site(sites: Sequence[Site]) -> Site:
    """The device, of at least one, where least time is lost, by others or to them; of equal ones
    the emptiest, then the first."""
    return min(
        sites, key=lambda each: (each.loss is None, _steps(each), each.loss or 0.0, -each.free)
    )


def why_there(chosen: Site, sites: Sequence[Site]) -> str:
    """Why a model is loaded there, for a person."""
    if len(sites) == 1:
        return f"{chosen.device} is the only device that can hold it"
    figures = "; ".join(f"{each.device}: {_figures(each)}" for each in sites)
    return f"{chosen.device} has least to do ({figures})"


def _steps(site: Site) -> int:
    return int(((site.loss or 0.0) + site.heat) / _STEP)


def _figures(site: Site) -> str:
    room = "no room" if site.loss is None else "room" if not site.loss else "room once others go"
    return f"busy {100 * site.heat:.0f} %, {room}"
