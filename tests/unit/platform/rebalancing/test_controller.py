"""The controller over fleets that are made up: restarts, rivals, stale data, aborts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from loomserve.platform.base.errors import Conflict, NotFound, Unavailable
from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.rebalancing.actuators.base import ActionOutcome, Actuator
from loomserve.platform.rebalancing.controller import Rebalancer
from loomserve.platform.rebalancing.plans.history import History
from loomserve.platform.rebalancing.plans.plans import Origin, PlanStatus, StepStatus
from loomserve.platform.rebalancing.plans.reports import EventKind, Kept
from loomserve.platform.rebalancing.plans.store import PlanStore, StoreError, SupersededError
from loomserve.platform.rebalancing.policy.actions import Action, ActionKind, AddReplica, Move
from loomserve.platform.rebalancing.policy.limits import Reason
from loomserve.platform.rebalancing.policy.measured import Unfit
from loomserve.platform.rebalancing.policy.snapshot import MoveKind
from tests.unit.platform.rebalancing.actuators.written import Platform, WrittenActuator
from tests.unit.platform.rebalancing.fleets import MIB, fleet

pytestmark = pytest.mark.anyio

AUTO = Rebalancing(controller="auto", confirm_periods=1, settle_s=20.0)
HOT, COLD = "m0", "m1"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Bench:
    folder: Path
    platform: Platform
    actuator: WrittenActuator

    def new(self, options: Rebalancing = AUTO) -> Rebalancer:
        actuators: dict[ActionKind, Actuator[Any]] = dict.fromkeys(ActionKind, self.actuator)
        return Rebalancer(
            options, PlanStore(self.folder), self.platform.observe, actuators, self.platform.clock
        )

    @asynccontextmanager
    async def running(self, options: Rebalancing = AUTO) -> AsyncIterator[Rebalancer]:
        """A controller that acts."""
        controller = self.new(options)
        await controller.tick()
        try:
            yield controller
        finally:
            await controller.close()

    async def until(
        self, controller: Rebalancer, done: Callable[[], bool], most_s: float = 400.0
    ) -> None:
        deadline = self.platform.now_s + most_s
        while not done():
            assert self.platform.now_s < deadline
            self.platform.now_s += 1.0
            await controller.tick()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    platform = Platform(fleet([(0.9, 0.8), (0.1, 0.1)]))
    return Bench(tmp_path / "plans", platform, WrittenActuator(platform))


def move(amount: int = 64 * MIB, engine: str = HOT, lender: str = COLD) -> Move:
    return Move(kind=MoveKind.REQUESTS, engine=engine, lender=lender, amount=amount)


async def applied(bench: Bench, controller: Rebalancer, *actions: Action) -> str:
    made = await controller.make(actions or (move(),))
    assert made.plan is not None
    await controller.apply(made.plan.id)
    return made.plan.id


OFF = AUTO.model_copy(update={"controller": "off"})


async def test_auto_evens_the_loads_out_measures_what_it_gained_and_then_rests(
    bench: Bench,
) -> None:
    loads = bench.platform.snapshot.loads
    async with bench.running() as controller:
        await bench.until(controller, lambda: bool(controller.plans()))
        (plan,) = controller.plans()
        assert plan.origin is Origin.CONTROLLER
        await bench.until(controller, lambda: controller.plans()[0].status is PlanStatus.DONE)
        (plan,) = controller.plans()
        after = bench.platform.snapshot.loads
        assert max(after.values()) - min(after.values()) <= AUTO.falling
        assert plan.real_gain == pytest.approx(plan.predicted.gain, rel=1e-3)
        for step in plan.steps:
            assert step.real is not None
            assert step.real.pause_s == step.paused_s == 0.25
        assert plan.steps[0].loads_before == pytest.approx(loads)
        assert plan.steps[-1].loads_after == pytest.approx(after)
        told = len(bench.actuator.told)
        for _ in range(200):
            bench.platform.now_s += 1
            await controller.tick()
        assert len(bench.actuator.told) == told == len(plan.steps)
        done = [e for e in await controller.events(100) if e.kind is EventKind.DONE]
        assert len(done) == len(plan.steps)
        assert all(event.loads_before and event.loads_after for event in done)
        state = controller.state()
        assert sum(each.count for each in state.actions) == len(plan.steps)
        assert (sum(state.moved_bytes.values()), state.paused_s) == (7 * told, 0.25 * told)


async def test_advise_keeps_one_plan_for_a_person_until_the_loads_ask_for_another(
    bench: Bench,
) -> None:
    advise = AUTO.model_copy(update={"controller": "advise"})
    async with bench.running(advise) as controller:
        await bench.until(controller, lambda: bool(controller.plans()))
        (plan,) = controller.plans()
        for _ in range(50):
            bench.platform.now_s += 1
            await controller.tick()
        assert [each.id for each in controller.plans()] == [plan.id]
        assert not bench.actuator.told
        bench.platform.snapshot = fleet([(0.5, 0.5), (0.5, 0.5)])
        await bench.until(
            controller, lambda: controller.plan(plan.id).status is PlanStatus.REPLACED
        )
        with pytest.raises(Conflict):
            await controller.apply(plan.id)


async def test_off_looks_at_nothing_and_a_dry_run_tells_all_the_same(bench: Bench) -> None:
    bench.platform.snapshot = fleet([(0.9, 0.8), (0.1, 0.1)], frozenset({MoveKind.REQUESTS}))
    async with bench.running(OFF) as controller:
        for _ in range(50):
            bench.platform.now_s += 1
            await controller.tick()
        assert not controller.plans()
        made = await controller.make()
        assert made.plan is not None
        assert made.plan.predicted.gain > 0
        assert sum(made.rejected_by_reason.values()) == len(made.rejected) > 0
        assert not bench.actuator.told
        assert controller.state().rejected == made.rejected_by_reason


@pytest.mark.parametrize("at", ["begun", "settling"])
async def test_a_controller_that_is_started_anew_goes_on_in_the_middle_of_a_plan(
    bench: Bench, at: str
) -> None:
    bench.actuator.outcome = ActionOutcome.RUNNING
    async with bench.running(OFF) as first:
        id_ = await applied(bench, first)
        await bench.until(first, lambda: bool(bench.actuator.told))
        if at == "settling":
            bench.actuator.outcome = ActionOutcome.DONE
            await bench.until(first, lambda: first.plan(id_).steps[0].status is StepStatus.SETTLING)
    told = len(bench.actuator.told)
    async with bench.running(OFF) as second:
        assert second.plan(id_).status is PlanStatus.RUNNING
        bench.actuator.outcome = ActionOutcome.DONE
        await bench.until(second, lambda: second.plan(id_).status is PlanStatus.DONE)
        # A actuator is told again what it may not have heard, and nothing that it has done.
        assert len(bench.actuator.told) - told == (at == "begun")
        assert second.plan(id_).real_gain is not None


async def test_of_two_controllers_one_acts_and_the_other_takes_over_once_it_is_gone(
    bench: Bench,
) -> None:
    first, second = bench.new(), bench.new()
    await first.tick()
    for _ in range(30):
        bench.platform.now_s += 1
        await second.tick()
    assert not bench.actuator.told
    assert "another controller" in (second.state().problem or "")
    for wish in (second.make(), second.apply("plan-1"), second.switch("off", None)):
        with pytest.raises(Unavailable, match="another controller"):
            await wish
    await first.close()
    await second.tick()
    assert second.state().problem is None
    await bench.until(second, lambda: bool(bench.actuator.told))
    with pytest.raises(Unavailable):
        await first.make()
    await second.close()


async def test_one_that_was_succeeded_without_noticing_can_save_and_begin_nothing(
    bench: Bench,
) -> None:
    async with bench.running(OFF) as controller:
        id_ = await applied(bench, controller)
        other = PlanStore(bench.folder)
        other._lock = FileLock(bench.folder / "elsewhere.lock")
        assert other.claim(), "its file system has lost the lock"
        other.release()
        bench.platform.now_s += 1
        await controller.tick()
        assert not bench.actuator.told
        assert "another controller" in (controller.state().problem or "")
        await controller.tick()
        # It has taken over again, lawfully, and goes on.
        assert controller.plan(id_).status is PlanStatus.RUNNING


@pytest.mark.parametrize("mode", ["auto", "advise"])
async def test_nothing_is_decided_on_stale_data(bench: Bench, mode: str) -> None:
    bench.platform.age_s = AUTO.stale_after_s + 1
    async with bench.running(AUTO.model_copy(update={"controller": mode})) as controller:
        for _ in range(50):
            bench.platform.now_s += 1
            await controller.tick()
        assert not controller.plans()
        assert {flaw.why for flaw in controller.state().flaws} == {Unfit.STALE}
        made = await controller.make()
        assert made.plan is None
        assert {flaw.why for flaw in made.flaws} == {Unfit.STALE}
        with pytest.raises(Conflict, match="force"):
            await controller.make((move(),))
        assert (await controller.make((move(),), forced=True)).plan is not None


async def test_a_plan_whose_turn_comes_when_nothing_is_known_waits_and_then_fails(
    bench: Bench,
) -> None:
    async with bench.running(OFF) as controller:
        id_ = await applied(bench, controller)
        bench.platform.age_s = 1000.0
        await bench.until(controller, lambda: controller.plan(id_).status is PlanStatus.FAILED)
        assert not bench.actuator.told
        assert "stale" in controller.plan(id_).steps[0].message


async def test_what_cannot_be_measured_after_an_action_teaches_nothing(bench: Bench) -> None:
    async with bench.running(OFF) as controller:
        id_ = await applied(bench, controller)
        await bench.until(controller, lambda: bool(bench.actuator.told))
        bench.platform.age_s = 1000.0
        await bench.until(controller, lambda: controller.plan(id_).status is PlanStatus.DONE)
        (step,) = controller.plan(id_).steps
        assert step.real is None
        assert not controller._history.corrections.factors


async def test_an_abort_takes_back_what_is_under_way_and_leaves_the_rest(bench: Bench) -> None:
    bench.actuator.outcome = ActionOutcome.RUNNING
    async with bench.running(OFF) as controller:
        id_ = await applied(bench, controller, move(), move(engine=HOT, amount=MIB))
        await bench.until(controller, lambda: bool(bench.actuator.told))
        assert (await controller.abort(id_)).status is PlanStatus.ABORTING
        with pytest.raises(Conflict):
            await controller.abort(id_)
        with pytest.raises(Conflict, match=id_):
            await controller.make()
        await bench.until(controller, lambda: controller.plan(id_).status is PlanStatus.CANCELLED)
        assert [step.status for step in controller.plan(id_).steps] == [
            StepStatus.ABORTED,
            StepStatus.LEFT,
        ]
        assert bench.actuator.told == ["begin move", "abort"]
        kinds = [event.kind for event in await controller.events(10)]
        assert kinds.count(EventKind.ABORTED) == 2


async def test_an_abort_goes_on_after_a_restart(bench: Bench) -> None:
    bench.actuator.outcome = ActionOutcome.RUNNING
    async with bench.running(OFF) as first:
        id_ = await applied(bench, first)
        await bench.until(first, lambda: bool(bench.actuator.told))
        await first.abort(id_)
    async with bench.running(OFF) as second:
        await bench.until(second, lambda: second.plan(id_).status is PlanStatus.CANCELLED)
        assert bench.actuator.told == ["begin move", "abort"]


async def test_an_abort_that_comes_too_late_lets_the_action_stand_and_measures_it(
    bench: Bench,
) -> None:
    bench.actuator.outcome, bench.actuator.too_late = ActionOutcome.RUNNING, True
    async with bench.running(OFF) as controller:
        id_ = await applied(bench, controller, move(), move(amount=MIB))
        await bench.until(controller, lambda: bool(bench.actuator.told))
        await controller.abort(id_)
        bench.actuator.outcome = ActionOutcome.DONE
        await bench.until(controller, lambda: controller.plan(id_).status is PlanStatus.CANCELLED)
        first, second = controller.plan(id_).steps
        assert (first.status, second.status) == (StepStatus.DONE, StepStatus.LEFT)
        assert first.real is not None


async def test_a_plan_that_has_not_begun_is_aborted_at_once(bench: Bench) -> None:
    async with bench.running(OFF) as controller:
        made = await controller.make((move(),))
        assert made.plan is not None
        assert (await controller.abort(made.plan.id)).status is PlanStatus.CANCELLED
        with pytest.raises(Conflict, match="cancelled"):
            await controller.apply(made.plan.id)
        with pytest.raises(NotFound):
            await controller.abort("plan-of-nobody")


async def test_an_actuator_that_refuses_breaks_or_fails_ends_the_plan_and_says_why(
    bench: Bench,
) -> None:
    async with bench.running(OFF) as controller:
        for changes, said in (
            ({"refuses": "no store"}, "no store"),
            ({"breaks": True}, "the engine is gone"),
            ({"outcome": ActionOutcome.FAILED}, "as told"),
        ):
            actuator = replace(bench.actuator, told=[], **changes)  # type: ignore[arg-type]
            controller._execution._actuators = dict.fromkeys(ActionKind, actuator)
            id_ = await applied(bench, controller)
            await bench.until(controller, lambda id_=id_: controller.plan(id_).ended is not None)
            plan = controller.plan(id_)
            assert (plan.status, plan.steps[0].message) == (PlanStatus.FAILED, said)
            bench.platform.now_s += AUTO.settle_s + 1


async def test_an_action_that_takes_far_too_long_is_taken_back(bench: Bench) -> None:
    bench.actuator.outcome = ActionOutcome.RUNNING
    async with bench.running(OFF) as controller:
        id_ = await applied(bench, controller)
        await bench.until(
            controller, lambda: controller.plan(id_).status is PlanStatus.FAILED, 1000
        )
        assert bench.actuator.told[-1] == "abort"
        assert controller.plan(id_).steps[0].message == "it took too long"


async def test_what_no_longer_holds_when_its_turn_comes_ends_the_plan(bench: Bench) -> None:
    async with bench.running(OFF) as controller:
        id_ = await applied(bench, controller)
        small = tuple(replace(each, lend_bytes=1) for each in bench.platform.snapshot.engines)
        bench.platform.snapshot = replace(bench.platform.snapshot, engines=small)
        await bench.until(controller, lambda: controller.plan(id_).status is PlanStatus.FAILED)
        assert str(Reason.NO_MEMORY) in controller.plan(id_).steps[0].message
        assert not bench.actuator.told


async def test_a_wish_is_held_to_the_limits_unless_it_is_forced(bench: Bench) -> None:
    huge = move(amount=800 * MIB)
    small = tuple(replace(each, lend_bytes=MIB) for each in bench.platform.snapshot.engines)
    bench.platform.snapshot = replace(bench.platform.snapshot, engines=small)
    async with bench.running(OFF) as controller:
        with pytest.raises(Conflict, match="forced") as refused:
            await controller.make((huge,))
        assert refused.value.code == Reason.NO_MEMORY
        made = await controller.make((huge,), forced=True)
        assert made.plan is not None
        assert made.plan.forced
        await controller.apply(made.plan.id)
        await bench.until(controller, lambda: bool(bench.actuator.told))


async def test_what_has_no_mechanism_or_no_name_cannot_be_forced(bench: Bench) -> None:
    parts = tuple(
        replace(each, movable=frozenset({MoveKind.REQUESTS}))
        for each in bench.platform.snapshot.engines
    )
    bench.platform.snapshot = replace(bench.platform.snapshot, engines=parts)
    heads = Move(kind=MoveKind.HEADS, engine=HOT, lender=COLD, amount=1)
    async with bench.running(OFF) as controller:
        for action in (heads, AddReplica(model=HOT, device="d1")):
            with pytest.raises(Conflict, match="not_movable"):
                await controller.make((action,), forced=True)
        with pytest.raises(NotFound, match="nobody"):
            await controller.make((move(engine="nobody"),), forced=True)
        made = await controller.make()
        assert made.rejected_by_reason[Reason.NOT_MOVABLE] >= 2


async def test_a_pause_begins_nothing_more_and_survives_a_restart(bench: Bench) -> None:
    async with bench.running(OFF) as controller:
        await controller.switch("auto", True)
        for _ in range(50):
            bench.platform.now_s += 1
            await controller.tick()
        assert [plan.status for plan in controller.plans()] == [PlanStatus.PROPOSED]
        with pytest.raises(Conflict, match="paused"):
            await controller.apply(controller.plans()[0].id)
    async with bench.running(OFF) as controller:
        assert controller.state().paused
        assert not bench.actuator.told
        await controller.switch(None, False)
        await bench.until(controller, lambda: bool(bench.actuator.told))


async def test_a_switched_mode_holds_until_the_configuration_says_another(bench: Bench) -> None:
    async with bench.running(OFF) as controller:
        await controller.switch("advise", None)
    async with bench.running(OFF) as controller:
        assert controller.state().mode == "advise"
    async with bench.running(AUTO) as controller:
        assert controller.state().mode == "auto"


async def test_a_controllers_plans_do_not_replace_an_operators(bench: Bench) -> None:
    advise = AUTO.model_copy(update={"controller": "advise"})
    async with bench.running(advise) as controller:
        made = await controller.make((move(),))
        assert made.plan is not None
        await bench.until(controller, lambda: len(controller.plans()) == 2)
        assert {plan.status for plan in controller.plans()} == {PlanStatus.PROPOSED}


def test_a_store_that_cannot_be_used_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"rebalancing\.folder"):
        PlanStore(tmp_path / "file" / "plans").claim()
    folder = tmp_path / "plans"
    folder.mkdir()
    (folder / "plans.sqlite").write_text("This is no database, and longer than its header. " * 9)
    store = PlanStore(folder)
    with pytest.raises(StoreError, match="not a database"):
        store.claim()
    (folder / "plans.sqlite").unlink()
    assert store.claim()
    store.release()
    with pytest.raises(SupersededError):
        store.save(Kept(mode="off", configured="off"), History())
