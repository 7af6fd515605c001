"""Steps in which nothing is to be decided take a shorter way, and everything stays as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from loomserve.platform.costs.step_time import Step
from loomserve.platform.engine import scheduler as scheduling
from loomserve.platform.engine.profiling.step_timing import step_of
from loomserve.platform.engine.scheduler import AdaptiveScheduler
from loomserve.platform.engine.scheduling import admission, order
from loomserve.platform.engine.scheduling.admission import Admission
from loomserve.platform.engine.scheduling.device_time import take_device_s
from loomserve.platform.engine.scheduling.order import QueueOrder
from loomserve.platform.scheduling.policy.hints import BACKGROUND, EXPECTED
from tests.unit.platform.engine.scheduling.test_device_time import WalkedTime
from tests.unit.platform.engine.test_scheduler import (
    OPTIONS,
    _model,  # noqa: F401
    add,
    own_cache,  # noqa: F401
    scheduler_of,
    stepped,
)


class DecidingAdmission(Admission):
    """Decides in every step."""

    @property
    def restricts(self) -> bool:
        options = self._options
        return self._foresees or options.preemption == "swap" or not options.chunked_recompute


class SortingOrder(QueueOrder):
    def sort_running(self, running: list[Request], now: float) -> None:
        running.sort(key=lambda request: self.rank(request, now))


def deciding(scheduler: AdaptiveScheduler, monkeypatch: pytest.MonkeyPatch) -> AdaptiveScheduler:
    """One that sorts, decides and adds up in each step."""
    scheduler.admission.__class__ = DecidingAdmission
    scheduler.order.__class__ = SortingOrder
    scheduler._device_time = WalkedTime()

    def schedule(throttle_prefills: bool = False) -> Any:
        scheduler.step_began = scheduling.time.perf_counter()
        with nullcontext():
            return scheduler._schedule(throttle_prefills)

    monkeypatch.setattr(scheduler, "schedule", schedule)
    return scheduler


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The clock of both schedulers, which is set by hand."""
    at = SimpleNamespace(now=1000.0, end=1000.0)
    clock = SimpleNamespace(
        perf_counter=lambda: at.now, monotonic=lambda: at.now, time=lambda: at.now
    )
    for module in (scheduling, order):
        monkeypatch.setattr(module, "time", clock)
    return at


def timed(scheduler: AdaptiveScheduler, clock: SimpleNamespace) -> AdaptiveScheduler:
    update = scheduler.update_from_output

    def at_the_end(*args: Any) -> Any:
        clock.now = clock.end
        return update(*args)

    scheduler.update_from_output = at_the_end
    return scheduler


def state(scheduler: AdaptiveScheduler) -> Any:
    """Where each request is, and how far."""
    return [
        [(one.request_id, one.num_computed_tokens, one.num_preemptions) for one in where]
        for where in (scheduler.running, scheduler.waiting, scheduler.deferred)
    ]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_same_requests_start_run_and_leave_in_the_same_steps(
    model: Path, options: Any, seed: int, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(seed)
    quiet, old = (scheduler_of(model, options, seats=6) for _ in range(2))
    both = timed(quiet, clock), timed(deciding(old, monkeypatch), clock)
    told: list[dict[str, float]] = [{}, {}]
    background, made = source.choice([0.0, 0.3]), 0
    for number in range(300):
        clock.now = begin = clock.end
        clock.end += source.choice([0.001, 0.03])
        if number < 200 and source.random() < source.choice([0.05, 0.3]):
            extra: dict[str, Any] = {BACKGROUND: 1} if source.random() < background else {}
            if source.random() < 0.5:
                extra[EXPECTED] = [20, 60]
            prompt, answer = source.randrange(5, 300), source.randrange(1, 120)
            for each in both:
                one = add(each, f"{made}", prompt, answer, **extra)
                one.arrival_time = clock.now
            made += 1
        if quiet.requests and source.random() < 0.02:
            name = source.choice(sorted(quiet.requests))
            for each in both:
                each.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        for each, seconds in zip(both, told, strict=True):
            clock.now = begin
            for output in stepped(each):
                if (took := take_device_s(output)) is not None:
                    seconds[output.request_id] = took
        assert state(quiet) == state(old), f"step {number}"
    assert made > 20
    assert told[0] == pytest.approx(told[1], rel=1e-9)


def test_with_nobody_waiting_nothing_is_sorted_or_admitted(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = scheduler_of(model, OPTIONS["vLLM's own"])
    for name in "abc":
        add(scheduler, name, 20, 50)
    stepped(scheduler)
    for owner, name in (
        (admission.Admission, "chosen"),
        (order.QueueOrder, "rank"),
        (Step, "of"),
        (AdaptiveScheduler, "_starting"),
    ):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("looks at each request"))
    for _ in range(10):
        assert len(stepped(scheduler)) == 3


@pytest.mark.parametrize("most", [1, 40])
@pytest.mark.parametrize("seed", range(10))
def test_the_sums_over_a_step_are_those_of_its_requests(seed: int, most: int) -> None:
    source = random.Random(seed)
    names = [f"{at}" for at in range(source.randint(1, 20))]
    before = {name: source.randrange(3000) for name in names}
    tokens = {name: source.randint(1, most) for name in names}
    known = [name for name in names if source.random() < 0.7]
    scheduled: Any = SimpleNamespace(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=before[name])
            for name in names
            if name not in known
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=known, num_computed_tokens=[before[name] for name in known]
        ),
    )
    assert step_of(scheduled) == Step.of((before[name], tokens[name]) for name in names)
