"""A deadline passes through vLLM's own protocol to what its scheduler sees."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import vllm
from pydantic import BaseModel
from vllm import SamplingParams
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.classify.protocol import (
    ClassificationChatRequest,
    ClassificationCompletionRequest,
)
from vllm.entrypoints.pooling.embed.protocol import (
    CohereEmbedRequest,
    EmbeddingChatRequest,
    EmbeddingCompletionRequest,
)
from vllm.entrypoints.pooling.pooling.protocol import (
    IOProcessorRequest,
    PoolingChatRequest,
    PoolingCompletionRequest,
)
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest

from loomserve.platform.requests.endpoints import AT_ENGINE, ENDPOINTS
from loomserve.platform.requests.engine_request import FORWARDED, EngineRequest
from loomserve.platform.scheduling.policy.hints import deadline_of

AT = 1_800_000_000.25
MESSAGES = [{"role": "user", "content": "hello"}]
PROTOCOLS: dict[str, tuple[type[BaseModel], ...]] = {
    "/v1/chat/completions": (ChatCompletionRequest,),
    "/v1/completions": (CompletionRequest,),
    "/v1/responses": (ResponsesRequest,),
    "/v1/messages": (AnthropicMessagesRequest,),
    "/v1/messages/count_tokens": (AnthropicCountTokensRequest,),
    "/v1/embeddings": (EmbeddingChatRequest, EmbeddingCompletionRequest),
    "/v2/embed": (CohereEmbedRequest,),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), (RerankRequest,)),
    **dict.fromkeys(("/v1/score", "/score"), get_args(ScoreRequest)),
    **dict.fromkeys(
        ("/v1/classify", "/classify"),
        (ClassificationCompletionRequest, ClassificationChatRequest),
    ),
    **dict.fromkeys(
        ("/v1/pooling", "/pooling"),
        (PoolingCompletionRequest, PoolingChatRequest, IOProcessorRequest),
    ),
    "/v1/audio/transcriptions": (TranscriptionRequest,),
    "/v1/audio/translations": (TranslationRequest,),
    "/v1/tokenize": (TokenizeChatRequest, TokenizeCompletionRequest),
    "/v1/detokenize": (DetokenizeRequest,),
    "/v1/chat/completions/render": (ChatCompletionRequest,),
    "/v1/completions/render": (CompletionRequest,),
    "/v1/messages/render": (AnthropicMessagesRequest,),
}
RENDERING = {path for path, endpoint in ENDPOINTS.items() if not endpoint.computes}
"""No engine computes them, so none is told a deadline, or which blocks are whose."""


SOURCE = "\n".join(
    file.read_text() for file in (Path(vllm.__file__).parent / "entrypoints").rglob("*.py")
)
NOT_ROUTED = {
    # It keeps or looks up what an earlier request left.
    "/v1/responses/{response_id}/cancel",
    # For operators, who have the admin API.
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/start_profile", "/stop_profile"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/collective_rpc"),
    *("/sleep", "/wake_up", "/pause", "/resume", "/abort_requests", "/fault_tolerance/apply"),
    *("/init_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update"),
    *("/update_weights", "/finish_weight_update", "/update_weight_version"),
    *("/scale_elastic_ep", "/is_scaling_elastic_ep", "/release_kv_cache_memory"),
    *("/shutdown_weight_transfer_engine", "/weight_checker"),
    # Of SageMaker's and Cohere's servers; the endpoints behind them are routed.
    *("/ping", "/invocations", "/cohere/v2/chat", "/cohere/v2/chat/render"),
    # Of vLLM's own router to engines without tokenizers.
    *("/inference/v1/generate", "/v1/chat/completions/derender", "/v1/completions/derender"),
    # Others do as much: batches, completions with logprobs.
    *("/v1/chat/completions/batch", "/generative_scoring"),
    "/v1/messages/count_tokens",
    # New with vLLM 0.32, and nobody has asked for them.
    *("/v1/responses/render", "/v1/systemone"),
}


def sampling_params(path: str, body: dict[str, Any]) -> SamplingParams:
    request = PROTOCOLS[path][0].model_validate(body)
    if isinstance(request, AnthropicMessagesRequest):
        request = AnthropicServingMessages.to_chat_completion_request(request)
    return request.to_sampling_params(16, {})


def test_exactly_the_endpoints_that_have_a_place_for_a_deadline_are_given_one() -> None:
    assert PROTOCOLS.keys() == set(FORWARDED)
    has_place = {
        path
        for path, protocols in PROTOCOLS.items()
        if all("vllm_xargs" in protocol.model_fields for protocol in protocols)
    }
    assert has_place - RENDERING == {path for path, each in ENDPOINTS.items() if each.hints}


def test_exactly_the_endpoints_that_have_a_place_for_a_salt_are_given_one() -> None:
    has_place = {
        path
        for path, protocols in PROTOCOLS.items()
        if all("cache_salt" in protocol.model_fields for protocol in protocols)
    }
    given = {path for path, endpoint in ENDPOINTS.items() if endpoint.salted}
    assert has_place - RENDERING == given - RENDERING


def test_all_that_vllm_answers_is_routed_or_left_out_on_purpose() -> None:
    posts = set(re.findall(r"router\.post\(\s*\"(/[^\"]+)\"", SOURCE))
    assert len(posts) > 40
    assert posts - ENDPOINTS.keys() - AT_ENGINE.keys() - NOT_ROUTED == set()
    assert AT_ENGINE.keys() <= posts


def test_handlers_are_those_that_vllm_sets() -> None:
    assert [row for row in AT_ENGINE.values() if f"state.{row.handler} = " not in SOURCE] == []


def test_lists_are_fields_of_the_requests() -> None:
    for path, endpoint in ENDPOINTS.items():
        there = set().union(*(protocol.model_fields for protocol in PROTOCOLS[path]))
        assert there >= set(endpoint.lists), path


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
    ],
)
def test_the_scheduler_sees_the_deadline_to_the_bit(path: str, content: dict[str, Any]) -> None:
    body = {"model": "chat", "vllm_xargs": {"own": "x"}, **content}
    assert deadline_of(sampling_params(path, body).extra_args) is None
    told = EngineRequest(path, body).with_hints(deadline=AT)
    seen = sampling_params(path, dict(told.fields)).extra_args
    assert deadline_of(seen) == AT
    assert seen["own"] == "x"
