"""Whether a model that is ready may have one more replica on a device, and who goes for it.

No model that is ready goes for another's further replica unless it has been idle for a while, and
none is taken the memory that requests for a model that is not ready wait for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from loomserve.platform.config import Elastic
from loomserve.platform.elastic.policy.snapshot import ElasticModel, ElasticSnapshot, PresenceChange
from loomserve.platform.elastic.policy.victims import chosen_victims
from loomserve.platform.state import Presence


@dataclass(frozen=True)
class Growth:
    """Whether there is room now, what makes room, and why there is none yet, for a person."""

    fits: bool
    changes: tuple[PresenceChange, ...] = ()
    why: str = ""


def grow(snapshot: ElasticSnapshot, rules: Elastic, name: str, device: str) -> Growth:
    """Find room for one more replica of a model on a device where it has none."""
    model = next((each for each in snapshot.models if each.name == name), None)
    if model is None or device not in snapshot.budgets:
        return Growth(fits=True)
    there = [each for each in snapshot.models if device in each.devices]
    demanded = {demand.model for demand in snapshot.demands}
    awaited = [
        each.name for each in there if each.name in demanded and each.presence is not Presence.READY
    ]
    if awaited:
        return Growth(fits=False, why=f"requests wait for {', '.join(awaited)} on {device}")
    one = replace(model, devices=(device,))
    pools = [pool for pool in one.pools if pool in snapshot.budgets]
    missing = {
        pool: model.bytes_as(Presence.READY, pool)
        + sum(each.held_in(pool) for each in there if pool in each.pools)
        - snapshot.budgets[pool]
        for pool in pools
    }
    if max(missing.values()) <= 0:
        return Growth(fits=True)
    for pool in pools:
        going = [each for each in there if pool in each.pools]
        missing[pool] -= sum(
            max(0.0, each.held_in(pool) - each.bytes_as(each.presence, pool)) for each in going
        )
    if max(missing.values()) <= 0:
        return Growth(fits=False, why=f"others are about to leave {device}")
    candidates = [each for each in there if _may_go(each, name, demanded, rules)]
    victims = chosen_victims(candidates, missing)
    if victims is None:
        names = ", ".join(sorted(each.name for each in there if each.held_bytes)) or "none"
        why = f"{device} has no memory for it: of {names} none that is idle has so much"
        return Growth(fits=False, why=why)
    changes = tuple(
        PresenceChange(victim, presence, f"{name} needs its memory for one more replica")
        for victim, presence in victims.items()
    )
    return Growth(fits=False, changes=changes, why=f"{', '.join(victims)} makes room on {device}")


def _may_go(model: ElasticModel, for_: str, demanded: set[str], rules: Elastic) -> bool:
    """An idle model, and not one that merely has no request at this moment."""
    return (
        model.name != for_
        and model.name not in demanded
        and model.may_go
        and model.idle_s > 0
        and (
            model.presence is Presence.ASLEEP
            or min(model.idle_s, model.since_s) >= rules.residence_s
        )
    )
