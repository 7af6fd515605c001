"""A deadline passes through vLLM's own protocol to what its scheduler sees."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from vllm import SamplingParams
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.embed.protocol import (
    EmbeddingChatRequest,
    EmbeddingCompletionRequest,
)
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

from loomserve.platform.requests.engine_request import FORWARDED, HINTED, EngineRequest
from loomserve.platform.scheduling.policy.deadline import deadline_of

AT = 1_800_000_000.25
MESSAGES = [{"role": "user", "content": "hello"}]
PROTOCOLS: dict[str, tuple[type[BaseModel], ...]] = {
    "/v1/chat/completions": (ChatCompletionRequest,),
    "/v1/completions": (CompletionRequest,),
    "/v1/responses": (ResponsesRequest,),
    "/v1/messages": (AnthropicMessagesRequest,),
    "/v1/embeddings": (EmbeddingChatRequest, EmbeddingCompletionRequest),
    "/v1/tokenize": (TokenizeChatRequest, TokenizeCompletionRequest),
    "/v1/detokenize": (DetokenizeRequest,),
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
    assert has_place == HINTED


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
