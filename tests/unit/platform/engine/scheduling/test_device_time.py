"""A step's time is divided among its requests, and told with each one's last output."""

from __future__ import annotations

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from loomserve.platform.engine.scheduling.device_time import DeviceTime, take_device_s


def last(request_id: str, **more: object) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [1], finish_reason=FinishReason.STOP, **more)


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
