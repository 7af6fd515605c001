"""What of a request may be done elsewhere, by vLLM's own types."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
)

from loomserve.kvstore.server.protocol import HANDED_OVER, HANDS_OVER
from loomserve.platform.disaggregation.engine.handoff import (
    Handoff,
    after_first_token,
    decode,
    encode,
    first_token_only,
    on_our_clock,
    usable,
    with_kv_from_store,
)
from loomserve.platform.scheduling.policy.deadline import DEADLINE, deadline_of


def request(tokens: int = 5, **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=list(range(tokens)),
        mm_features=None,
        sampling_params=SamplingParams(**params),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt="tenant",
        data_parallel_rank=3,
    )


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, Handoff.CONTINUED),
        ({"temperature": 0, "max_tokens": 9, "stop": ["\n"], "logprobs": 2}, Handoff.CONTINUED),
        ({"temperature": 1, "top_p": 0.9, "top_k": 5, "min_tokens": 3}, Handoff.CONTINUED),
        ({"repetition_penalty": 1.1, "logit_bias": {1: 2.0}}, Handoff.CONTINUED),
        ({"extra_args": {DEADLINE: 1.8e9}}, Handoff.CONTINUED),
        ({"extra_args": {}}, Handoff.CONTINUED),
        # These look back at what was generated, or draw from a sequence that began with it.
        ({"presence_penalty": 0.1}, Handoff.KV),
        ({"frequency_penalty": 0.1}, Handoff.KV),
        ({"seed": 0}, Handoff.KV),
        ({"bad_words": ["a"]}, Handoff.KV),
        ({"structured_outputs": StructuredOutputsParams(regex="a+")}, Handoff.KV),
        ({"thinking_token_budget": 5}, Handoff.KV),
        ({"extra_args": {"my_logits_processor": 1}}, Handoff.KV),
        ({"extra_args": {"my_logits_processor": 1, DEADLINE: 1.8e9}}, Handoff.KV),
        # These need the prompt computed here.
        ({"prompt_logprobs": 1}, Handoff.LOCAL),
        ({"skip_reading_prefix_cache": True}, Handoff.LOCAL),
        ({"extra_args": {"kv_transfer_params": {"loomserve_prompt_chain": True}}}, Handoff.LOCAL),
        ({"prompt_logprobs": 1, "extra_args": {DEADLINE: 1.8e9}}, Handoff.LOCAL),
    ],
    ids=lambda value: str(value),
)
def test_only_what_cannot_change_the_answer_is_done_elsewhere(
    params: dict[str, Any], expected: Handoff
) -> None:
    assert usable(request(**params)) is expected


def test_a_request_with_an_adapter_stays(tmp_path: Path) -> None:
    adapted = request()
    adapted.lora_request = LoRARequest("adapter", 1, str(tmp_path))
    assert usable(adapted) is Handoff.LOCAL


@given(
    tokens=st.integers(1, 40),
    most=st.integers(2, 40),
    least=st.integers(0, 2),
    stop=st.sampled_from([[], ["x"]]),
)
def test_the_parts_of_a_request_make_the_whole(
    tokens: int, most: int, least: int, stop: list[str]
) -> None:
    whole = request(tokens, max_tokens=most, min_tokens=least, stop=stop)
    before = encode(whole)
    first, rest = first_token_only(whole), after_first_token(whole, [7])
    assert first.prompt_token_ids == whole.prompt_token_ids
    assert rest.prompt_token_ids == [*whole.prompt_token_ids, 7]
    assert first.params.max_tokens + rest.params.max_tokens == most
    assert first.params.min_tokens + rest.params.min_tokens == least
    assert rest.params.stop == stop
    for part in (first, rest):
        assert part.cache_salt == "tenant"
        assert part.request_id == "r"
    assert first.data_parallel_rank is None
    assert first.params.extra_args == {"kv_transfer_params": {HANDS_OVER: True}}
    for part in (rest, with_kv_from_store(whole)):
        assert part.params.extra_args == {"kv_transfer_params": {HANDED_OVER: tokens}}
    assert encode(whole) == before, "the request itself must stay as it was"


def test_every_part_of_a_request_has_its_deadline() -> None:
    whole = request(max_tokens=4, extra_args={DEADLINE: 1_800_000_000.25})
    parts = (first_token_only(whole), with_kv_from_store(whole), after_first_token(whole, [7]))
    for part in parts:
        arrived = decode(encode(part), EngineCoreRequest)
        assert deadline_of(arrived.params.extra_args) == 1_800_000_000.25
        assert "kv_transfer_params" in arrived.params.extra_args


def test_messages_arrive_as_they_were_sent() -> None:
    whole = request(max_tokens=4, stop_token_ids=[5])
    again = decode(encode(whole), EngineCoreRequest)
    assert again.prompt_token_ids == whole.prompt_token_ids
    assert again.params == whole.params


def test_events_of_another_machine_keep_their_distance_on_our_clock() -> None:
    events = [
        EngineCoreEvent(EngineCoreEventType.QUEUED, 1e6),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, 1e6 + 0.25),
    ]
    now = time.monotonic()
    output = on_our_clock(EngineCoreOutput("r", [1], events=events), now)
    assert [event.timestamp - now for event in output.events] == pytest.approx([0, 0.25], abs=1e-6)
