"""A step's time is divided among its requests, and told with each one's last output."""

from __future__ import annotations

from collections.abc import Container, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from loomserve.platform.engine.scheduling.device_time import DeviceTime, take_device_s


def last(request_id: str, **more: object) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [1], finish_reason=FinishReason.STOP, **more)


class WalkedTime(DeviceTime):
    """Adds to each request's seconds in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    def step(self, tokens: Mapping[str, int], seconds: float, there: Container[str]) -> None:
        shares = [(one, count) for one, count in tokens.items() if one in there]
        total = sum(count for _, count in shares)
        for one, count in shares:
            self.seconds[one] = self.seconds.get(one, 0.0) + seconds / total * count

    def ended(self, request_id: str) -> None:
        seconds = self.seconds.pop(request_id, None)
        if seconds is not None:
            self._ended[request_id] = seconds


@given(st.data())
def test_the_running_sum_tells_what_a_walk_adds_up(data: st.DataObject) -> None:
    summed, walked = DeviceTime(), WalkedTime()
    there: list[str] = []
    for number in range(data.draw(st.integers(1, 60))):
        there += [f"{number}"] * data.draw(st.integers(0, 1))
        # Some steps leave a request out, and some are of requests that have ended since.
        out = data.draw(st.sets(st.sampled_from(there), max_size=1)) if there else set()
        chunks = data.draw(st.booleans())
        counts = st.integers(1, 500) if chunks else st.just(1)
        tokens = {one: data.draw(counts) for one in there if one not in out}
        ends = data.draw(st.sets(st.sampled_from(there), max_size=2)) if there else set()
        seconds, late = data.draw(st.floats(1e-4, 2.0)), data.draw(st.booleans())
        if late:
            there = [one for one in there if one not in ends]
            told_alike(summed, walked, ends)
        for time in (summed, walked):
            time.step(tokens, seconds, set(there))
        if not late:
            there = [one for one in there if one not in ends]
            told_alike(summed, walked, ends)
    told_alike(summed, walked, set(there))
    assert {**summed._since, **summed._paused} == walked.seconds == {}


def told_alike(summed: DeviceTime, walked: DeviceTime, ends: set[str]) -> None:
    told = []
    for time in (summed, walked):
        outputs = [last(one) for one in sorted(ends)]
        for one in outputs:
            time.ended(one.request_id)
        time.tell([EngineCoreOutputs(outputs=outputs)])
        told.append([take_device_s(one) for one in outputs])
    for one, other in zip(*told, strict=True):
        assert (one is None) == (other is None)
        assert one == pytest.approx(other, rel=1e-9, abs=1e-9)


def test_all_of_a_steps_time_is_divided_by_tokens() -> None:
    time = DeviceTime()
    time.step({"long": 30, "a": 1, "b": 1}, 3.2, {"long", "a", "b"})
    time.step({"a": 1, "b": 1}, 0.5, {"a", "b"})
    outputs = [last("long"), last("a"), last("b")]
    for output in outputs:
        time.ended(output.request_id)
    time.tell([EngineCoreOutputs(outputs=outputs[:2]), EngineCoreOutputs(outputs=outputs[2:])])
    told = [take_device_s(output) for output in outputs]
    assert told == pytest.approx([3.0, 0.35, 0.35])
    assert sum(each or 0 for each in told) == pytest.approx(3.7)


def test_what_was_computed_of_a_request_that_has_ended_is_the_others() -> None:
    time = DeviceTime()
    time.step({"gone": 1, "a": 1}, 1.0, {"a"})
    time.ended("gone")
    time.ended("a")
    output = last("a")
    time.tell([EngineCoreOutputs(outputs=[output])])
    assert take_device_s(output) == 1.0


def test_a_step_of_requests_that_have_all_ended_is_nobodys() -> None:
    time = DeviceTime()
    time.step({"gone": 1}, 1.0, set())
    time.ended("gone")
    output = last("gone")
    time.tell([EngineCoreOutputs(outputs=[output])])
    assert output.kv_transfer_params is None


def test_only_a_last_output_tells_and_nothing_is_left_of_who_was_not_told() -> None:
    time = DeviceTime()
    time.step({"a": 1, "aborted": 1}, 1.0, {"a", "aborted"})
    running = EngineCoreOutput("a", [1])
    time.tell([EngineCoreOutputs(outputs=[running])])
    assert running.kv_transfer_params is None
    time.ended("aborted")
    time.tell([EngineCoreOutputs()])
    time.ended("a")
    late, output = last("aborted"), last("a")
    time.tell([EngineCoreOutputs(outputs=[late, output])])
    assert take_device_s(late) is None
    assert take_device_s(output) == 0.5


def test_what_others_tell_with_an_output_stays() -> None:
    time = DeviceTime()
    time.step({"a": 1}, 1.0, {"a"})
    time.ended("a")
    output = last("a", kv_transfer_params={"other": 1})
    time.tell([EngineCoreOutputs(outputs=[output])])
    assert take_device_s(output) == 1.0
    assert output.kv_transfer_params == {"other": 1}
    assert take_device_s(output) is None
