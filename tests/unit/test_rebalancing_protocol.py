"""A migration's protocol: every state with every event, and a model check with both its sides.

The model check's network loses, repeats and reorders messages at will: what was once sent may
arrive at any later time, any number of times, or never.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

import pytest

from loomserve.platform.rebalancing.actions import Move
from loomserve.platform.rebalancing.migration import (
    ENDS,
    Abort,
    Died,
    Do,
    Done,
    Event,
    Failed,
    Migration,
    Party,
    Phase,
    Rules,
    Start,
    Tick,
    Why,
    planned,
)
from loomserve.platform.rebalancing.protocol import resume, transition
from loomserve.platform.rebalancing.snapshot import Part

RULES = Rules(most_rounds=1, pause_bytes=100, answer_s=1, pause_s=1, tries=2)
LARGE = 101
NOW = 0.0


def migration(back: bool) -> Migration:
    move = Move(part=Part.HEADS, engine="hot", lender="cold", amount=1, back=back)
    return planned("m1", move, RULES)


def after(state: Migration, event: Event) -> Migration:
    """With the deadline put back to 1, for only its being passed or not matters."""
    following, _ = transition(state, event)
    return state if following is state else normal(following)


def normal(state: Migration) -> Migration:
    overdue = None if state.deadline_s is None else 1.0
    return state.model_copy(update={"deadline_s": overdue})


@cache
def events(step: int) -> tuple[Event, ...]:
    """All there are; answers to the step, and to the one before."""
    answers: list[Event] = []
    for at in (step - 1, step):
        for do, by in product(Do, Party):
            answers += [
                Done(at_s=NOW, do=do, by=by, step=at),
                Failed(at_s=NOW, do=do, by=by, step=at, why=Why.OUT_OF_MEMORY),
            ]
        copied = Done(at_s=NOW, do=Do.COPY, by=Party.ENGINE, step=at)
        answers.append(copied.model_copy(update={"left_bytes": LARGE}))
    return (
        Start(at_s=NOW),
        Abort(at_s=NOW),
        Tick(at_s=NOW),
        Tick(at_s=1.0),
        Died(at_s=NOW, side=Party.ENGINE),
        Died(at_s=NOW, side=Party.LENDER),
        *answers,
    )


@cache
def reachable(back: bool) -> dict[Migration, list[tuple[Event, Migration]]]:
    """States, and of each the events that change it."""
    first = migration(back)
    graph: dict[Migration, list[tuple[Event, Migration]]] = {first: []}
    open_ = [first]
    while open_:
        state = open_.pop()
        for event in events(state.step):
            following = after(state, event)
            if following is state:
                continue
            graph[state].append((event, following))
            if following not in graph:
                graph[following] = []
                open_.append(following)
    return graph


def served(state: Migration) -> Migration:
    """The end it comes to if all that still live do as they are told."""
    for _ in range(50):
        if state.ended:
            return state
        command = state.awaiting[0]
        if command.do is Do.FENCE:
            assert command.to is not Party.GATEWAY
            state = after(state, Died(at_s=NOW, side=command.to))
        else:
            state = after(state, Done(at_s=NOW, do=command.do, by=command.to, step=state.step))
    raise AssertionError(f"no end from {state}")


@pytest.mark.parametrize("back", [False, True])
def test_every_state_takes_every_event_and_all_phases_are_reached(back: bool) -> None:
    phases = {state.phase for state in reachable(back)}
    assert phases == set(Phase)
    for state, changes in reachable(back).items():
        assert state.owner in (Party.ENGINE, Party.LENDER)
        assert bool(state.awaiting) is (state.phase not in ENDS | {Phase.PLANNED})
        assert (state.deadline_s is not None) is bool(state.awaiting)
        assert all(command.step == state.step for command in state.awaiting)
        assert not {command.to for command in state.awaiting} & state.dead
        assert bool(changes) is not state.ended
        for _, following in changes:
            # A side of an older epoch is known by it.
            assert following.epoch - state.epoch == (following.owner is not state.owner)


@pytest.mark.parametrize("back", [False, True])
def test_late_answers_and_repeated_events_change_nothing(back: bool) -> None:
    for state, changes in reachable(back).items():
        for event, following in changes:
            if isinstance(event, Done | Failed):
                assert event.step == state.step
            if not isinstance(event, Tick):
                assert transition(following, event) == (following, ())


@pytest.mark.parametrize("back", [False, True])
def test_an_abort_or_a_death_in_any_state_leads_to_a_safe_end(back: bool) -> None:
    for state, changes in reachable(back).items():
        for event, following in changes:
            if not isinstance(event, Abort | Died) or state.phase is Phase.PLANNED:
                continue
            end = served(following)
            if Party.ENGINE in end.dead:
                assert end.phase is Phase.ABANDONED
            else:
                assert end.owner not in end.dead


@pytest.mark.parametrize("back", [False, True])
def test_silence_in_any_state_leads_to_an_end_by_killing_who_is_silent(back: bool) -> None:
    for state in reachable(back):
        for _ in range(20):
            for command in state.awaiting:
                if command.to is Party.GATEWAY:
                    done = Done(at_s=NOW, do=command.do, by=command.to, step=state.step)
                    state = after(state, done)
                elif command.do is Do.FENCE:
                    state = after(state, Died(at_s=NOW, side=command.to))
            state = after(state, Tick(at_s=1.0))
        assert state.ended or state.phase is Phase.PLANNED


@pytest.mark.parametrize("back", [False, True])
def test_a_saved_state_says_after_a_restart_what_it_said_before(back: bool) -> None:
    for state in reachable(back):
        loaded = Migration.model_validate_json(state.model_dump_json())
        assert loaded == state
        resumed, commands = resume(loaded, NOW)
        assert commands == state.awaiting
        assert resume(resumed, NOW) == (resumed, commands)
        assert normal(resumed) == state


class Engine(NamedTuple):
    alive: bool = True
    running: bool = True
    copy: str = "none"  # of the part's KV: whole, partial (or stale), none
    uses: Party = Party.ENGINE
    epoch: int = 0
    seen: int = 0
    did: frozenset[Do] = frozenset()
    """In the step that it has seen last."""


class Lender(NamedTuple):
    alive: bool = True
    copy: str = "none"
    active: int | None = None
    seen: int = 0
    did: frozenset[Do] = frozenset()


Key = tuple[object, ...]
"""An event without its time."""


def key(event: Event) -> Key:
    match event:
        case Done():
            return "done", event.do, event.by, event.step, event.left_bytes > 0
        case Failed():
            return "failed", event.do, event.by, event.step
        case Died():
            return "died", event.side
        case Tick():
            return "tick", event.at_s > NOW
        case _:
            return (event.event,)


class Told(NamedTuple):
    """A command, without what all have in common."""

    do: Do
    to: Party
    step: int
    epoch: int
    owner: Party


class Controller(NamedTuple):
    """Its states by number, for a state is slow to hash."""

    states: tuple[Migration, ...]
    awaiting: tuple[frozenset[Told], ...]
    changes: tuple[dict[Key, int], ...]


@cache
def controller(back: bool) -> Controller:
    graph = reachable(back)
    number = {state: at for at, state in enumerate(graph)}
    return Controller(
        tuple(graph),
        tuple(
            frozenset(Told(x.do, x.to, x.step, x.epoch, x.owner) for x in state.awaiting)
            for state in graph
        ),
        tuple({key(event): number[to] for event, to in changes} for changes in graph.values()),
    )


class World(NamedTuple):
    state: int
    engine: Engine
    lender: Lender
    requeued: bool = False
    recomputed: bool = False
    failures: int = 0
    commands: frozenset[Told] = frozenset()
    answers: frozenset[Key] = frozenset()


class Model:
    """All that may happen to one migration."""

    def __init__(self, back: bool) -> None:
        self.controller = controller(back)
        self.origin = Party.LENDER if back else Party.ENGINE
        self.destination = Party.ENGINE if back else Party.LENDER

    def first(self) -> World:
        """An engine that fails at nothing, or once."""
        if self.origin is Party.LENDER:
            engine = Engine(copy="none", uses=Party.LENDER)
            return World(0, engine, Lender(copy="whole", active=0), failures=1)
        return World(0, Engine(copy="whole"), Lender(), failures=1)

    def following(self, world: World) -> Iterator[World]:
        if not self.controller.states[world.state].ended:
            for event in (("start",), ("abort",), ("tick", True), *world.answers):
                yield self.controlled(world, event)
            for side in (Party.ENGINE, Party.LENDER):
                yield killed(world, side)
        for command in world.commands:
            yield from self.delivered(world, command)
        if world.engine.running:
            yield stepped(world)

    def controlled(self, world: World, event: Key) -> World:
        state = self.controller.changes[world.state].get(event)
        if state is None:
            return world
        step = self.controller.states[state].step
        # Only deaths outlive a step: test_late_answers shows that other answers mean nothing.
        answers = (each for each in world.answers if each[0] == "died" or each[3] == step)
        return tidy(
            world._replace(
                state=state,
                commands=self.controller.awaiting[state] | world.commands,
                answers=frozenset(answers),
            )
        )

    def delivered(self, world: World, command: Told) -> Iterator[World]:
        """What may follow of it, once; a failure may leave a flush half done."""
        if command.do is Do.FENCE:
            yield killed(world, command.to)
            return
        done: Key = ("done", command.do, command.to, command.step, False)
        if command.to is Party.GATEWAY:
            yield world._replace(requeued=True, answers=world.answers | {done})
            return
        side = world.engine if command.to is Party.ENGINE else world.lender
        if not side.alive or command.step < side.seen:
            return
        did = side.did if command.step == side.seen else frozenset()
        if command.do in did:
            return  # its answer is under way already
        if command.to is Party.ENGINE:
            engine = world.engine._replace(seen=command.step, did=did | {command.do})
            told = world._replace(engine=engine)
        else:
            lender = world.lender._replace(seen=command.step, did=did | {command.do})
            told = world._replace(lender=lender)
        refused = command.do in (Do.COPY, Do.FLUSH) and (
            not world.lender.alive or world.lender.seen > command.step
        )
        if refused or (world.failures and command.do not in (Do.RESUME, Do.RELEASE, Do.RECOMPUTE)):
            failed: Key = ("failed", command.do, command.to, command.step)
            left = told._replace(
                failures=world.failures - (not refused), answers=told.answers | {failed}
            )
            if command.do is Do.FLUSH:
                left = left._replace(engine=left.engine._replace(running=False))
            yield tidy(left)
        if refused:
            return
        after = self.carried_out(told, command)
        yield tidy(after._replace(answers=after.answers | {done}))
        if command.do is Do.COPY:
            yield tidy(after._replace(answers=after.answers | {(*done[:4], True)}))

    def carried_out(self, world: World, command: Told) -> World:
        """What the party that is told does; its contract is in the docstring of Command."""
        engine, lender = world.engine, world.lender
        match command.do:
            case Do.COPY:
                return copied(world, self.destination, "partial")
            case Do.FLUSH:
                world = world._replace(engine=engine._replace(running=False))
                return copied(world, self.destination, "whole")
            case Do.ACTIVATE if command.to is Party.LENDER:
                return world._replace(lender=lender._replace(active=command.epoch))
            case Do.RESUME:
                runs = engine._replace(running=True, uses=command.owner, epoch=command.epoch)
                world = world._replace(engine=runs)
                if command.owner is Party.LENDER and lender.alive:
                    # The first task of a newer epoch tells a lender that it is the owner again.
                    world = world._replace(lender=lender._replace(active=command.epoch))
                return world
            case Do.FREE:
                return copied(world, self.origin, "none")
            case Do.RELEASE if command.to is Party.LENDER:
                return world._replace(lender=lender._replace(copy="none", active=None))
            case Do.RELEASE:
                return copied(world, self.destination, "none")
            case Do.RECOMPUTE:
                again = engine._replace(
                    running=True, uses=Party.ENGINE, epoch=command.epoch, copy="whole"
                )
                return world._replace(engine=again, recomputed=True)
            case _:
                return world

    def check(self, world: World) -> None:
        state, engine, lender = self.controller.states[world.state], world.engine, world.lender
        copies = {Party.ENGINE: engine.copy, Party.LENDER: lender.copy}
        alive = {Party.ENGINE: engine.alive, Party.LENDER: lender.alive}
        lossy = {Phase.RECOMPUTING, Phase.RECOMPUTED, Phase.ABANDONING, Phase.ABANDONED}
        if state.phase not in lossy and engine.alive and alive[state.owner]:
            assert copies[state.owner] == "whole", world
        assert not (world.recomputed and lender.alive), world
        if state.phase is Phase.ABANDONED:
            assert world.requeued, world
            assert lender.copy == "none", world
        elif state.ended and engine.alive and state.step:
            other = Party.LENDER if state.owner is Party.ENGINE else Party.ENGINE
            assert engine.running, world
            assert (engine.uses, engine.epoch) == (state.owner, state.epoch), world
            # A free that failed says so; nothing else is left behind.
            assert copies[other] == "none" or state.why is Why.OUT_OF_MEMORY, world


def tidy(world: World) -> World:
    """Without commands that nobody takes any more."""
    sides: dict[Party, Engine | Lender] = {
        Party.ENGINE: world.engine,
        Party.LENDER: world.lender,
    }
    live = (
        each
        for each in world.commands
        if each.to is Party.GATEWAY
        or (sides[each.to].alive and (each.do is Do.FENCE or each.step >= sides[each.to].seen))
    )
    return world._replace(commands=frozenset(live))


def killed(world: World, side: Party) -> World:
    if side is Party.ENGINE:
        world = world._replace(engine=Engine(alive=False, running=False))
    else:
        world = world._replace(lender=Lender(alive=False))
    return tidy(world._replace(answers=world.answers | {("died", side)}))


def copied(world: World, to: Party, copy: str) -> World:
    if to is Party.ENGINE:
        return world._replace(engine=world.engine._replace(copy=copy))
    return world._replace(lender=world.lender._replace(copy=copy))


def stepped(world: World) -> World:
    """The engine generates a token: it must read the owner's whole copy, and adds to it alone."""
    engine, lender = world.engine, world.lender
    if engine.uses is Party.ENGINE:
        assert engine.copy == "whole", world
        return copied(world, Party.LENDER, "partial") if lender.copy == "whole" else world
    if lender.alive:
        assert lender.copy == "whole", world
        assert lender.active == engine.epoch, world
    return copied(world, Party.ENGINE, "partial") if engine.copy == "whole" else world


@pytest.mark.parametrize("back", [False, True])
def test_with_messages_lost_repeated_and_late_no_token_is_lost_and_no_copy_left(back: bool) -> None:
    model = Model(back)
    start = model.first()
    before: dict[World, list[World]] = {start: []}
    open_ = [start]
    while open_:
        world = open_.pop()
        model.check(world)
        for successor in model.following(world):
            if successor not in before:
                before[successor] = []
                open_.append(successor)
            before[successor].append(world)
    # From every world there is a way to an end.
    leads = [world for world in before if model.controller.states[world.state].ended]
    ends = set(leads)
    while leads:
        for earlier in before[leads.pop()]:
            if earlier not in ends:
                ends.add(earlier)
                leads.append(earlier)
    assert len(ends) == len(before)
