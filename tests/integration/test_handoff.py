"""What of a request may be done elsewhere, by vLLM's own types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from loomserve.kvstore.server.protocol import HANDED_OVER, HANDS_OVER
from loomserve.platform.disaggregation.engine.handoff import (
    first_token_only,
    shareable,
    with_kv_from_store,
)
from loomserve.platform.scheduling.policy.hints import DEADLINE, deadline_of


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


def sent(request: EngineCoreRequest) -> list[bytes]:
    return [bytes(part) for part in MsgpackEncoder().encode(request)]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, True),
        ({"temperature": 0, "max_tokens": 9, "stop": ["\n"], "logprobs": 2}, True),
        ({"presence_penalty": 0.1}, True),
        ({"seed": 0}, True),
        ({"bad_words": ["a"]}, True),
        ({"structured_outputs": StructuredOutputsParams(regex="a+")}, True),
        ({"extra_args": {"my_logits_processor": 1, DEADLINE: 1.8e9}}, True),
        # These need the prompt computed where they are answered.
        ({"prompt_logprobs": 1}, False),
        ({"skip_reading_prefix_cache": True}, False),
        ({"extra_args": {"kv_transfer_params": {"loomserve_prompt_chain": True}}}, False),
        ({"prompt_logprobs": 1, "extra_args": {DEADLINE: 1.8e9}}, False),
    ],
    ids=lambda value: str(value),
)
def test_only_what_cannot_change_the_answer_is_done_elsewhere(
    params: dict[str, Any], expected: bool
) -> None:
    assert shareable(request(**params)) is expected


def test_a_request_with_an_adapter_stays(tmp_path: Path) -> None:
    adapted = request()
    adapted.lora_request = LoRARequest("adapter", 1, str(tmp_path))
    assert not shareable(adapted)


@given(
    tokens=st.integers(1, 40),
    most=st.integers(2, 40),
    least=st.integers(0, 2),
    stop=st.sampled_from([[], ["x"]]),
)
def test_a_prefill_engine_computes_the_prompt_and_one_token(
    tokens: int, most: int, least: int, stop: list[str]
) -> None:
    whole = request(tokens, max_tokens=most, min_tokens=least, stop=stop)
    before = sent(whole)
    first, rest = first_token_only(whole), with_kv_from_store(whole)
    assert first.params.max_tokens == 1
    assert first.params.min_tokens == min(1, least)
    assert (rest.params.max_tokens, rest.params.min_tokens) == (most, least)
    assert rest.params.stop == stop
    for part in (first, rest):
        assert part.prompt_token_ids == whole.prompt_token_ids
        assert part.cache_salt == "tenant"
        assert part.request_id == "r"
    assert first.data_parallel_rank is None
    assert first.params.extra_args == {"kv_transfer_params": {HANDS_OVER: True}}
    assert rest.params.extra_args == {"kv_transfer_params": {HANDED_OVER: tokens}}
    assert sent(whole) == before, "the request itself must stay as it was"


def test_every_part_of_a_request_has_its_deadline() -> None:
    whole = request(max_tokens=4, extra_args={DEADLINE: 1_800_000_000.25})
    for part in (first_token_only(whole), with_kv_from_store(whole)):
        arrived = MsgpackDecoder(EngineCoreRequest).decode(sent(part))
        assert deadline_of(arrived.params.extra_args) == 1_800_000_000.25
        assert "kv_transfer_params" in arrived.params.extra_args
