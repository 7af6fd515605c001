"""vLLM's Messages API, as clients of Anthropic's use it: prefills, tools and what caches saved."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from vllm.entrypoints.anthropic import serving
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)

from loomserve.platform.http.ingress.messages import stream_error

_ASSISTANT = "assistant"
# As vLLM writes chunks, in which texts have no quotes that are not escaped.
_FAILED = 'data: {"error":'
_CALLS = '"tool_calls":[{'
_CREATED, _IGNORED = '"created_cache_tokens":', '"created_tokens":'
_ENDED, _CALLED = '"finish_reason":"stop"', '"finish_reason":"tool_calls"'


class Messages(AnthropicServingMessages):  # type: ignore[misc]
    """Answers ``/v1/messages``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        # Clients of Anthropic's API get that number always.
        super().__init__(*args, **{**options, "enable_prompt_tokens_details": True})

    @classmethod
    def to_chat_completion_request(
        cls,
        anthropic_request: AnthropicMessagesRequest | AnthropicCountTokensRequest,
        *,
        merge_inline_system: bool = False,
        **options: Any,
    ) -> ChatCompletionRequest:
        request = super().to_chat_completion_request(
            anthropic_request, merge_inline_system=merge_inline_system, **options
        )
        last: Any = request.messages[-1] if request.messages else {}
        if last.get("role") != _ASSISTANT or last.get("tool_calls"):
            return request
        if last.get("content"):
            request.add_generation_prompt, request.continue_final_message = False, True
        elif not last.get("reasoning"):
            # An empty one: there is nothing to go on with.
            request.messages = request.messages[:-1]
        return request

    def messages_full_converter(
        self, generator: ChatCompletionResponse
    ) -> AnthropicMessagesResponse:
        if generator.usage is not None and (told := generator.usage.prompt_tokens_details):
            # All that is computed goes to a cache, and would not count as input.
            told.created_cache_tokens = None
        answer = super().messages_full_converter(generator)
        called = any(block.type == "tool_use" for block in answer.content)
        if called and answer.stop_reason == "end_turn":
            answer.stop_reason = "tool_use"
        return answer

    async def message_stream_converter(
        self, generator: AsyncGenerator[str, None]
    ) -> AsyncGenerator[str, None]:
        chunks = _Chunks(generator)
        async for event in super().message_stream_converter(chunks.whole()):
            yield event
        if chunks.failure is not None:
            yield stream_error(chunks.failure)


class _Chunks:
    """A chat's stream of chunks, up to an error in it, which is none of vLLM's chunks."""

    def __init__(self, chunks: AsyncGenerator[str, None]) -> None:
        self.failure: str | None = None
        self._chunks = chunks
        self._called = False

    async def whole(self) -> AsyncGenerator[str, None]:
        async for chunk in self._chunks:
            if chunk.startswith(_FAILED):
                self.failure = chunk
                return
            self._called |= _CALLS in chunk
            counted = chunk.replace(_CREATED, _IGNORED)
            yield counted.replace(_ENDED, _CALLED) if self._called else counted


def use_messages() -> None:
    """Have vLLM's servers of this process answer so."""
    serving.AnthropicServingMessages = Messages
