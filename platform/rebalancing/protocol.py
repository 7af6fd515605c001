"""A migration's transitions: a pure function of its state and an event, which never fails.

The paper says that weights and KV move together and that steps then go on (section 4.3.1), but not
how; this is how. The point of no return is where steps go on with the destination. Up to there the
origin's copy is whole, for no step runs between the last copy and then, and trouble rolls back.
From there on the way back is a migration of its own. KV is lost only with the side that owns it,
tokens never: the engine and the gateway have them, and what lost its KV is computed again.

The caller saves the new state before it sends the commands. After a restart it takes the saved
state and calls :func:`resume`.
"""

from __future__ import annotations

from loomserve.platform.rebalancing.migration import (
    Abort,
    Command,
    Died,
    Do,
    Done,
    Event,
    Failed,
    Migration,
    Party,
    Phase,
    Side,
    Start,
    Tick,
    Why,
)

Commands = tuple[Command, ...]
Next = tuple[Migration, Commands]
_Order = tuple[Do, Party]

_REVERSIBLE = frozenset({Phase.PREPARING, Phase.PAUSED, Phase.SWITCHED})
_PAUSED = frozenset({Phase.PAUSED, Phase.SWITCHED})


def transition(state: Migration, event: Event) -> Next:
    """The next state, and the commands to send; an event that means nothing there changes nothing.

    Args:
        state: Which has ended or not.
        event: Late and repeated ones included.
    """
    if state.ended:
        return state, ()
    match event:
        case Start():
            return _start(state, event.at_s)
        case Done():
            return _done(state, event)
        case Failed():
            return _failed(state, event)
        case Died():
            return _died(state, event.side, event.at_s)
        case Abort():
            return _abort(state, event.at_s)
        case Tick():
            return _tick(state, event.at_s)


def resume(state: Migration, at_s: float) -> Next:
    """After a restart: what has not been answered is asked for again, and has its time again."""
    state = _update(state, deadline_s=_deadline(state, at_s) if state.awaiting else None)
    return state, state.awaiting


def _start(state: Migration, at_s: float) -> Next:
    if state.phase is not Phase.PLANNED:
        return state, ()
    return _ask(state, Phase.PREPARING, at_s, (Do.RESERVE, state.destination))


def _done(state: Migration, event: Done) -> Next:
    answered = _awaited(state, event.do, event.by, event.step)
    # Of a fence only the death counts.
    if answered is None or event.do is Do.FENCE:
        return state, ()
    return _without(state, (answered,), event.at_s, event.left_bytes)


def _failed(state: Migration, event: Failed) -> Next:
    failed = _awaited(state, event.do, event.by, event.step)
    if failed is None or event.do is Do.FENCE:
        return state, ()
    if _reversible(state):
        return _roll_back(state, event.why, event.at_s)
    if event.do is Do.FREE:
        # The part's memory stays unused until the engine lays its KV out the next time.
        return _without(_blame(state, event.why), (failed,), event.at_s)
    # Asked for again when its time is up, like no answer.
    return _blame(state, event.why), ()


def _died(state: Migration, side: Side, at_s: float) -> Next:
    if side in state.dead:
        return state, ()
    why = Why.ENGINE_DIED if side is Party.ENGINE else Why.LENDER_DIED
    state = _update(state, dead=state.dead | {side})
    if state.phase is Phase.PLANNED:
        return _end(_blame(state, why), Phase.ABORTED)
    if side is Party.ENGINE:
        requeue = _living(state, (Do.REQUEUE, Party.GATEWAY), (Do.RELEASE, Party.LENDER))
        return _ask(_blame(state, why), Phase.ABANDONING, at_s, *requeue)
    if side is state.destination and _reversible(state):
        return _roll_back(state, why, at_s)
    if state.owner is side and state.phase is not Phase.ABANDONING:
        state = _owned_by(_blame(state, why), Party.ENGINE)
        return _ask(state, Phase.RECOMPUTING, at_s, (Do.RECOMPUTE, Party.ENGINE))
    to_dead = tuple(each for each in state.awaiting if each.to is side)
    return _without(state, to_dead, at_s) if to_dead else (state, ())


def _abort(state: Migration, at_s: float) -> Next:
    if state.phase is Phase.PLANNED:
        return _end(_blame(state, Why.OPERATOR), Phase.ABORTED)
    if _reversible(state):
        return _roll_back(state, Why.OPERATOR, at_s)
    return state, ()


