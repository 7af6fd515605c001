"""Which devices are hot and which are cold, without flapping between the two."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from loomserve.platform.base.frozen import Frozen
from loomserve.platform.config.rebalancing import Rebalancing


class Level(StrEnum):
    HOT = "hot"
    EVEN = "even"
    COLD = "cold"


class Heat(Frozen):
    """Level of one device; outlives a period, and a restart of the controller."""

    level: Level = Level.EVEN
    next_level: Level = Level.EVEN
    """The level that the last looks saw, if it differs."""
    looks: int = 0
    """Number of looks in a row that saw ``next_level``."""


def classify(
    before: Mapping[str, Heat], loads: Mapping[str, float], options: Rebalancing
) -> dict[str, Heat]:
    """The devices' levels after one more look (eq. 4-29, with section 4.5.1's hysteresis). A device
    becomes hot above ``rising`` over the least loaded and remains so down to ``falling``, cold
    likewise below the most loaded, each only once ``confirm_periods`` looks in a row agree. On a
    constant load with noise of at most ±ε a device changes once, at most, if 4ε < rising - falling.
    The paper's formula lets a device in the middle be both; here it is what it is farther into. A
    device that is not in ``before`` was even."""
    if not loads:
        return {}
    least, most = min(loads.values()), max(loads.values())
    return {
        device: _after(
            before.get(device, Heat()),
            _level(before.get(device, Heat()).level, load - least, most - load, options),
            options.confirm_periods,
        )
        for device, load in loads.items()
    }


def at_once(loads: Mapping[str, float], options: Rebalancing) -> dict[str, Heat]:
    """The devices' levels as if what is seen now had been seen often enough."""
    return classify({}, loads, options.model_copy(update={"confirm_periods": 1}))


def _level(level: Level, above: float, below: float, options: Rebalancing) -> Level:
    if level is Level.HOT and above > options.falling:
        return Level.HOT
    if level is Level.COLD and below > options.falling:
        return Level.COLD
    if max(above, below) <= options.rising:
        return Level.EVEN
    return Level.HOT if above >= below else Level.COLD


def _after(before: Heat, seen: Level, confirm_periods: int) -> Heat:
    if seen is before.level:
        return Heat(level=seen, next_level=seen)
    looks = before.looks + 1 if seen is before.next_level else 1
    if looks >= confirm_periods:
        return Heat(level=seen, next_level=seen)
    return Heat(level=before.level, next_level=seen, looks=looks)
