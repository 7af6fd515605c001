"""Transforms a request into the prefill engine's share and the decode engine's rest."""

from __future__ import annotations

from copy import copy
from enum import StrEnum
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from loomserve.kvstore.server.protocol import HANDED_OVER, HANDS_OVER
from loomserve.platform.scheduling.policy.deadline import DEADLINE

_KV_TRANSFER = "kv_transfer_params"
# Sampling parameters that do not look back at how many tokens, or which, were generated so far.
_WITHOUT_MEMORY = {
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids",
    "_eos_token_id", "_all_stop_token_ids", "logprobs", "logprob_token_ids", "flat_logprobs",
    "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "output_kind", "stream_interval", "skip_clone",
    "output_text_buffer_length", "skip_reading_prefix_cache", "extra_args",
}  # fmt: skip


class Handoff(StrEnum):
    """How much of a prefill engine's work a decode engine can use."""

    LOCAL = "local"  # none: it computes the prompt itself
    KV = "kv"  # the prompt's KV, and it samples the first token itself
    CONTINUED = "continued"  # and the first token


def usable(request: EngineCoreRequest) -> Handoff:
    """How much of ``request`` a prefill engine can do without changing the answer.

    A decode engine that continues after the prefill engine's first token takes that token for the
    prompt's last. Sampling that looks back at what was generated (penalties, seeds, grammars, ...)
    would see one token too few, so such a request shares its KV only.
    """
    if not shareable(request):
        return Handoff.LOCAL
    return Handoff.CONTINUED if _without_memory(request.sampling_params) else Handoff.KV


def shareable(request: EngineCoreRequest) -> bool:
    """Whether another engine's KV of the request's prompt is as good as the engine's own."""
    params = request.sampling_params
    return not (
        params is None
        or request.resumable
        or request.mm_features
        or request.prompt_embeds is not None
        # Each engine numbers adapters in its own way, and the number is what the other would see.
        or request.lora_request is not None
        # It wants the logits of its prompt, or speaks to this engine's own connector.
        or params.skip_reading_prefix_cache
        or _KV_TRANSFER in (params.extra_args or {})
    )


def _without_memory(params: SamplingParams) -> bool:
    # Any other entry of extra_args is for a logits processor.
    return (params.extra_args or {}).keys() <= {DEADLINE} and all(
        field.name in _WITHOUT_MEMORY or getattr(params, field.name) in (field.default, None, [])
        for field in msgspec.structs.fields(params)
    )


def first_token_only(request: EngineCoreRequest) -> EngineCoreRequest:
    """The request for the prefill engine: the prompt and one token, without text."""
    prompt = _with_kv_transfer(request, {HANDS_OVER: True})
    params = prompt.sampling_params
    params.max_tokens = 1
    params.min_tokens = min(1, params.min_tokens)
    # The decode engine makes text of it, and looks for stop strings.
    params.detokenize = False
    params.stop = []
    prompt.data_parallel_rank = None
    return prompt


def with_kv_from_store(request: EngineCoreRequest) -> EngineCoreRequest:
    """The request for EngineCore; the connector waits for the prompt's KV from the store."""
    return _with_kv_transfer(request, {HANDED_OVER: len(request.prompt_token_ids)})


def after_first_token(request: EngineCoreRequest, tokens: list[int]) -> EngineCoreRequest:
    """The request for EngineCore to continue after the ``tokens`` of a prefill engine."""
    rest = with_kv_from_store(request)
    params = rest.sampling_params
    params.max_tokens -= len(tokens)
    params.min_tokens = max(0, params.min_tokens - len(tokens))
    rest.prompt_token_ids = [*request.prompt_token_ids, *tokens]
    return rest


def _with_kv_transfer(request: EngineCoreRequest, said: dict[str, Any]) -> EngineCoreRequest:
    changed = copy(request)
    changed.sampling_params = params = copy(request.sampling_params)
    params.extra_args = {**(params.extra_args or {}), _KV_TRANSFER: said}
    return changed


def on_our_clock(output: EngineCoreOutput, sent_at: float) -> EngineCoreOutput:
    """Shift the prefill engine's events to our monotonic clock, taking sending for queueing."""
    if output.events:
        ahead = output.events[0].timestamp - sent_at
        for event in output.events:
            event.timestamp -= ahead
    return output


def encode(message: EngineCoreRequest | EngineCoreOutput) -> bytes:
    # vLLM's encoder puts large arrays beside the message.
    return msgspec.msgpack.encode([bytes(part) for part in MsgpackEncoder().encode(message)])


def decode(message: bytes, kind: type[Any]) -> Any:
    return MsgpackDecoder(kind).decode(msgspec.msgpack.decode(message, type=list[bytes]))
