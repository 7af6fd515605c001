"""The simulated schedule while requests come and go."""

from __future__ import annotations

from typing import Any

import pytest

from loomserve.platform.scheduling.simulator import (
    Policies,
    ScheduledStep,
    SimulatedRequest,
    Simulator,
    StepShare,
)
from tests.unit.platform.scheduling.test_simulator import COSTS, LIMITS


def running_engine(**policies: Any) -> Simulator:
    return Simulator((), LIMITS, Policies(**policies), COSTS)


def coming(name: str, **what: Any) -> SimulatedRequest:
    return SimulatedRequest(
        **{
            "name": name,
            "arrived_s": 0.0,
            "prompt_tokens": 4,
            "output_tokens": 4,
            "max_tokens": 4,
            **what,
        }
    )


def one_step(engine: Simulator, now: float) -> ScheduledStep:
    step = engine.schedule(now)
    engine.end(step, now + 1)
    return step


def test_requests_come_and_go_while_it_runs() -> None:
    engine = running_engine()
    assert engine.due_s is None
    engine.add(coming("a"))
    engine.add(coming("b", arrived_s=0.5))
    assert (engine.running, engine.waiting, engine.kv_usage) == (0, 2, 0.0)
    one_step(engine, 1.0)
    assert (engine.running, engine.waiting, engine.kv_usage) == (2, 0, pytest.approx(2 / 12))
    engine.remove("a")
    engine.remove("a")
    assert (engine.running, engine.kv_usage) == (1, pytest.approx(1 / 12))
    for now in (2.0, 3.0, 4.0):
        one_step(engine, now)
    assert [*engine.times] == ["b"]
    assert (engine.due_s, engine.kv_usage) == (None, 0.0)


def test_what_waits_and_what_is_swapped_out_can_be_removed_too() -> None:
    engine = running_engine(preemption="adaptive", peak_admission=False)
    for name in "abc":
        engine.add(coming(name, prompt_tokens=14, output_tokens=30, max_tokens=30))
    for now in range(12):
        one_step(engine, now)
    assert engine.free_swap < LIMITS.swap_bytes
    assert engine.waiting
    for name in "abc":
        engine.remove(name)
    assert (engine.free_swap, engine.kv_usage) == (LIMITS.swap_bytes, 0.0)
    assert engine.due_s is None


def test_tokens_that_are_cached_are_not_computed() -> None:
    engine = running_engine()
    engine.add(coming("a", prompt_tokens=10, cached_tokens=8))
    assert one_step(engine, 0.0).shares == [StepShare("a", 8, 2)]
    assert engine.kv_usage == pytest.approx(3 / 12), "their blocks are held all the same"


@pytest.mark.parametrize("queue", ["fcfs", "fair"])
def test_background_requests_run_beside_others_and_make_way_for_them(queue: str) -> None:
    engine = running_engine(queue=queue)
    for name in "vwxy":
        engine.add(coming(name, background=True, output_tokens=20, max_tokens=20))
    assert len(one_step(engine, 1.0).shares) == LIMITS.running
    engine.add(coming("a", arrived_s=1.5))
    step = one_step(engine, 2.0)
    assert len(step.preempted) == 1
    assert "a" in {share.name for share in step.shares}
    assert {share.name for share in step.shares} - {"a"} <= {*"vwxy"} - {*step.preempted}
    engine.remove("a")
    (gone,) = step.preempted
    assert gone in one_step(engine, 3.0).resumed


def test_it_tells_which_requests_can_go_on_elsewhere() -> None:
    engine = running_engine()
    engine.add(coming("short"))
    engine.add(coming("long", prompt_tokens=20))
    engine.add(coming("late", arrived_s=9.0))
    one_step(engine, 0.0)
    assert {each.id: each.waits for each in engine.staying()} == {"short": False, "late": True}
