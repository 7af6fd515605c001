"""Counts of what the rebalancing controller has done since it started."""

from __future__ import annotations

from collections import Counter

from loomserve.platform.rebalancing.plans.history import History
from loomserve.platform.rebalancing.plans.reports import ActionCount, Event, EventKind
from loomserve.platform.rebalancing.policy.actions import kind_of
from loomserve.platform.rebalancing.policy.planner import Proposal

_ENDS = frozenset({EventKind.DONE, EventKind.FAILED, EventKind.ABORTED})


class Tally:
    """Running sums; a restarted controller counts from nothing."""

    def __init__(self) -> None:
        self.paused_s = 0.0
        self._actions: Counter[tuple[str, str]] = Counter()
        self.rejected: Counter[str] = Counter()
        """Candidates that were not chosen, by reason."""
        self.moved_bytes: Counter[str] = Counter()
        """By kind of action."""

    def count_rejected(self, proposal: Proposal) -> None:
        self.rejected.update(str(each.reason) for each in proposal.rejected)

    def count_event(self, event: Event, history: History) -> None:
        """Count an action that has ended; other events count nothing."""
        if event.kind not in _ENDS or event.action is None or event.plan is None:
            return
        assert event.step is not None
        kind, step = str(kind_of(event.action)), history.plan(event.plan).steps[event.step]
        self._actions[kind, str(event.kind)] += 1
        self.moved_bytes[kind] += step.moved_bytes
        self.paused_s += step.paused_s

    @property
    def actions(self) -> tuple[ActionCount, ...]:
        return tuple(
            ActionCount(kind=kind, outcome=outcome, count=count)
            for (kind, outcome), count in sorted(self._actions.items())
        )
