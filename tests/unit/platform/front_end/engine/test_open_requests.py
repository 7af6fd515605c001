"""What is sent again of a request, and what its outputs become."""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats

from loomserve.platform.engine.resumption.travelling import RESUMED
from loomserve.platform.front_end.engine.open_requests import OpenRequest, digest
from loomserve.platform.front_end.policy.continuation import Death, Loss
from loomserve.platform.front_end.routing import RoutingContext
from loomserve.platform.scheduling.policy.hints import BACKGROUND, DEADLINE, EXPECTED


def opened(prompt: list[int] | None = None, **params: Any) -> OpenRequest:
    sampling = SamplingParams(**{"max_tokens": 10, **params})
    request = EngineCoreRequest(
        "r", prompt or [1, 2], None, sampling, None, 0.0, None, "salt", None,
        external_req_id="http",
    )  # fmt: skip
    return OpenRequest(request)


def moved(one: OpenRequest, tokens: list[int]) -> OpenRequest:
    one.replica_id = "a"
    one.take(EngineCoreOutput(one.wire_id, tokens), 1.0)
    one.note_loss(Loss.GONE)
    one.leave()
    return one


def test_the_first_attempt_is_the_request_itself() -> None:
    one = opened()
    assert one.to_send() is one.request
    assert one.wire_id == "r"


def test_a_client_cannot_say_what_it_has_been_answered() -> None:
    one = opened(extra_args={"x": 1, RESUMED: [5]})
    one.begin()
    assert one.to_send().sampling_params.extra_args == {"x": 1}


def test_what_is_sent_again_leaves_the_request_as_it_was() -> None:
    one = moved(opened(extra_args={"loomserve_hint": 1}, prompt_logprobs=2), [7, 8])
    again = one.to_send()
    assert again.request_id == "r#1"
    assert again.sampling_params.extra_args == {"loomserve_hint": 1, RESUMED: [7, 8]}
    assert again.sampling_params.prompt_logprobs is None
    assert one.request.request_id == "r"
    assert one.request.sampling_params.extra_args == {"loomserve_hint": 1}
    assert one.request.sampling_params.prompt_logprobs == 2


def test_a_router_sees_what_is_left() -> None:
    one = moved(opened(), [7, 8])
    routing = one.route(frozenset({"a", "b"}))
    assert routing.prompt_token_ids == [1, 2, 7, 8]
    assert (routing.max_tokens, routing.cache_salt, routing.attempt) == (8, "salt", 1)
    assert (routing.request_id, routing.external_id) == ("r", "http")
    assert (routing.candidates, routing.excluded) == ({"a", "b"}, {"a"})
    assert one.route(frozenset({"a"})).excluded == frozenset(), "better than none"


def test_a_request_that_has_a_replica_looks_for_its_next() -> None:
    one = opened()
    assert one.route(frozenset({"a"})).attempt == 0
    one.replica_id = "a"
    assert one.route(frozenset({"b"})).attempt == 1


def test_events_of_a_first_start_are_told_once_and_pauses_are_measured() -> None:
    one = moved(opened(), [7])
    events = [EngineCoreEvent.new_event(each) for each in EngineCoreEventType]
    output = EngineCoreOutput("r#1", [8], events=events)
    assert one.take(output, 3.5) == 2.5
    assert output.request_id == "r"
    assert [event.type for event in output.events] == [EngineCoreEventType.PREEMPTED]
    assert one.take(EngineCoreOutput("r#1", [9]), 3.6) is None
    assert one.tokens == [7, 8, 9]


def test_events_of_a_request_without_a_token_are_its_first() -> None:
    one = moved(opened(), [])
    events = [EngineCoreEvent.new_event(EngineCoreEventType.QUEUED)]
    output = EngineCoreOutput("r#1", [8], events=events)
    assert one.take(output, 3.5) is None
    assert output.events == events


def test_a_loss_is_counted_once_an_attempt() -> None:
    one = opened()
    one.replica_id = "a"
    assert one.note_loss(Loss.HUNG)
    assert not one.note_loss(Loss.HUNG)
    assert one.deaths == [Death(at=0, given=0, ended=False)]
    assert one.note_loss(Loss.GONE), "the engine that stood still has ended"
    assert not one.note_loss(Loss.GONE)
    assert not opened().note_loss(Loss.SILENT)
    assert one.deaths == [Death(at=0, given=0)]


def test_a_death_tells_what_that_engine_had_given() -> None:
    one = moved(opened(), [1] * 9)
    one.replica_id, one.placed_at = "b", 9
    one.take(EngineCoreOutput(one.wire_id, [1, 1]), 2.0)
    one.note_loss(Loss.GONE)
    assert one.deaths == [Death(at=9, given=9), Death(at=11, given=2)]


