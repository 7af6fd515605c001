"""What an engine's process tells of its load and its schedule, by its requests and its outputs."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm import SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.request import Request

from loomserve.platform.engine.core.metering import CoreMeter

SCHEDULING = {
    "queue": "fair", "preemption": "adaptive", "swapped_out": 5, "swapped_in": 4, "recomputed": 3,
    "swap_used_bytes": 2, "swap_capacity_bytes": 10, "step_time_error": None,
    "swap_time_error": 0.5,
}  # fmt: skip
PREFILL = PrefillStats(num_prompt_tokens=10, num_computed_tokens=6, num_cached_tokens=4)


def request(name: str, so_far: int = 0) -> Request:
    made = Request(
        request_id=name,
        prompt_token_ids=[1] * 10,
        sampling_params=SamplingParams(max_tokens=20),
        pooling_params=None,
    )
    made.append_output_token_ids([2] * so_far)
    return made


def scheduled(at: float) -> list[EngineCoreEvent]:
    return [EngineCoreEvent(EngineCoreEventType.SCHEDULED, at)]


def stats(running: int, waiting: int = 0, **more: Any) -> SchedulerStats:
    return SchedulerStats(
        num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=0.25, **more
    )


def metric(meter: CoreMeter, name: str) -> float:
    (found,) = (
        sample.value
        for family in text_string_to_metric_families(meter.page())
        for sample in family.samples
        if sample.name == f"loomserve_{name}"
    )
    return found


def outputs(*each: EngineCoreOutput, told: SchedulerStats | None) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=list(each), scheduler_stats=told)


def test_a_request_is_measured_from_its_arrival_to_its_end() -> None:
    meter = CoreMeter()
    one = request("a")
    meter.arrived(one, 0.0)
    one.append_output_token_ids([5, 5, 5])
    first = EngineCoreOutput("a", [5], events=scheduled(0.5), prefill_stats=PREFILL)
    meter.step({1: outputs(first, told=stats(1))}, 1.0)
    load = meter.read()
    assert (load.running, load.waiting, load.kv_cache_usage) == (1, 0, 0.25)
    assert load.work is not None
    assert load.work.tokens == 7, "six of the prompt, and one"

    meter.step({1: outputs(EngineCoreOutput("a", [5]), told=stats(1))}, 1.1)
    last = EngineCoreOutput("a", [5], finish_reason=FinishReason.LENGTH)
    meter.step({1: outputs(last, told=stats(0))}, 1.2)
    load = meter.read()
    assert load.running == 0
    assert load.step_time_s == pytest.approx(0.1)
    assert load.pace is not None
    assert load.pace.prefill_token_s == pytest.approx(0.5 / 6)
    assert load.pace.output_token_s == pytest.approx(0.1)
    assert load.pace.request_s == pytest.approx(0.7)
    assert load.weighted_turnaround is not None
    assert load.weighted_turnaround >= 1


@pytest.mark.parametrize(("device", "work_s"), [("cpu", 40.0), ("cuda", 1.25)])
def test_one_request_is_little_work_for_a_gpu_whose_steps_may_have_many(
    device: str, work_s: float
) -> None:
    config: Any = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        scheduler_config=SimpleNamespace(max_num_seqs=64),
    )
    meter = CoreMeter.of(config)
    meter.arrived(request("a"), 0.0)
    # Until it is known what a step takes for any number of requests, each counts as a whole.
    for at in range(1, 102):
        running = SchedulerStats(num_running_reqs=1, kv_cache_usage=1 / 32)
        meter.step({1: outputs(EngineCoreOutput("a", [5]), told=running)}, float(at))
        if at == 61:
            begun = meter.read().work
    work = meter.read().work
    assert work is not None
    assert begun is not None
    assert work.linear_s - begun.linear_s == pytest.approx(work_s, rel=0.05)


def test_a_step_for_several_clients_is_one_step() -> None:
    meter = CoreMeter()
    for name in "ab":
        meter.arrived(request(name), 0.0)
    meter.step(
        {
            1: outputs(EngineCoreOutput("a", [5], prefill_stats=PREFILL), told=stats(2)),
            2: outputs(EngineCoreOutput("b", [5], prefill_stats=PREFILL), told=None),
        },
        1.0,
    )
    load = meter.read()
    assert load.running == 2
    assert load.work is not None
    assert load.work.tokens == 14


def test_a_request_that_goes_on_here_counts_what_is_computed_and_makes_no_pace() -> None:
    meter = CoreMeter()
    meter.arrived(request("a", so_far=5), 0.0)
    first = EngineCoreOutput("a", [5], events=scheduled(0.5))
    meter.step({1: outputs(first, told=stats(1))}, 1.0)
    last = EngineCoreOutput("a", [5], finish_reason=FinishReason.STOP)
    meter.step({1: outputs(last, told=stats(0))}, 1.1)
    load = meter.read()
    assert load.work is not None
    assert load.work.tokens == 17
    assert load.pace is None


def test_who_left_does_not_wait() -> None:
    meter = CoreMeter()
    meter.arrived(request("a"), 0.0)
    meter.step({0: outputs(told=stats(0, waiting=1))}, 1.0)
    load = meter.read()
    assert load.waiting == 1
    assert load.oldest_waiting_s > 0
    meter.left(["a", "unknown"])
    assert meter.read().oldest_waiting_s == 0
    # Its last output may come after it has been let go.
    meter.step({1: outputs(EngineCoreOutput("a", [5]), told=stats(0))}, 2.0)
    assert meter.read().running == 0


def test_the_schedulers_own_figures_are_told() -> None:
    meter = CoreMeter()
    told = stats(0, kv_connector_stats={"scheduling": SCHEDULING})
    meter.step({0: outputs(told=told)}, 1.0)
    load = meter.read()
    assert load.scheduling is not None
    assert load.scheduling.model_dump() == SCHEDULING
    meter.step({0: outputs(told=stats(0, kv_connector_stats={"loads": 1}))}, 2.0)
    meter.step({0: outputs(told=stats(0))}, 3.0)
    scheduling = meter.read().scheduling
    assert scheduling is not None
    assert scheduling.model_dump() == SCHEDULING, "what was said last holds"


def test_before_the_scheduler_says_anything_nothing_is_told_of_it() -> None:
    meter = CoreMeter()
    meter.step({0: outputs(told=stats(0, kv_connector_stats={"loads": 1}))}, 1.0)
    load = meter.read()
    assert load.scheduling is None
    assert load.pace is None


def test_a_requests_schedule_is_measured_when_it_finishes() -> None:
    meter = CoreMeter()
    meter.arrived(request("a"), 0.0)
    again = [
        EngineCoreEvent(EngineCoreEventType.PREEMPTED, 3.0),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, 4.0),
    ]
    for at, events in ((3.0, scheduled(2.0)), (5.0, again), (6.0, again)):
        output = EngineCoreOutput("a", [5], events=events)
        meter.step({1: outputs(output, told=stats(1))}, at)
        assert metric(meter, "weighted_turnaround_count") == 0
    last = EngineCoreOutput("a", [5], finish_reason=FinishReason.LENGTH)
    meter.step({1: outputs(last, told=stats(0))}, 8.0)
    for name, counted in (("weighted_turnaround", 8 / 6), ("request_preemptions", 2)):
        assert metric(meter, f"{name}_count") == 1
        assert metric(meter, f"{name}_sum") == pytest.approx(counted)
    assert meter.read().weighted_turnaround == pytest.approx(8 / 6)


def test_a_request_that_is_given_up_is_not_among_those_that_have_finished() -> None:
    meter = CoreMeter()
    meter.arrived(request("a"), 0.0)
    meter.step({1: outputs(EngineCoreOutput("a", [5], events=scheduled(0.5)), told=stats(1))}, 1.0)
    last = EngineCoreOutput("a", [], finish_reason=FinishReason.ABORT)
    meter.step({1: outputs(last, told=stats(0))}, 2.0)
    assert metric(meter, "weighted_turnaround_count") == 0
    assert metric(meter, "request_preemptions_count") == 0


def test_whoever_has_no_output_waits_as_long_as_the_engine_says_that_some_do() -> None:
    meter = CoreMeter()
    now = time.monotonic()
    for name in ("first", "second"):
        meter.arrived(request(name), now - 60)

    def step(*names: str, waiting: int = 0, skipped: int = 0) -> float:
        of_all = [EngineCoreOutput(name, [5], events=scheduled(now)) for name in names]
        told = stats(1, waiting, num_skipped_waiting_reqs=skipped)
        meter.step({1: outputs(*of_all, told=told)}, now)
        waits_s = meter.read().oldest_waiting_s
        assert metric(meter, "oldest_waiting_seconds") == pytest.approx(waits_s, abs=5)
        return waits_s

    assert 60 <= step("first", waiting=1) < 120
    assert 60 <= step("first", skipped=1) < 120
    assert step("first", "second") == 0
    assert step("second", waiting=1) >= 60, "the first one was preempted"
    meter.left(["first"])
    assert meter.read().oldest_waiting_s == 0
    assert metric(meter, "oldest_waiting_seconds") == 0


def test_it_tells_how_long_it_has_had_no_request_and_how_many_it_has_had() -> None:
    meter = CoreMeter()
    time.sleep(0.02)
    assert meter.read().idle_s >= 0.02
    meter.arrived(request("a"), time.monotonic())
    meter.arrived(request("b"), time.monotonic())
    assert (meter.read().idle_s, meter.read().requests) == (0.0, 2)
    meter.left(["a"])
    assert meter.read().idle_s == 0.0
    finished = EngineCoreOutput("b", [1], finish_reason=FinishReason.STOP)
    meter.step({0: EngineCoreOutputs(outputs=[finished])}, time.monotonic())
    time.sleep(0.02)
    assert 0.02 <= meter.read().idle_s < 10
    assert not meter.read().asleep
    meter.asleep = True
    assert meter.read().asleep
