"""The frames of simulated engines are vLLM's own, in both directions."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1 import engine as vllm_engine
from vllm.v1.metrics import stats as vllm_stats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from loomserve.platform.simulated import wire
from loomserve.platform.simulated.core import ready_message
from loomserve.platform.simulated.options import EngineOptions

OPTIONS = EngineOptions.of({"kv_cache_memory_bytes": 2**28, "max_model_len": 512})


def received(outputs: wire.Outputs) -> Any:
    """As a client reads what a simulated engine sends."""
    return MsgpackDecoder(vllm_engine.EngineCoreOutputs).decode(wire.frames_of(outputs))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (wire.WireRequest, vllm_engine.EngineCoreRequest),
        (wire.Output, vllm_engine.EngineCoreOutput),
        (wire.Outputs, vllm_engine.EngineCoreOutputs),
        (wire.UtilityAnswer, vllm_engine.UtilityOutput),
    ],
)
def test_what_is_an_array_has_vllms_fields_in_its_order(ours: Any, theirs: Any) -> None:
    own = ours.__struct_fields__
    assert theirs.__struct_fields__[: len(own)] == own
    assert theirs.__struct_config__.array_like


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (wire.Prefill, vllm_stats.PrefillStats),
        (wire.SchedulerStats, vllm_stats.SchedulerStats),
        (wire.PrefixCacheStats, vllm_stats.PrefixCacheStats),
    ],
)
def test_what_is_a_mapping_has_fields_of_vllms(ours: Any, theirs: Any) -> None:
    assert set(ours.__struct_fields__) <= {each.name for each in dataclasses.fields(theirs)}


def test_numbers_are_vllms() -> None:
    for ours, theirs in (
        (wire.FinishReason, vllm_engine.FinishReason),
        (wire.EventType, vllm_engine.EngineCoreEventType),
    ):
        assert {each.name: each.value for each in ours}.items() <= {
            each.name: each.value for each in theirs
        }.items()
    kinds = vllm_engine.EngineCoreRequestType
    assert (
        *(kinds.ADD.value, kinds.ABORT.value),
        kinds.UTILITY.value,
    ) == (wire.ADD, wire.ABORT, wire.UTILITY)


def test_a_request_is_read_as_vllm_sends_it() -> None:
    params = SamplingParams(
        temperature=0,
        max_tokens=7,
        min_tokens=2,
        stop_token_ids=[5],
        logprobs=2,
        seed=11,
        ignore_eos=True,
        extra_args={"loomserve_resumed": [3]},
    )
    sent = vllm_engine.EngineCoreRequest(
        "r", [1, 2, 3], None, params, None, 4.5, LoRARequest("a", 1, "/a"), "salt", None
    )
    read = wire.request_of(MsgpackEncoder().encode(sent))
    assert (read.request_id, read.prompt_token_ids, read.arrival_time) == ("r", [1, 2, 3], 4.5)
    assert read.cache_salt == "salt"
    assert read.lora_request[0] == "a"
    assert read.sampling_params is not None
    for name, value in {
        "temperature": 0,
        "max_tokens": 7,
        "min_tokens": 2,
        "stop_token_ids": [5],
        "logprobs": 2,
        "seed": 11,
        "ignore_eos": True,
        "extra_args": {"loomserve_resumed": [3]},
    }.items():
        assert read.sampling_params[name] == value


def test_the_token_that_ends_an_answer_is_where_vllm_writes_it() -> None:
    params = SamplingParams(max_tokens=3)
    params.update_from_generation_config({}, 9)
    sent = vllm_engine.EngineCoreRequest("r", [1], None, params, None, 0.0, None, None, None)
    read = wire.request_of(MsgpackEncoder().encode(sent))
    assert read.sampling_params is not None
    assert read.sampling_params["_eos_token_id"] == 9


@pytest.mark.parametrize("most", [1, 16, 17, None])
def test_the_most_tokens_of_an_answer_are_vllms_also_where_it_sends_none(most: int | None) -> None:
    params = SamplingParams(max_tokens=most)
    sent = msgspec.msgpack.decode(MsgpackEncoder().encode(params)[0])
    assert sent.get("max_tokens", wire.MAX_TOKENS) == most


def test_calls_and_aborts_are_read_as_vllm_sends_them() -> None:
    encoder = MsgpackEncoder()
    assert wire.value_of(encoder.encode(["a", "b"])) == ["a", "b"]
    assert wire.value_of(encoder.encode((0, 7, "sleep", (1,)))) == [0, 7, "sleep", [1]]


def test_outputs_are_read_by_vllm_as_they_were_meant() -> None:
    one = wire.Output(
        "r",
        [3],
        new_logprobs=wire.logprobs([3, 3, 8], [-0.1, -0.1, -1.0]),
        finish_reason=wire.FinishReason.STOP,
        stop_reason=3,
        events=[wire.WireEvent(wire.EventType.SCHEDULED, 2.5)],
        kv_transfer_params={"k": 1},
        prefill_stats=wire.Prefill(9, 5, 4, 4),
    )
    stats = wire.SchedulerStats(2, 1, 0.5, wire.PrefixCacheStats(1, 9, 4), {"scheduling": {}})
    read = received(wire.Outputs(outputs=[one], scheduler_stats=stats, timestamp=1.5))
    (output,) = read.outputs
    assert (output.request_id, output.new_token_ids) == ("r", [3])
    assert output.finish_reason is vllm_engine.FinishReason.STOP
    assert output.stop_reason == 3
    assert output.events == [
        vllm_engine.EngineCoreEvent(vllm_engine.EngineCoreEventType.SCHEDULED, 2.5)
    ]
    assert output.kv_transfer_params == {"k": 1}
    prefill = output.prefill_stats
    assert (prefill.num_prompt_tokens, prefill.num_computed_tokens) == (9, 5)
    assert (prefill.num_cached_tokens, prefill.num_local_cached_tokens) == (4, 4)
    assert isinstance(output.new_logprobs, LogprobsLists)
    assert output.new_logprobs.logprob_token_ids.tolist() == [[3, 3, 8]]
    assert output.new_logprobs.logprobs.tolist() == [pytest.approx([-0.1, -0.1, -1.0])]
    assert output.new_logprobs.sampled_token_ranks.tolist() == [1]
    assert (read.scheduler_stats.num_running_reqs, read.scheduler_stats.num_waiting_reqs) == (2, 1)
    assert read.scheduler_stats.prefix_cache_stats.hits == 4
    assert read.timestamp == 1.5


@pytest.mark.parametrize("result", [None, True, ["generate"], [[1, 2]], {"a": 1}])
def test_an_answer_to_a_call_is_read_by_vllm(result: Any) -> None:
    read = received(wire.Outputs(utility_output=wire.UtilityAnswer(7, result=(None, result))))
    assert read.utility_output.call_id == 7
    assert read.utility_output.failure_message is None
    assert read.utility_output.result.result == result


def test_a_call_that_failed_is_read_by_vllm() -> None:
    answer = wire.UtilityAnswer(7, failure_message="no")
    read = received(wire.Outputs(utility_output=answer))
    assert read.utility_output.failure_message == "no"
    assert read.utility_output.result is None


def test_what_an_engine_says_of_itself_is_read_as_vllm_says_it() -> None:
    said = msgspec.msgpack.encode(ready_message(OPTIONS))
    read = msgspec.msgpack.decode(said, type=vllm_engine.EngineCoreReadyResponse)
    assert (read.max_model_len, read.num_gpu_blocks) == (512, OPTIONS.limits.blocks)
    assert set(ready_message(OPTIONS)) <= {
        each.name for each in dataclasses.fields(vllm_engine.EngineCoreReadyResponse)
    }