def _tick(state: Migration, at_s: float) -> Next:
    if state.deadline_s is None or at_s < state.deadline_s:
        return state, ()
    if _reversible(state):
        return _roll_back(state, Why.TIMED_OUT, at_s)
    state = _update(state, tries=min(state.tries + 1, state.rules.tries))
    state = _update(state, deadline_s=_deadline(state, at_s))
    if state.tries < state.rules.tries:
        return state, state.awaiting
    return _fence(state)


def _fence(state: Migration) -> Next:
    """Sides that stay silent are killed; nothing waits for them for ever, and none acts late."""
    sides = {each.to for each in state.awaiting} - {Party.GATEWAY}
    rest = tuple(each for each in state.awaiting if each.to is Party.GATEWAY)
    fences = (_command(state, Do.FENCE, side) for side in sorted(sides))
    state = _update(state, awaiting=(*rest, *fences))
    return state, state.awaiting


def _reversible(state: Migration) -> bool:
    """Once the destination owns the KV and the origin is dead, the only way is forward."""
    return state.phase in _REVERSIBLE and (
        state.owner is state.origin or state.origin not in state.dead
    )


def _roll_back(state: Migration, why: Why, at_s: float) -> Next:
    state = _owned_by(_blame(state, why), state.origin)
    orders = _living(state, (Do.RESUME, Party.ENGINE), (Do.RELEASE, state.destination))
    return _ask(state, Phase.ROLLING_BACK, at_s, *orders)


def _without(state: Migration, answered: Commands, at_s: float, left_bytes: int = 0) -> Next:
    """``answered`` are no longer awaited; if nothing else is, the next phase begins."""
    rest = tuple(each for each in state.awaiting if each not in answered)
    state = _update(state, awaiting=rest)
    if rest:
        return state, ()
    match state.phase:
        case Phase.PREPARING:
            return _next_round(state, answered[0].do, left_bytes, at_s)
        case Phase.PAUSED:
            state = _owned_by(state, state.destination)
            return _ask(state, Phase.SWITCHED, at_s, (Do.ACTIVATE, state.destination))
        case Phase.SWITCHED:
            orders = _living(state, (Do.RESUME, Party.ENGINE), (Do.FREE, state.origin))
            return _ask(state, Phase.CLEANING, at_s, *orders)
        case Phase.CLEANING:
            return _end(state, Phase.DONE)
        case Phase.ROLLING_BACK:
            return _end(state, Phase.ABORTED)
        case Phase.RECOMPUTING:
            return _end(state, Phase.RECOMPUTED)
        case _:
            return _end(state, Phase.ABANDONED)


def _next_round(state: Migration, done: Do, left_bytes: int, at_s: float) -> Next:
    if done is Do.COPY and left_bytes <= state.rules.pause_bytes:
        return _ask(state, Phase.PAUSED, at_s, (Do.FLUSH, Party.ENGINE))
    if state.round >= state.rules.most_rounds:
        return _roll_back(state, Why.PAUSE_TOO_LONG, at_s)
    state = _update(state, round=state.round + 1)
    return _ask(state, Phase.PREPARING, at_s, (Do.COPY, Party.ENGINE))


def _living(state: Migration, *orders: _Order) -> tuple[_Order, ...]:
    return tuple(order for order in orders if order[1] not in state.dead)


def _ask(state: Migration, phase: Phase, at_s: float, *orders: _Order) -> Next:
    state = _update(state, phase=phase, step=state.step + 1, tries=0)
    state = _update(state, awaiting=tuple(_command(state, *order) for order in orders))
    state = _update(state, deadline_s=_deadline(state, at_s))
    return state, state.awaiting


def _end(state: Migration, phase: Phase) -> Next:
    return _update(state, phase=phase, awaiting=(), deadline_s=None), ()


def _awaited(state: Migration, do: Do, by: Party, step: int) -> Command | None:
    wanted = (do, by, step)
    return next((x for x in state.awaiting if (x.do, x.to, x.step) == wanted), None)


def _command(state: Migration, do: Do, to: Party) -> Command:
    return Command(
        migration=state.id, do=do, to=to, step=state.step, epoch=state.epoch, owner=state.owner
    )


def _owned_by(state: Migration, owner: Side) -> Migration:
    changes = state.owner is not owner
    return _update(state, owner=owner, epoch=state.epoch + changes)


def _blame(state: Migration, why: Why) -> Migration:
    return state if state.why is not None else _update(state, why=why)


def _deadline(state: Migration, at_s: float) -> float:
    rules = state.rules
    return at_s + (rules.pause_s if state.phase in _PAUSED else rules.answer_s)


def _update(state: Migration, **changes: object) -> Migration:
    return state.model_copy(update=changes)
