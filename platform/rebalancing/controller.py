"""The rebalancing controller: looks once a period, proposes, and in ``auto`` carries out.

It knows neither Ray nor an engine: ``observe`` tells what there is, and actuators do what is to be
done. Of two controllers with one folder only one acts; the other waits until the first is gone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from loomserve.platform.base.errors import Conflict, Unavailable
from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.rebalancing.actuators.base import Actuator
from loomserve.platform.rebalancing.execution import Execution
from loomserve.platform.rebalancing.plans.history import History, Transition
from loomserve.platform.rebalancing.plans.plans import Origin, Plan, alike, plan_of
from loomserve.platform.rebalancing.plans.reports import (
    ActionCount,
    Event,
    EventKind,
    Kept,
    MadePlan,
    Mode,
    RebalancingState,
    device_loads,
)
from loomserve.platform.rebalancing.plans.store import PlanStore, StoreError
from loomserve.platform.rebalancing.policy.actions import Action, ActionKind, kind_of
from loomserve.platform.rebalancing.policy.heat import at_once, classify
from loomserve.platform.rebalancing.policy.manual import manual
from loomserve.platform.rebalancing.policy.measured import Measured, listed
from loomserve.platform.rebalancing.policy.planner import Proposal, propose
from loomserve.platform.rebalancing.scaler import Scaler


class Rebalancer:
    """Makes plans and carries them out, one at a time; only what is saved counts. Times are Unix
    seconds of the caller's clock, which takes no steps while it lives."""

    def __init__(
        self,
        options: Rebalancing,
        store: PlanStore,
        observe: Callable[[float], Measured],
        actuators: Mapping[ActionKind, Actuator[Any]],
        clock: Callable[[], float],
        scaler: Scaler | None = None,
    ) -> None:
        """``store`` is not yet claimed; ``observe`` returns the fleet as it is now, given when the
        last action ended; ``clock`` is Unix time in seconds; without ``scaler``, nobody scales by
        load."""
        self._options, self._store, self._clock = options, store, clock
        self._kept = Kept(mode=options.controller, configured=options.controller)
        self._look_at = observe
        self._history = History()
        self._execution = Execution(options, actuators, self._observe, self._commit)
        self._problem: str | None = "it has just started"
        self._next_look_s = 0.0
        self._tally, self._scaler = Tally(), scaler
        self._one_at_a_time = asyncio.Lock()

    async def tick(self) -> None:
        """Do what there is to do now; to be called about once a second."""
        async with self._one_at_a_time:
            try:
                if self._store.claimed or await self._claim():
                    await self._work()
            except StoreError as error:
                # What cannot be saved must not be done; nor may anybody else be kept waiting.
                self._problem = str(error)
                await asyncio.to_thread(self._store.release)

    async def close(self) -> None:
        async with self._one_at_a_time:
            await asyncio.to_thread(self._store.release)

    async def _claim(self) -> bool:
        if not await asyncio.to_thread(self._store.claim):
            self._problem = "another controller acts; this one waits until that one is gone"
            return False
        kept, self._history = await asyncio.to_thread(self._store.load)
        configured = self._options.controller
        # An operator's switch holds until the configuration itself is changed.
        if kept is not None:
            changed = kept.configured != configured
            update: dict[str, object] = (
                {"mode": configured, "configured": configured} if changed else {}
            )
            # The time of day may have been set back since an earlier controller noted it.
            update["changed_at_s"] = min(kept.changed_at_s, self._clock())
            self._kept = kept.model_copy(update=update)
        self._problem = None
        return True

    async def _work(self) -> None:
        now_s = self._clock()
        if self._scaler is not None and self._scaler.has_models:
            await self._scale(self._scaler, now_s)
        running = self._history.running
        if running is not None:
            paused = self._kept.paused
            await self._execution.advance(self._history, running, now_s, paused=paused)
        elif self._kept.mode != "off" and now_s >= self._next_look_s:
            self._next_look_s = now_s + self._options.period_s
            await self._look(now_s)

    async def _scale(self, scaler: Scaler, now_s: float) -> None:
        """Replicas by load, whatever the mode is: it is about plans that even loads out."""
        changes = scaler.look(self._observe(), now_s, self._kept, self._history)
        if changes:
            events = [event for each in changes for event in each.events(now_s)]
            await self._save(scaler.kept(self._kept, now_s), self._history, events)
            scaler.carry_out(changes)

    async def _look(self, now_s: float) -> None:
        measured = self._observe()
        if measured.snapshot is None or measured.flaws(self._options):
            return
        snapshot, origin = measured.snapshot, Origin.CONTROLLER
        heat = classify(self._kept.heat, snapshot.loads, self._options)
        proposal = propose(snapshot, heat, self._history.corrections, self._options)
        self._tally.count_rejected(proposal)
        kept = self._kept.model_copy(update={"heat": heat})
        plan = plan_of(_new_id(), now_s, snapshot, proposal)
        waiting = self._history.waiting(origin)
        history, events = self._history, list[Event]()
        # A plan that a person reads keeps its id while it would be made again.
        if plan is None:
            history = history.withdraw(origin)
        elif waiting is None or not alike(plan, waiting):
            proposed = history.propose(plan, now_s)
            history, events = proposed.history, [proposed.event]
        chosen = history.waiting(origin)
        if chosen is not None and kept.mode == "auto" and not kept.paused:
            started = history.start(chosen.id, now_s)
            history, events = started.history, [*events, started.event]
        if (kept, history) != (self._kept, self._history):
            await self._save(kept, history, events)

    # What operators ask for

    async def make(self, actions: Sequence[Action] = (), *, forced: bool = False) -> MadePlan:
        """A plan of these actions, or without any the planner's own; it waits to be applied. Raises
        NotFound if an action names what is not there; Conflict if an action cannot be, or a plan
        runs; Unavailable if this controller does not act."""
        async with self._acting():
            now_s, measured = self._clock(), self._observe()
            flaws, snapshot = measured.flaws(self._options), measured.snapshot
            if snapshot is None or (flaws and not (actions and forced)):
                if actions:
                    advice = "wait, or force it" if snapshot else "it cannot be decided without"
                    raise Conflict(f"what is measured does not suffice: {listed(flaws)}; {advice}")
                return MadePlan(flaws=flaws)
            corrections = self._history.corrections
            if actions:
                proposal = manual(snapshot, actions, corrections, self._options, forced=forced)
            else:
                heat = at_once(snapshot.loads, self._options)
                proposal = propose(snapshot, heat, corrections, self._options)
                self._tally.count_rejected(proposal)
            plan = plan_of(_new_id(), now_s, snapshot, proposal, Origin.OPERATOR, forced=forced)
            if plan is not None:
                await self._commit(self._history.propose(plan, now_s))
            return MadePlan(
                plan=plan,
                flaws=flaws,
                rejected=proposal.rejected,
                rejected_by_reason=Counter(str(each.reason) for each in proposal.rejected),
            )

    async def apply(self, id_: str) -> Plan:
        """Begin to carry a plan out. Raises as :meth:`History.start`; Conflict if actions are
        paused; Unavailable if this controller does not act."""
        async with self._acting():
            if self._kept.paused:
                raise Conflict("actions are paused: resume them first")
            await self._commit(self._history.start(id_, self._clock()))
            return self._history.plan(id_)

    async def abort(self, id_: str) -> Plan:
        """Leave what a plan has not begun, and take back the action that is under way. Raises as
        :meth:`History.abort`; Unavailable if this controller does not act."""
        async with self._acting():
            await self._commit(self._history.abort(id_, self._clock()))
            return self._history.plan(id_)

    async def switch(self, mode: Mode | None, paused: bool | None) -> RebalancingState:
        """Change what is not None. Raises Unavailable if this controller does not act."""
        async with self._acting():
            wanted = {"mode": mode, "paused": paused}
            given = {name: value for name, value in wanted.items() if value is not None}
            kept = self._kept.model_copy(update=given)
            said = f"mode {kept.mode}, {'paused' if kept.paused else 'not paused'}"
            event = Event(at=self._clock(), kind=EventKind.SWITCHED, message=said)
            await self._save(kept, self._history, [event])
        return self.state()

    def plan(self, id_: str) -> Plan:
        """Raises NotFound if the id is unknown, or its plan was evicted from the history."""
        self._refuse_unless_acting()
        return self._history.plan(id_)

    def plans(self) -> tuple[Plan, ...]:
        """All that are remembered, the newest first."""
        self._refuse_unless_acting()
        return self._history.plans[::-1]

    async def events(self, limit: int) -> list[Event]:
        """The latest events, the newest first."""
        self._refuse_unless_acting()
        return await asyncio.to_thread(self._store.events, limit)

    def state(self) -> RebalancingState:
        measured = self._observe()
        running = self._history.running
        return RebalancingState(
            mode=self._kept.mode,
            paused=self._kept.paused,
            problem=self._problem,
            devices=device_loads(measured, self._kept.heat),
            flaws=measured.flaws(self._options),
            running=running.id if running else None,
            actions=self._tally.actions,
            rejected=self._tally.rejected,
            moved_bytes=self._tally.moved_bytes,
            paused_s=self._tally.paused_s,
            scaling=self._scaler.report if self._scaler else None,
        )

    # Saving

    async def _save(self, kept: Kept, history: History, events: Sequence[Event]) -> None:
        """Only what was saved counts."""
        await asyncio.to_thread(self._store.save, kept, history, events)
        self._kept, self._history = kept, history

    async def _commit(self, transition: Transition) -> None:
        history, event = transition.history, transition.event
        changes = {"changed_at_s": event.at} if transition.changes_loads else {}
        await self._save(self._kept.model_copy(update=changes), history, [event])
        self._tally.count_event(event, history)

    def _observe(self) -> Measured:
        return self._look_at(self._kept.changed_at_s)

    def _refuse_unless_acting(self) -> None:
        if not self._store.claimed:
            raise Unavailable(f"plans cannot be made: {self._problem}", retry_after_s=5)

    @asynccontextmanager
    async def _acting(self) -> AsyncIterator[None]:
        """One wish at a time, of a controller that acts; what cannot be saved is unavailable."""
        async with self._one_at_a_time:
            self._refuse_unless_acting()
            try:
                yield
            except StoreError as error:
                raise Unavailable(str(error), retry_after_s=5) from None


def _new_id() -> str:
    return f"plan-{secrets.token_hex(4)}"


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