def test_equal_requests_have_one_digest() -> None:
    assert digest(opened().request) == digest(opened().request)
    for hint in (DEADLINE, BACKGROUND, EXPECTED):
        assert digest(opened(extra_args={hint: 1.0}).request) == digest(opened().request)
    assert digest(opened(extra_args={"a processor's": 1}).request) != digest(opened().request)
    others = (opened([1, 3]), opened(max_tokens=11), opened(logit_bias={1: 2.0}))
    assert len({digest(opened().request), *(digest(each.request) for each in others)}) == 4


def told(seconds: float) -> dict[str, float]:
    return {"loomserve_device_s": seconds}


def test_an_answers_tokens_and_its_engines_time_are_its_http_requests() -> None:
    one = opened()
    one.context = RoutingContext()
    one.take(EngineCoreOutput("r", [7], prefill_stats=PrefillStats(100, 60, 40)), 1.0)
    one.take(EngineCoreOutput("r", [8, 9]), 1.0)
    last = EngineCoreOutput("r", [1], finish_reason=FinishReason.STOP, kv_transfer_params=told(2))
    one.take(last, 1.0)
    assert last.kv_transfer_params is None, "clients would be told"
    assert one.context.usage.outputs == 3
    one.end(cut_off=False)
    usage = one.context.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (100, 40, 4)
    assert usage.own_length == 4
    assert (usage.device_s, usage.timed_tokens, usage.untimed_tokens) == (2, 64, 0)


def test_two_answers_to_one_prompt_count_it_once() -> None:
    context = RoutingContext()
    for cached in (0, 96):
        one = opened()
        one.context = context
        one.take(
            EngineCoreOutput("r", [7], prefill_stats=PrefillStats(100, 100 - cached, cached)), 1
        )
        one.end(cut_off=False)
    usage = context.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (100, 0, 2)
    assert usage.untimed_tokens == 101 + 5, "no engine told its time"
    assert usage.own_length is None, "there are two"


def test_the_prompt_of_a_beam_search_counts_once_and_each_of_its_tokens() -> None:
    context = RoutingContext()
    for tokens, beam in enumerate(("0a1f-beam-0", "77b3-beam-0", "77b3-beam-1")):
        one = opened()
        one.context, one.request.external_req_id = context, f"cmpl-1-{beam}"
        stats = PrefillStats(100 + tokens, 100 + tokens, 0)
        one.take(EngineCoreOutput("r", [7], FinishReason.LENGTH, prefill_stats=stats), 1)
        one.end(cut_off=True)
    usage = context.usage
    assert usage.spent == (usage.prompt_tokens, usage.completion_tokens) == (100, 3)


def test_of_a_request_that_moved_only_the_engine_that_ended_it_told_its_time() -> None:
    one = opened()
    one.context = RoutingContext()
    one.replica_id = "a"
    one.take(EngineCoreOutput("r", [7], prefill_stats=PrefillStats(10, 10, 0)), 1.0)
    one.note_loss(Loss.GONE)
    one.leave()
    one.take(EngineCoreOutput("r#1", [8], prefill_stats=PrefillStats(11, 11, 0)), 1.0)
    one.take(
        EngineCoreOutput(
            "r#1", [9], finish_reason=FinishReason.LENGTH, kv_transfer_params=told(0.5)
        ),
        1.0,
    )
    one.end(cut_off=True)
    usage = one.context.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (10, 3)
    assert usage.own_length is None
    assert (usage.untimed_tokens, usage.timed_tokens, usage.device_s) == (11, 2, 0.5)


def test_a_request_without_a_first_token_has_used_nothing() -> None:
    one = opened()
    one.context = RoutingContext()
    one.end(cut_off=False)
    assert not one.context.usage.begun
    assert one.context.usage.own_length is None
    assert one.context.usage.spent == (0, 0)


def test_a_prompt_that_an_engine_had_is_spent_once_though_it_has_told_nothing() -> None:
    context = RoutingContext()
    for replica_id in ("a", "b", None):
        one = opened()
        one.context, one.replica_id = context, replica_id
        one.end(cut_off=False)
    assert not context.usage.begun
    assert context.usage.spent == (2, 0)
    one = opened()
    one.context = context
    one.take(EngineCoreOutput("r", [7], prefill_stats=PrefillStats(2, 2, 0)), 1.0)
    one.end(cut_off=False)
    assert context.usage.spent == (2, 1), "another answer to it has brought it"
