"""Plans of actions that an operator names, held to the same limits."""

from __future__ import annotations

from collections.abc import Sequence

from loomserve.platform.base.errors import Conflict, NotFound
from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.rebalancing.policy.actions import (
    Action,
    AddReplica,
    Move,
    MoveRequests,
    RemoveReplica,
    kind_of,
)
from loomserve.platform.rebalancing.policy.effects import apply
from loomserve.platform.rebalancing.policy.forecast import Corrections, Forecast, way
from loomserve.platform.rebalancing.policy.limits import Refusal, exceeded, over_budget, unable
from loomserve.platform.rebalancing.policy.planner import Chosen, Proposal, foreseen
from loomserve.platform.rebalancing.policy.snapshot import Snapshot


def manual(
    snapshot: Snapshot,
    actions: Sequence[Action],
    corrections: Corrections,
    options: Rebalancing,
    *,
    forced: bool,
) -> Proposal:
    """A proposal of these actions, one after the other, whether they gain anything or not. Forced,
    it may exceed memory, pause and the like; what has no mechanism or no measured link cannot be
    forced. Raises NotFound if an action names what is not there; Conflict if an action cannot be,
    or breaks a limit."""
    now, chosen = snapshot, list[Chosen]()
    for action in actions:
        try:
            refusal = unable(now, action, options)
            if refusal is not None:
                raise Conflict(_said(action, refusal), reason=refusal.reason)
            source, target = ends(now, action)
            after = apply(now, action)
            found = foreseen(now, after, action, source, target, corrections)
        except LookupError as error:
            raise NotFound(str(error.args[0])) from None
        earlier: list[tuple[Action, Forecast]] = [(x.action, x.predicted) for x in chosen]
        refusal = exceeded(snapshot, now, after, options) or over_budget(
            earlier, action, found.predicted, options
        )
        if refusal is not None and not forced:
            raise Conflict(f"{_said(action, refusal)}; it can be forced", reason=refusal.reason)
        chosen.append(found)
        now = after
    return Proposal(tuple(chosen), (), (), now)


def ends(snapshot: Snapshot, action: Action) -> tuple[str, str]:
    """The devices that work leaves and comes to; where the action names only one or none of them,
    the most and the least loaded of all. Raises LookupError if it names what is not in the
    snapshot."""
    loads = snapshot.loads
    most, least = (pick(loads, key=lambda name: loads[name]) for pick in (max, min))
    match action:
        case Move():
            return way(snapshot, action)
        case MoveRequests():
            return snapshot.engine(action.engine).device, snapshot.engine(action.to).device
        case AddReplica():
            return most, action.device
        case RemoveReplica():
            return snapshot.engine(action.engine).device, least
        case _:
            return most, least


def _said(action: Action, refusal: Refusal) -> str:
    return f"{kind_of(action)}: {refusal.reason} ({refusal.detail})"
