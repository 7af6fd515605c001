"""Transforms a request into the prefill engine's share and the decode engine's rest."""

from __future__ import annotations

from copy import copy
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from loomserve.kvstore.server.protocol import HANDED_OVER, HANDED_OVER_BY, HANDS_OVER

_KV_TRANSFER = "kv_transfer_params"


def shareable(request: EngineCoreRequest) -> bool:
    """Whether another engine's KV of the request's prompt is as good as the engine's own."""
    params = request.sampling_params
    return not (
        params is None
        or request.resumable
        or request.mm_features
        or request.prompt_embeds is not None
        # A prefill replica may not have its adapter.
        or request.lora_request is not None
        # It wants the logits of its prompt, or speaks to this engine's own connector.
        or params.skip_reading_prefix_cache
        or _KV_TRANSFER in (params.extra_args or {})
    )


def first_token_only(request: EngineCoreRequest) -> EngineCoreRequest:
    """The request for the prefill engine: the prompt and one token, without text."""
    prompt = _with_kv_transfer(request, {HANDS_OVER: True})
    params = prompt.sampling_params
    params.max_tokens = 1
    params.min_tokens = min(1, params.min_tokens)
    # The front end makes text of it, and looks for stop strings.
    params.detokenize = False
    params.stop = []
    prompt.data_parallel_rank = None
    return prompt


def with_kv_from_store(request: EngineCoreRequest, node: str = "") -> EngineCoreRequest:
    """The request for EngineCore; the connector waits for the prompt's KV from the store. ``node``
    is the one whose store has it; empty: the engine's own."""
    said: dict[str, Any] = {HANDED_OVER: len(request.prompt_token_ids)}
    return _with_kv_transfer(request, said | ({HANDED_OVER_BY: node} if node else {}))


def take_holder(output: EngineCoreOutput) -> str:
    """The node whose store has what the prefill engine handed over; its client does not see it."""
    params = dict(output.kv_transfer_params or {})
    node = str(params.pop(HANDED_OVER_BY, ""))
    output.kv_transfer_params = params or None
    return node


def _with_kv_transfer(request: EngineCoreRequest, said: dict[str, Any]) -> EngineCoreRequest:
    changed = copy(request)
    changed.sampling_params = params = copy(request.sampling_params)
    params.extra_args = {**(params.extra_args or {}), _KV_TRANSFER: said}
    return changed
