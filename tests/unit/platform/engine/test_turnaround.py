"""What the front end concludes about an engine's queue, against an engine that is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.engine.turnaround import Turnaround

PERIODS = st.floats(0.001, 10)


def test_weighted_turnaround_is_the_whole_time_over_the_time_since_the_start() -> None:
    seen = Turnaround()
    seen.arrived("r", 10.0)
    seen.scheduled("r", 16.0)
    assert seen.finished("r", 18.0) == (4.0, 0)
    assert seen.mean_weighted_turnaround == 4.0
    assert seen.finished("r", 18.0) is None


@given(waited=PERIODS, ran=st.lists(PERIODS, min_size=1, max_size=5))
def test_only_the_first_start_counts_and_every_preemption(waited: float, ran: list[float]) -> None:
    seen = Turnaround()
    now = 1000.0
    seen.arrived("r", now)
    start = now = now + waited
    for turn, period in enumerate(ran):
        if turn:
            seen.preempted("r")
        seen.scheduled("r", now)
        now += period
    finished = seen.finished("r", now)
    assert finished is not None
    assert finished.preemptions == len(ran) - 1
    assert finished.weighted_turnaround == pytest.approx((now - 1000) / (now - start))
    assert finished.weighted_turnaround >= 1


def test_a_request_that_never_started_or_was_left_says_nothing() -> None:
    seen = Turnaround()
    seen.arrived("aborted in the queue", 0.0)
    assert seen.finished("aborted in the queue", 5.0) is None
    seen.arrived("left", 0.0)
    seen.scheduled("left", 1.0)
    seen.left("left")
    assert seen.finished("left", 5.0) is None
    for late in (seen.scheduled, lambda request_id, _: seen.preempted(request_id)):
        late("left", 6.0)
    seen.step(waiting=1)
    assert seen.oldest_waiting_s(7.0) == 0
    assert seen.mean_weighted_turnaround is None


def test_the_mean_forgets_what_is_long_ago() -> None:
    seen = Turnaround()
    for number in range(300):
        waited = 9.0 if number < 200 else 1.0
        seen.arrived(str(number), 0.0)
        seen.scheduled(str(number), waited)
        seen.finished(str(number), waited + 1)
    assert seen.mean_weighted_turnaround == 2.0


@given(st.data())
def test_the_oldest_waiting_request_is_the_engines_own(data: st.DataObject) -> None:
    seen = Turnaround()
    arrived: dict[str, float] = {}
    waiting: set[str] = set()
    running: set[str] = set()
    now = 0.0
    for number in range(data.draw(st.integers(1, 12))):
        now += data.draw(PERIODS)
        arrived[str(number)] = now
        seen.arrived(str(number), now)
        waiting.add(str(number))
        # A step: some are preempted, some start, all that run have an output, some end with it.
        out, back = some(data, running), some(data, waiting)
        running, waiting = running - out | back, waiting - back | out
        seen.answered(running)
        for request_id in running:
            seen.scheduled(request_id, now)
        for request_id in some(data, running):
            running.discard(request_id)
            seen.finished(request_id, now + 0.001)
        seen.step(len(waiting))
        now += data.draw(PERIODS)
        oldest = max((now - arrived[request_id] for request_id in waiting), default=0.0)
        assert seen.oldest_waiting_s(now) == oldest


def some(data: st.DataObject, requests: set[str]) -> set[str]:
    return data.draw(st.sets(st.sampled_from(sorted(requests)))) if requests else set()


def test_a_prompt_of_several_steps_counts_only_while_others_wait() -> None:
    seen = Turnaround()
    seen.arrived("long prompt", 0.0)
    seen.step(waiting=0)
    assert seen.oldest_waiting_s(5.0) == 0
    seen.arrived("behind it", 5.0)
    seen.step(waiting=1)
    assert seen.oldest_waiting_s(6.0) == 6
    seen.answered(["long prompt"])
    seen.step(waiting=1)
    assert seen.oldest_waiting_s(7.0) == 2
